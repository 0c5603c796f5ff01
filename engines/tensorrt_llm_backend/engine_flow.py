"""The engine flow: our loop over two built engines, one message to the worker for each step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from engines.base import EngineInfo
from engines.config import DraftKind, GenerationRequest
from engines.drafting import Draft, DraftRequest, EchoProposer, PromptLookupProposer, Proposer
from engines.errors import GenerationError
from engines.generation import Rounds
from engines.generators import finished
from engines.rejection import Verdict
from engines.speculative import Pass, PrefillChunk, Round, Verification
from engines.tensorrt_llm_backend.worker_process import Worker
from engines.text_engine import TextEngine
from engines.tokenizer import Text

LONGER = ", or build with a larger max_seq_len"
WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What the built engines hold, and how long a step may take."""

    max_seq_len: int  # prompt and output
    max_draft_len: int
    step_timeout_s: float
    accepts_logits: bool


class EngineFlowEngine(TextEngine):
    """A target engine with a draft engine, or with prompt lookup alone."""

    def __init__(
        self,
        info: EngineInfo,
        text: Text,
        draft_kinds: tuple[DraftKind, ...],
        worker: Worker,
        limits: Limits,
    ) -> None:
        super().__init__(info, text, draft_kinds, longer=LONGER)
        self._worker = worker
        self._limits = limits

    @property
    def is_open(self) -> bool:
        return self._worker.is_alive

    def check(self, request: GenerationRequest) -> None:
        super().check(request)
        if request.num_draft_tokens > self._limits.max_draft_len:
            raise ValueError(
                f"num_draft_tokens is {request.num_draft_tokens}, and the target engine is built "
                f"for {self._limits.max_draft_len} at most: lower it, or build with a larger "
                "max_draft_len"
            )
        is_drafted = request.draft_kind != "none"
        if is_drafted and not request.sampling.is_greedy and not self._limits.accepts_logits:
            raise ValueError(
                f"temperature is {request.sampling.temperature}: engines that accept by tokens "
                "decode greedily only (a draw of the target's that merely differs from the draft "
                "would favour the draft's tokens); use temperature 0, or build with acceptance "
                "'logits'"
            )

    def warm_up(self, request: GenerationRequest) -> Generator[None, None, None]:
        self.check(request)
        num_tokens = WARM_UP_ROUNDS * (request.num_draft_tokens + 1)
        short = replace(request, max_new_tokens=num_tokens)
        # Prompt lookup may find nothing, and a warm-up is to verify.
        with closing(self._rounds(short, EchoProposer())) as rounds:
            for _ in rounds:
                yield

    def close(self) -> None:
        self._worker.close()

    def rounds(self, request: GenerationRequest) -> Rounds:
        yield from self._rounds(request, PromptLookupProposer())

    def _rounds(self, request: GenerationRequest, lookup: Proposer) -> Rounds:
        sampling = request.sampling
        draws = {"temperature": sampling.temperature, "top_k": sampling.top_k}
        draws |= {"top_p": sampling.top_p, "seed": sampling.seed}
        self._ask(
            "begin",
            prompt=list(request.prompt_token_ids),
            sampling=None if sampling.is_greedy else draws,
            uses_draft=request.draft_kind == "model",
        )
        yield PrefillChunk(len(request.prompt_token_ids) - 1)
        if request.draft_kind == "none":
            yield from self._plain(request)
        else:
            yield from self._speculative(request, lookup)

    def _speculative(self, request: GenerationRequest, lookup: Proposer) -> Rounds:
        context = list(request.prompt_token_ids)
        max_tokens = self._max_tokens(request)
        random = Random(request.sampling.seed)  # noqa: S311 - sampling, not secrets
        if request.draft_kind == "prompt_lookup":
            for _ in lookup.prefill(context[:-1]):
                pass
        is_last = False
        while not is_last:
            # A step adds one token to those it accepts, so it drafts one fewer than are left.
            num_wanted = min(request.num_draft_tokens, max_tokens - len(context) - 1)
            given = None
            if request.draft_kind == "prompt_lookup":
                wanted = DraftRequest(context, num_wanted, request.sampling, random)
                given = list(lookup.propose(wanted).token_ids) if num_wanted > 0 else []
            reply = self._ask("step", num_draft_tokens=num_wanted, draft=given)
            round_ = self._round(reply, num_wanted if given is None else len(given))
            context += round_.output_token_ids
            is_last = round_.is_last or len(context) >= max_tokens
            yield replace(round_, is_last=is_last)

    def _round(self, reply: dict[str, Any], num_drafted: int) -> Round:
        """Return what a step came to: the drafts that the target repeated are accepted."""
        proposed, tokens = tuple(reply["proposed"]), tuple(reply["tokens"])
        num_accepted = 0
        for drafted, token_id in zip(proposed, tokens, strict=False):
            if drafted != token_id:
                break
            num_accepted += 1
        if len(proposed) != num_drafted or len(tokens) != num_accepted + 1:
            raise GenerationError(
                f"the engines returned {len(proposed)} of {num_drafted} drafts and {len(tokens)} "
                f"tokens, of which {num_accepted} are drafts, where one more is due: their limits "
                "do not fit; build them anew"
            )
        stops = self._text.vocabulary.stop_token_ids
        stop = next((place for place, id_ in enumerate(tokens) if id_ in stops), None)
        unknown: tuple[None, ...] = (None,) * (num_drafted + 1)
        return Round(
            draft=Draft(proposed, None, unknown[1:]),
            verification=Verification(Verdict(num_accepted, tokens[-1]), unknown, unknown, ()),
            output_token_ids=tokens if stop is None else tokens[: stop + 1],
            is_last=stop is not None,
            draft_s=reply["draft_s"],
            target_s=reply["target_s"],
        )

    def _plain(self, request: GenerationRequest) -> Rounds:
        """Yield the tokens of the target alone, which decodes on by itself and is never paused."""
        num_wanted = self._max_tokens(request) - len(request.prompt_token_ids)
        stops = self._text.vocabulary.stop_token_ids
        num_tokens, is_last = 0, False
        asked = self._worker.ask(
            "plain",
            self._limits.step_timeout_s,
            max_new_tokens=num_wanted,
            stop_token_ids=sorted(stops),
        )
        try:
            for item in asked:
                if item is None or is_last:
                    continue
                # Tokens that arrive together share the time: each took a pass of its own.
                step_s = item["step_s"] / len(item["tokens"])
                for token_id in item["tokens"]:
                    num_tokens += 1
                    is_last = token_id in stops or num_tokens == num_wanted
                    yield Pass((token_id,), 0, 0, is_last, step_s)
                    if is_last:
                        break
        except (GeneratorExit, KeyboardInterrupt):
            self._worker.kill()  # it would go on, and its answers would reach whoever asks next
            raise
        if not is_last:
            raise GenerationError(
                f"the target engine ended after {num_tokens} of {num_wanted} tokens, without a "
                "stop token, when nothing was drafted: it cannot be its own baseline; build it "
                "anew, with TensorRT-LLM 1.0 or newer"
            )

    def _max_tokens(self, request: GenerationRequest) -> int:
        num_prompt_tokens = len(request.prompt_token_ids)
        return min(num_prompt_tokens + request.max_new_tokens, self._limits.max_seq_len)

    def _ask(self, operation: str, **values: Any) -> dict[str, Any]:
        return finished(self._worker.ask(operation, self._limits.step_timeout_s, **values))
