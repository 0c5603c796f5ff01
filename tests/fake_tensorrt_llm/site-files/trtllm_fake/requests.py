"""One request to a runner: what is refused, what is silently shortened, and its passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtllm_fake.api import Given
from trtllm_fake.decoding import Ending, Sampling, decode, verify
from trtllm_fake.state import warn
from trtllm_fake.table import Logits, TableModel

if TYPE_CHECKING:
    from trtllm_fake.runner import ModelRunnerCpp


@dataclass
class Request:
    """A prompt with what has been decoded of it."""

    prompt: list[int]
    max_new_tokens: int
    draft_ids: list[int] | None = None  # None: a plain request
    draft_logits: Logits | None = None  # [num_draft_tokens, vocab_size_padded]
    stop_words: Sequence[Sequence[int]] = ()
    new_ids: list[int] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)  # one row a new id

    def passes(self, model: TableModel, given: Given) -> Iterator[bool]:
        """Decode, and yield True after every pass. One with a draft is over after the first."""
        # With neither top-k nor top-p the executor is greedy, whatever the temperature.
        top_k = given.top_k if given.top_k or given.top_p else 1
        sampling = Sampling(given.temperature, top_k, given.top_p, given.random_seed)
        if self.draft_ids is not None:
            draft = (self.draft_ids, self.draft_logits)
            random = sampling.generator()
            new_ids, logits = verify(model, self.prompt, *draft, sampling, random, given.end_id)
            self.new_ids = new_ids[: self.max_new_tokens]
            self.logits = logits[: self.max_new_tokens]
            yield True
            return
        end = Ending(given.end_id, self.stop_words)
        for token_id, row in decode(model, self.prompt, self.max_new_tokens, sampling, end):
            self.new_ids.append(token_id)
            self.logits.append(row)
            yield True


def checked_requests(runner: ModelRunnerCpp, given: Given) -> list[Request]:
    """Return the requests of one call of generate, or raise what the first wrong one causes."""
    if given.stopping_criteria is not None:
        raise RuntimeError("Stopping criteria is not supported in C++ session.")
    if given.num_beams not in (None, 1):
        raise RuntimeError("Speculative decoding only works for beam width == 1")
    num_requests = len(given.batch_input_ids)
    if num_requests > runner.max_batch_size:
        _refuse("batch size", num_requests, runner.max_batch_size)
    requests = [
        Request(
            prompt=prompt.tolist(),
            max_new_tokens=given.max_new_tokens,
            draft_ids=draft_ids,
            draft_logits=None if draft_logits is None else draft_logits.float().numpy(),
            stop_words=stop_words or (),
        )
        for prompt, draft_ids, draft_logits, stop_words in zip(
            given.batch_input_ids,
            _one_each(given.draft_tokens_list, num_requests),
            _one_each(given.draft_logits_list, num_requests),
            _one_each(given.stop_words_list, num_requests),
            strict=True,
        )
    ]
    for request in requests:
        _check_draft(runner, request, given)
        _check_lengths(runner, request)
        _shorten(runner, request)
    if given.output_generation_logits and not runner.may_return_logits:
        raise RuntimeError("Generation logits need gather_generation_logits")
    return requests


def _one_each(items: list[Any] | None, num_requests: int) -> list[Any]:
    if items is None:
        return [None] * num_requests
    if len(items) != num_requests:
        raise RuntimeError(f"{len(items)} lists for {num_requests} requests")
    return items


def _check_draft(runner: ModelRunnerCpp, request: Request, given: Given) -> None:
    draft_ids, draft_logits = request.draft_ids, request.draft_logits
    if draft_ids is None:
        if draft_logits is not None:
            raise RuntimeError("draft logits without draft tokens")
        return
    if not draft_ids:
        raise RuntimeError("Assertion failed: !mTokens.empty()")
    limit = runner.engine.limits["max_draft_len"]
    if limit == 0:
        raise RuntimeError(
            f"Draft tokens ({len(draft_ids)}) larger than maximum number of draft tokens (0)"
        )
    if len(draft_ids) > limit:
        raise RuntimeError(f"{len(draft_ids)} exceeds maximum draft tokens length ({limit})")
    if draft_logits is not None:
        wanted = (len(draft_ids), runner.engine.model.vocab_size_padded)
        if draft_logits.shape != wanted:
            raise RuntimeError(f"draft logits have the shape {draft_logits.shape}, not {wanted}")
        if not runner.engine.limits["gather_generation_logits"]:
            raise RuntimeError("draft logits need an engine with gather_generation_logits")
    elif given.top_k != 1:
        raise AssertionError("not lossless: top_k != 1 with a draft and without its logits")


def _check_lengths(runner: ModelRunnerCpp, request: Request) -> None:
    length, new = len(request.prompt), request.max_new_tokens
    if length > runner.max_input_len:
        _refuse("Maximum input length", length, runner.max_input_len)
    if length + new > runner.max_seq_len:
        sum_ = f"Maximum input length ({length}) + maximum new tokens"
        _refuse(sum_, new, runner.max_seq_len)
    limit = runner.engine.max_prompt_len
    if not 1 <= length <= limit:
        raise RuntimeError(f"Prompt length ({length}) exceeds maximum input length ({limit}).")
    for token_id in (*request.prompt, *(request.draft_ids or ())):
        if not 0 <= token_id < runner.engine.facts["vocab_size"]:
            raise RuntimeError(f"token id {token_id} is not in the vocabulary")


def _refuse(what: str, value: int, limit: int) -> None:
    raise RuntimeError(f"{what} ({value}) exceeds the engine or specified limit ({limit})")


def _shorten(runner: ModelRunnerCpp, request: Request) -> None:
    """Do what the executor does in silence, but for a warning that nobody reads."""
    length = len(request.prompt)
    room = runner.engine.max_prompt_len - length
    if request.draft_ids is not None and len(request.draft_ids) > room:
        warn(f"Draft tokens shortened from {len(request.draft_ids)} to {room}")
        request.draft_ids = request.draft_ids[:room]
    left = runner.engine.limits["max_seq_len"] - length - len(request.draft_ids or ())
    if request.max_new_tokens > left:
        warn(f"max_new_tokens shortened from {request.max_new_tokens} to {left}")
        request.max_new_tokens = left
