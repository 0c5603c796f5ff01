"""Rounds of token ids to events with text and times, for every back end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from time import perf_counter
from typing import assert_never

from engines.config import GenerationRequest
from engines.detokenizer import Decode, Detokenizer
from engines.events import (
    Finish,
    GenerationEvent,
    Prefill,
    Step,
    Token,
    TokenOrigin,
    TopEntry,
    Totals,
)
from engines.speculative import Pass, PrefillChunk, Round

Rounds = Generator[PrefillChunk | Round | Pass | Totals, None, None]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a generation needs of a tokenizer."""

    decode: Decode
    stop_token_ids: frozenset[int]
    control_token_ids: frozenset[int]


class Stopwatch:
    """Counts the seconds since it was made, less those for which it was paused."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._paused_at = self._started

    @property
    def elapsed_s(self) -> float:
        """Return the seconds counted so far. The stopwatch must be running."""
        return self._clock() - self._started

    def pause(self) -> None:
        self._paused_at = self._clock()

    def resume(self) -> None:
        self._started += self._clock() - self._paused_at


def generate_events(
    rounds: Rounds,
    request: GenerationRequest,
    vocabulary: Vocabulary,
) -> Generator[GenerationEvent, None, None]:
    """Yield the events of one generation, from the rounds of a loop that has not begun yet.

    The clock stands still while the consumer holds the stream, so drawing is never measured. A
    library that goes on meanwhile times its passes itself. Closing the generator closes the loop.
    """
    stopwatch = Stopwatch()
    step_builder = StepBuilder(vocabulary, request)
    last_token_id, elapsed_s, totals = None, 0.0, Totals()
    with closing(rounds):
        for item in rounds:
            event: GenerationEvent
            match item:
                case PrefillChunk():
                    num_prompt_tokens = len(request.prompt_token_ids)
                    event = Prefill(num_prompt_tokens, item.num_cached_tokens, stopwatch.elapsed_s)
                case Round():
                    event = step_builder.build(item, stopwatch)
                    last_token_id = item.output_token_ids[-1]
                case Pass():
                    event = step_builder.build_outcome(item, elapsed_s + item.step_s)
                    last_token_id = item.output_token_ids[-1]
                case Totals():
                    totals = item
                    continue
                case _:
                    assert_never(item)
            elapsed_s = event.elapsed_s
            stopwatch.pause()
            yield event
            stopwatch.resume()
    is_stopped = last_token_id in vocabulary.stop_token_ids
    yield Finish("stop" if is_stopped else "length", elapsed_s, totals)


class StepBuilder:
    """Turns rounds into steps, in order: it holds the text of unfinished characters."""

    def __init__(self, vocabulary: Vocabulary, request: GenerationRequest) -> None:
        self._vocabulary = vocabulary
        self._is_greedy = request.sampling.is_greedy
        self._detokenizer = Detokenizer(vocabulary.decode)

    def build(self, round_: Round, stopwatch: Stopwatch) -> Step:
        """Return the next step; the clock is read last, when its text is ready."""
        drafted = round_.draft.token_ids
        num_output = len(round_.output_token_ids)
        num_accepted = min(round_.verification.verdict.num_accepted_tokens, num_output)

        tokens = [
            self._token(self._detokenizer, round_, position, token_id, "accepted")
            for position, token_id in enumerate(drafted[:num_accepted])
        ]
        dropped_text = self._detokenizer.fork()
        rejected = []
        for position, token_id in enumerate(drafted[num_accepted:], start=num_accepted):
            origin: TokenOrigin = "rejected" if position == num_accepted else "unverified"
            if num_output == num_accepted:  # a stop token ended the output before this one
                origin = "discarded"
            rejected.append(self._token(dropped_text, round_, position, token_id, origin))
        if num_output > num_accepted:
            origin = "recovered" if rejected else "bonus" if drafted else "target"
            next_token_id = round_.output_token_ids[-1]
            tokens.append(
                self._token(self._detokenizer, round_, len(drafted), next_token_id, origin)
            )
        if round_.is_last and (rest := self._detokenizer.flush()):
            tokens[-1] = replace(tokens[-1], text=tokens[-1].text + rest)
        return Step(
            tokens=tuple(tokens),
            rejected=tuple(rejected),
            num_draft_tokens=len(drafted),
            draft_s=round_.draft_s,
            target_s=round_.target_s,
            elapsed_s=stopwatch.elapsed_s,
        )

    def build_outcome(self, pass_: Pass, elapsed_s: float) -> Step:
        """Return the next step where its drafts are not known, only what became of them."""
        num_output = len(pass_.output_token_ids)
        num_drafted, num_accepted = pass_.num_draft_tokens, pass_.num_accepted_tokens
        origins: list[TokenOrigin] = ["unreported"] * num_output
        if num_accepted is not None:
            origins[:num_accepted] = ["accepted"] * num_accepted
            if num_output > num_accepted and num_drafted is not None:
                origins[-1] = _last_origin(pass_, num_accepted, num_drafted)
        tokens = []
        for token_id, origin in zip(pass_.output_token_ids, origins, strict=True):
            text, control = self._words(self._detokenizer, token_id)
            tokens.append(Token(token_id, text, origin, control))
        if pass_.is_last and (rest := self._detokenizer.flush()):
            tokens[-1] = replace(tokens[-1], text=tokens[-1].text + rest)
        return Step(
            tokens=tuple(tokens),
            rejected=() if num_drafted is not None and num_drafted == num_accepted else None,
            num_draft_tokens=num_drafted,
            draft_s=0.0 if num_drafted == 0 else None,
            target_s=pass_.step_s,
            elapsed_s=elapsed_s,
        )

    def _token(
        self,
        detokenizer: Detokenizer,
        round_: Round,
        position: int,  # in the draft; behind it for the token that follows
        token_id: int,
        origin: TokenOrigin,
    ) -> Token:
        draft, verification = round_.draft, round_.verification
        num_accepted = verification.verdict.num_accepted_tokens
        is_drafted = position < len(draft.token_ids)
        is_judged = not is_drafted or position <= num_accepted
        # The token that follows the accepted ones was drawn from the row of the first rejected one.
        row = position if is_drafted else num_accepted
        text, control = self._words(detokenizer, token_id)
        return Token(
            token_id,
            text,
            origin,
            control,
            target_prob=verification.target_probs[position] if is_judged else None,
            draft_prob=draft.reported_probs[position] if is_drafted else None,
            uniform=verification.uniforms[position] if is_judged and not self._is_greedy else None,
            top_target=self._entries(verification.top_target, row) if is_judged else (),
            top_draft=self._entries(draft.top, row),
        )

    def _words(self, detokenizer: Detokenizer, token_id: int) -> tuple[str, str]:
        """Return what a token adds to the output, and its name where it is a control token."""
        if token_id in self._vocabulary.control_token_ids:
            return "", self._vocabulary.decode([token_id])
        return detokenizer.push(token_id), ""

    def _entries(self, rows: tuple[list[tuple[int, float]], ...], row: int) -> tuple[TopEntry, ...]:
        if row >= len(rows):
            return ()
        return tuple(TopEntry(id_, self._vocabulary.decode([id_]), prob) for id_, prob in rows[row])


def _last_origin(pass_: Pass, num_accepted: int, num_drafted: int) -> TokenOrigin:
    """Return the part of the token behind the accepted ones."""
    if num_drafted == 0:
        return "target"
    if num_accepted == num_drafted:
        return "bonus"
    # The end of a text may have been drafted, too: nothing behind it tells.
    return "unreported" if pass_.is_last else "recovered"
