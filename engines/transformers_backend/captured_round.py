"""CapturedRounds: rounds that a device makes by itself, from the context's end to the verdict.

All draft passes are one CUDA graph, the target's pass with the rejection rule is another: the host
sends the last two tokens and the numbers to draw by, and waits once for what was decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

import torch

from engines.config import GenerationRequest, SamplingParams
from engines.drafting import Draft
from engines.rejection import Verdict, judge_draft, judge_greedy, probs_of
from engines.sampling import draw_entry, require_entry, softmax, to_probs
from engines.speculative import PrefillChunk, StepwiseRounds, Verification, VerifiedDraft
from engines.transformers_backend.captured import CapturedModel, CapturedPasses
from engines.transformers_backend.cuda_graph import replayable
from engines.transformers_backend.device import mark, seconds_between

# The draft's first pass reads two tokens in every round. Behind a draft that was kept whole both
# are new to it, else it writes the first one's keys and values again as they were.
NUM_LAST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What is fixed in a captured round."""

    num_draft_tokens: int  # 0: a plain step
    sampling: SamplingParams  # its seed plays no part
    num_top_tokens: int

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        sampling = replace(request.sampling, seed=0)
        return cls(request.num_draft_tokens, sampling, request.num_top_tokens)

    @property
    def num_uniforms(self) -> tuple[int, int]:
        """Return how many numbers the draft draws by, and how many the target."""
        num_drawn = 0 if self.sampling.is_greedy else self.num_draft_tokens
        return num_drawn, self.num_draft_tokens + 1


@dataclass(slots=True)
class _Drafted:
    """A draft on the device."""

    token_ids: torch.Tensor  # [num_draft_tokens] int64, each in the vocabulary
    entries: torch.Tensor  # the same as they were drawn: vocab_size is none
    probs: torch.Tensor  # [num_draft_tokens, vocab_size], what each was drawn from or chosen by


