"""Runs and distillations on a terminal: tokens with their marks, figures, reports."""

from __future__ import annotations

from engines.base import BuildProgress
from engines.distill.spec import DistillProgress
from engines.events import DROPPED_ORIGINS, Step, Token, TokenOrigin
from engines.pairs.compatibility import OUTCOMES, PairReport
from engines.stats import GenerationStats

_STYLES: dict[TokenOrigin, str] = {
    "accepted": "\x1b[32m",  # green
    "recovered": "\x1b[33m",  # yellow
    "bonus": "\x1b[36m",  # cyan
    "target": "",
    "unreported": "\x1b[4m",  # underlined
    "rejected": "\x1b[31;9m",  # red, struck through
    "unverified": "\x1b[2;9m",  # dim, struck through
    "discarded": "\x1b[2;9m",
}
_DIM = "\x1b[2m"
_RESET = "\x1b[0m"


def printable(text: str) -> str:
    """Return text without control characters, which would steer the terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd"
        for character in text
    )


def step_text(step: Step, *, colour: bool) -> str:
    """Return what a step adds to the screen: dropped drafts too, where colour can mark them."""
    if not colour:
        return printable("".join(token.text for token in step.tokens))
    pieces = [_coloured(token) for token in step.tokens_in_place]
    if step.rejected is None and step.num_dropped_tokens:
        pieces.insert(step.dropped_place, f"{_DIM}⊘{step.num_dropped_tokens}{_RESET}")
    return "".join(pieces)


def _coloured(token: Token) -> str:
    text = printable(token.text or token.control)
    if token.origin in DROPPED_ORIGINS:
        text = text.replace("\n", "⏎")
    return f"{_STYLES[token.origin]}{text}{_RESET}" if text else ""


def stats_lines(name: str, stats: GenerationStats) -> list[str]:
    """Return the figures of one side, for people."""
    speed = "–" if stats.tokens_per_second is None else f"{stats.tokens_per_second:.1f} tokens/s"
    first = "–" if stats.time_to_first_token_s is None else f"{stats.time_to_first_token_s:.2f} s"
    steps = ", steps not reported" if stats.num_steps is None else f" in {stats.num_steps} steps"
    lines = [
        f"{name}: {stats.num_output_tokens} tokens{steps}, {speed}, "
        f"first token after {first}, ended by {stats.finish_reason}"
    ]
    if stats.num_draft_tokens != 0:
        lines.append(f"  {_acceptance(stats)}")
    return lines


def _acceptance(stats: GenerationStats) -> str:
    accepted = _told(stats.num_accepted_tokens, "d")
    length = _told(stats.mean_acceptance_length, ".2f")
    if stats.acceptance_rate is None:
        drafted = _told(stats.num_draft_tokens, "d")
        return f"accepted: {accepted}; drafted: {drafted}; tokens a draft: {length}"
    return (
        f"accepted {accepted} of {stats.num_draft_tokens} drafted "
        f"({stats.acceptance_rate:.0%}), {length} tokens a draft"
    )


def _told(value: float | None, form: str) -> str:
    return "not reported" if value is None else format(value, form)


def distill_text(report: DistillProgress) -> str:
    """Return one report of a distillation as a line."""
    parts: list[str] = [report.phase]
    if report.fraction is not None:
        parts.append(f"{report.fraction:.0%}")
    if report.message:
        parts.append(report.message)
    elif report.num_tokens is not None:
        parts.append(f"{report.num_tokens:,} tokens")
    if report.tokens_per_second is not None:
        parts.append(f"{report.tokens_per_second:,.0f} tokens/s")
    if report.loss is not None:
        parts.append(f"loss {report.loss:.3f}")
    if report.remaining_s:
        parts.append(f"about {report.remaining_s / 60:.1f} minutes left")
    return ", ".join(parts)


def bytes_text(progress: BuildProgress) -> str:
    """Return how far a download is."""
    done, total = progress.done_bytes or 0, progress.total_bytes or 0
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"


def report_lines(report: PairReport) -> list[str]:
    """Return what every rule says of a pair, the worst first."""
    heading = {
        "ok": "compatible",
        "warning": "compatible, with warnings",
        "refused": "not compatible",
    }
    lines = [f"{report.draft} for {report.target}: {heading[report.outcome]}"]
    for outcome in reversed(OUTCOMES):
        for result in report.of(outcome):
            lines.append(f"{outcome:8} {result.rule}: {result.advice}")
    return [printable(line) for line in lines]