class CapturedRound:
    """One round of a pair over captured passes."""

    @torch.inference_mode()
    def __init__(
        self,
        target: CapturedPasses,
        draft: CapturedPasses | None,
        shape: RoundShape,
        *,
        vocab_size: int,
    ) -> None:
        """Capture it.

        Args:
            target: Has captured passes over one token and over one more than are drafted.
            draft: Likewise over one and two; None where nothing is drafted.
            shape: What it is captured for.
            vocab_size: Of the tokenizer: what lies behind in the logits is padding.
        """
        self.shape = shape
        self._target, self._draft = target, draft
        self._vocab_size = vocab_size
        device = target.device
        # Ids and counts are exact in float64, so that one transfer brings them and the uniforms.
        num_given = NUM_LAST_TOKENS + 1 + sum(shape.num_uniforms)
        self._given = torch.zeros(num_given, dtype=torch.float64, device=device)
        self._given[NUM_LAST_TOKENS] = NUM_LAST_TOKENS
        self._offsets = torch.arange(shape.num_draft_tokens + 1, device=device)
        self._drafted = _Drafted(
            token_ids=torch.zeros(0, dtype=torch.int64, device=device),
            entries=torch.zeros(0, dtype=torch.int64, device=device),
            probs=torch.zeros((0, vocab_size), device=device),
        )
        self._propose_again = None
        if draft is not None and shape.num_draft_tokens > 0:
            with draft.quickest():
                self._propose_again = replayable(self._propose, device)
                self._drafted = self._propose_again()
        with target.quickest():
            self._judge_again = replayable(self._judge, device)

    @torch.inference_mode()
    def __call__(
        self, last_token_ids: Sequence[int], num_context_tokens: int, uniforms: Sequence[float]
    ) -> VerifiedDraft:
        """Draft, verify and decide.

        Args:
            last_token_ids: The last two tokens of the context.
            num_context_tokens: How many it has. The caches hold all but the last.
            uniforms: What is drawn by: first the draft, then the target.

        Raises:
            GenerationError: A model's logits are not numbers.
        """
        device = self._target.device
        started = mark(device)
        given = torch.tensor([*last_token_ids, num_context_tokens, *uniforms], dtype=torch.float64)
        self._given.copy_(given, non_blocking=True)
        if self._propose_again is not None:
            self._drafted = self._propose_again()
        drafted = mark(device)
        decided = self._judge_again()
        judged = mark(device)
        values = iter(decided.tolist())  # waits for the device
        draft, verification = self._read(values, tuple(uniforms[self.shape.num_uniforms[0] :]))
        return VerifiedDraft(
            draft, verification, seconds_between(started, drafted), seconds_between(drafted, judged)
        )

    def _propose(self) -> _Drafted:
        assert self._draft is not None
        sampling = self.shape.sampling
        ids = self._given[:NUM_LAST_TOKENS].long()
        end = self._given[NUM_LAST_TOKENS].long()
        positions = end - NUM_LAST_TOKENS + torch.arange(NUM_LAST_TOKENS, device=end.device)
        entries, rows = [], []
        for number in range(self.shape.num_draft_tokens):
            logits = self._draft.step(ids, positions)[-1:, : self._vocab_size].float()
            if sampling.is_greedy:
                rows.append(softmax(logits))
                entries.append(logits.argmax(-1))
            else:
                rows.append(to_probs(logits, sampling))
                uniform = self._given[NUM_LAST_TOKENS + 1 + number]
                entries.append(draw_entry(rows[-1][0], uniform)[None])
            ids, positions = self._in_vocabulary(entries[-1]), positions[-1:] + 1
        drawn = torch.cat(entries)
        return _Drafted(self._in_vocabulary(drawn), drawn, torch.cat(rows))

    def _judge(self) -> torch.Tensor:
        """Return what was decided, as `_read` takes it apart."""
        sampling, drafted = self.shape.sampling, self._drafted
        last_id = self._given[NUM_LAST_TOKENS - 1 : NUM_LAST_TOKENS].long()
        end = self._given[NUM_LAST_TOKENS].long()
        logits = self._target.step(
            torch.cat([last_id, drafted.token_ids]), end - 1 + self._offsets
        )[:, : self._vocab_size].float()
        if sampling.is_greedy:
            probs = softmax(logits)
            num_accepted, next_id = judge_greedy(drafted.token_ids, logits.argmax(-1))
        else:
            probs = to_probs(logits, sampling)
            uniforms = self._given[-self.shape.num_uniforms[1] :]
            num_accepted, next_id = judge_draft(drafted.token_ids, drafted.probs, probs, uniforms)
        next_row = probs.index_select(0, num_accepted[None])
        parts = [
            num_accepted[None],
            next_id[None],
            drafted.entries,
            probs_of(drafted.token_ids, drafted.probs),
            probs_of(drafted.token_ids, probs[:-1]),
            probs_of(self._in_vocabulary(next_id[None]), next_row),
        ]
        if self.shape.num_top_tokens:
            for rows in (drafted.probs, probs):
                top = rows.topk(self.shape.num_top_tokens)
                parts += [top.indices.flatten(), top.values.flatten()]
        return torch.cat([part.double() for part in parts])

    def _read(
        self, values: Iterator[float], uniforms: tuple[float, ...]
    ) -> tuple[Draft, Verification]:
        """Return the draft and its verification from what was decided on the device."""
        num_drafted, num_top = self.shape.num_draft_tokens, self.shape.num_top_tokens
        num_accepted, next_id = int(next(values)), int(next(values))
        token_ids = [int(value) for value in islice(values, num_drafted)]
        for token_id in (*token_ids, next_id):
            require_entry(token_id, self._vocab_size)
        draft_probs = tuple(islice(values, num_drafted))
        target_probs = tuple(islice(values, num_drafted + 1))

        def top_rows(num_rows: int) -> tuple[list[tuple[int, float]], ...]:
            ids = [int(value) for value in islice(values, num_rows * num_top)]
            entries = list(zip(ids, islice(values, num_rows * num_top), strict=True))
            return tuple(
                entries[row * num_top : (row + 1) * num_top]
                for row in range(num_rows if num_top else 0)
            )

        # What the draft was drawn from stays on the device, where it was judged.
        draft = Draft(tuple(token_ids), None, draft_probs, top_rows(num_drafted))
        top_target = top_rows(num_drafted + 1)[: num_accepted + 1]
        verdict = Verdict(num_accepted, next_id)
        return draft, Verification.of(verdict, draft, target_probs, uniforms, top_target)

    def _in_vocabulary(self, entries: torch.Tensor) -> torch.Tensor:
        """Return ids that a model can read, also where none was drawn."""
        return entries.clamp(max=self._vocab_size - 1)


@dataclass(slots=True)
class CapturedRounds:
    """Rounds by the device alone where they are of the captured shape, else pass by pass."""

    round: CapturedRound
    draft: CapturedModel | None
    target: CapturedModel
    stepwise: StepwiseRounds  # over the same two

    def prefill(self, token_ids: Sequence[int]) -> Iterator[PrefillChunk]:
        return self.stepwise.prefill(token_ids)

    def make(self, context_token_ids: Sequence[int], num_wanted: int) -> VerifiedDraft:
        shape, num_tokens = self.round.shape, len(context_token_ids)
        if num_wanted != shape.num_draft_tokens or num_tokens < NUM_LAST_TOKENS:
            return self.stepwise.make(context_token_ids, num_wanted)
        uniforms = [self.stepwise.random.random() for _ in range(sum(shape.num_uniforms))]
        made = self.round(context_token_ids[-NUM_LAST_TOKENS:], num_tokens, uniforms)
        self.target.num_cached_tokens = num_tokens + num_wanted
        if self.draft is not None:  # it never reads the last token it drafts
            self.draft.num_cached_tokens = num_tokens + num_wanted - 1
        return made

    def keep(self, num_tokens: int) -> None:
        self.stepwise.keep(num_tokens)
