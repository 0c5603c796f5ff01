"""Statistics to the words and numbers that a person reads, with units, as escaped HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from engines import (
    SIDES,
    Comparison,
    DraftKind,
    GenerationStats,
    PublishedFigure,
    RunRecord,
    Side,
    Snippet,
    Spread,
    comparison_of,
    published_figures,
    typical,
)
from specdec_ui.presets import Example
from specdec_ui.state import TENSORRT_LLM
from specdec_ui.theme import SIDE_NAMES

# A speedup this close to 1 is called neither faster nor slower; one run each is noisier.
NO_DIFFERENCE, NO_DIFFERENCE_ONCE = 0.02, 0.05
MISSING = "–"
NOT_REPORTED = "not reported by this back end"

DRAFT_NAMES = {
    "model": "a draft model",
    "prompt_lookup": "prompt lookup",
    "none": "nothing drafted",
}

# The phases of a tuning, in their order, and what happens in each
PHASES = {
    "prepare": "load the target",
    "generate": "the target writes text",
    "train": "the draft learns from it",
    "evaluate": "measure the best draft",
    "save": "complete the folder",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the table: its name, its definition, how a side's statistics give it."""

    name: str
    definition: str
    value: Callable[[GenerationStats], str]


def number(value: float | None, digits: int, unit: str = "") -> str:
    """Return a rounded number with its unit, or a dash where there is none."""
    return MISSING if value is None else f"{value:,.{digits}f}{unit}"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    return MISSING if value is None else f"{value:.0%}"


def reported(value: float | None, digits: int = 0, unit: str = "") -> str:
    """Return a rounded number with its unit, or that the back end does not report it."""
    return NOT_REPORTED if value is None else number(value, digits, unit)


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if round(seconds / 60) < 60 else f"{seconds / 3600:.1f} h"


def clock(seconds: float) -> str:
    """Return a time that goes on, to the second."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min {rest:02} s"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _of_drafts(stats: GenerationStats, text: str) -> str:
    """Return a figure about drafts: where it has no number, nothing was drafted or reported."""
    if stats.num_drafts == 0:
        return MISSING
    return NOT_REPORTED if text == MISSING else text


def _accepted_of_drafted(stats: GenerationStats) -> str:
    counts = stats.num_accepted_tokens, stats.num_draft_tokens
    return MISSING if counts == (None, None) else " ÷ ".join(map(reported, counts))


def _accepted_by_position(stats: GenerationStats) -> str:
    counts = stats.num_accepted_tokens_per_pos
    if not counts or not stats.num_drafts:
        return MISSING
    return " ".join(percent(count / stats.num_drafts) for count in counts)


FIGURES = (
    Figure(
        "Tokens per second",
        "output tokens ÷ decode time, the prompt's reading apart",
        lambda stats: number(stats.tokens_per_second, 1),
    ),
    Figure(
        "Time to first token",
        "from the request to the first output token",
        lambda stats: number(stats.time_to_first_token_s, 2, " s"),
    ),
    Figure(
        "Time per token",
        "decode time ÷ output tokens",
        lambda stats: number(
            None if stats.time_per_token_s is None else stats.time_per_token_s * 1000, 1, " ms"
        ),
    ),
    Figure(
        "Total time",
        "reading the prompt and decoding",
        lambda stats: number(stats.elapsed_s, 2, " s"),
    ),
    Figure(
        "Output tokens", "the end of text included", lambda stats: f"{stats.num_output_tokens:,}"
    ),
    Figure("Target steps", "forward passes of the target", lambda stats: reported(stats.num_steps)),
    Figure(
        "Accepted ÷ drafted",
        "draft tokens that were kept, of those proposed",
        lambda stats: _of_drafts(stats, _accepted_of_drafted(stats)),
    ),
    Figure(
        "Acceptance rate",
        "accepted ÷ drafted tokens; those behind a rejected one count as drafted",
        lambda stats: _of_drafts(stats, percent(stats.acceptance_rate)),
    ),
    Figure(
        "Mean acceptance length",
        "1 + accepted ÷ drafts: output tokens per step that drafted",
        lambda stats: _of_drafts(stats, number(stats.mean_acceptance_length, 2)),
    ),
    Figure(
        "Accepted by position",
        "share of the drafts whose 1st, 2nd, … token was kept",
        lambda stats: _of_drafts(stats, _accepted_by_position(stats)),
    ),
    Figure("Drafting", "time spent drafting", lambda stats: reported(stats.draft_s, 2, " s")),
    Figure(
        "Verifying",
        "time of the target's passes",
        lambda stats: number(
            stats.target_s, 2, " s, drafting included" if stats.draft_s is None else " s"
        ),
    ),
    Figure(
        "Ended by",
        "stop: end of text; length: the limit; cancelled: before either",
        lambda stats: stats.finish_reason,
    ),
)


def figures_html(record: RunRecord) -> str:
    """Return the table of figures, a column for each side that was run."""
    shown = {side: record.stats(side) for side in SIDES if record.runs.get(side)}
    if not shown:
        return ""
    columns: dict[Side, GenerationStats] = {side: typical(stats) for side, stats in shown.items()}
    head = "".join(f"<th scope='col'>{SIDE_NAMES[side]}</th>" for side in columns)
    rows = "".join(
        f"<tr><th scope='row'>{figure.name}<small>{escape(figure.definition)}</small></th>"
        + "".join(f"<td>{escape(figure.value(stats))}</td>" for stats in columns.values())
        + "</tr>"
        for figure in FIGURES
    )
    return (
        "<div class='sd-scroll'><table class='sd-figures'><thead><tr><th scope='col'>Figure</th>"
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def published_html(record: RunRecord) -> str:
    """Return what NVIDIA has published of a run's target, beside the run; "" where nothing is."""
    settings = record.settings
    if settings.get("backend") != TENSORRT_LLM:
        return ""
    rows = published_figures(str(settings.get("target")))
    if not rows:
        return ""
    body = "".join(_row(_published_cells(figure)) for figure in rows)
    if (ours := _own_cells(record)) is not None:
        body += _row(ours, css_class="sd-own")
    sources = " and ".join(
        f"<a href='{escape(source)}' target='_blank' rel='noreferrer'>{name}</a>"
        for source, name in zip(
            dict.fromkeys(figure.source for figure in rows),
            ("NVIDIA's post", "its second post"),
            strict=False,
        )
    )
    return (
        "<section class='sd-published' aria-label='Published figures'>"
        f"<h4>{escape(rows[0].target)}: published by NVIDIA, not measured here</h4>"
        f"<p class='sd-note'>From {sources}: FP8 on NVIDIA H200. Tokens/s are counted here "
        "as there, for this run too: output tokens ÷ total time, the time to the first token "
        "included, which the figures above leave out. This run's prompt was in the cache from its "
        "warm-up.</p>"
        "<div class='sd-scroll'><table class='sd-figures'><thead><tr><th scope='col'>Draft</th>"
        "<th scope='col'>Tokens/s</th><th scope='col'>Target alone</th><th scope='col'>Speedup</th>"
        f"</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _row(cells: Sequence[str], css_class: str = "") -> str:
    name, place, *values = map(escape, cells)
    return (
        f"<tr class='{css_class}'><th scope='row'>{name}<small>{place}</small></th>"
        + "".join(f"<td>{value}</td>" for value in values)
        + "</tr>"
    )


def _published_cells(figure: PublishedFigure) -> tuple[str, ...]:
    gpus = "1 GPU" if figure.num_gpus == 1 else f"{figure.num_gpus} GPUs"
    return (
        figure.draft,
        f"published, {gpus}",
        number(figure.tokens_per_second, 1),
        number(figure.baseline_tokens_per_second, 1),
        f"{figure.speedup:.2f}×",
    )


def _own_cells(record: RunRecord) -> tuple[str, ...] | None:
    """Return the run counted as the published ones are, None where a side did not end."""
    if not all(record.runs.get(side) for side in SIDES):
        return None
    ours, theirs = (typical(record.stats(side)) for side in SIDES)
    speeds = [
        stats.num_output_tokens / stats.elapsed_s
        for stats in (ours, theirs)
        if stats.finish_reason != "cancelled" and stats.elapsed_s > 0 and stats.num_output_tokens
    ]
    if len(speeds) < len(SIDES):
        return None
    draft = str(record.settings.get("draft") or "your draft").rpartition("/")[2]
    return (
        draft if record.settings.get("draft_kind") == "model" else _drafting(record.settings),
        f"this run, {record.settings.get('dtype', '')} on {record.settings.get('device', '')}",
        *(number(speed, 1) for speed in speeds),
        f"{speeds[0] / speeds[1]:.2f}×",
    )


def _drafting(settings: dict[str, Any]) -> str:
    return DRAFT_NAMES.get(str(settings.get("draft_kind")), "an unknown draft")


def verdict_html(record: RunRecord, *, whose: str, is_stopped: bool = False) -> str:
    """Return the verdict bar: what came out, why, the figures it rests on, and whose run it was."""
    is_compared = all(record.runs.get(side) for side in SIDES)
    comparison = comparison_of(record) if is_compared else None
    facts: list[tuple[str, str, str]]
    outcome = "sd-open"
    if comparison is not None and comparison.is_finished and not is_stopped:
        headline, reason = headline_of(comparison), reason_of(comparison)
        facts = _compared_facts(comparison, num_runs=len(record.runs["baseline"]))
        if comparison.speedup is not None and not _is_no_difference(comparison.speedup):
            outcome = "sd-faster" if comparison.speedup.median > 1 else "sd-slower"
    else:
        headline = "Ended early" if is_stopped or is_compared else "Run without a baseline"
        reason = "Nothing was compared, so no speedup is claimed."
        if not record.runs and not is_stopped:
            headline, reason = "Running …", "The verdict comes when the run has ended."
        facts = _single_facts(record)
    definitions = "".join(
        f"<div><dt title='{escape(definition)}'>{name}</dt><dd>{escape(value)}</dd></div>"
        for name, value, definition in facts
    )
    notes = "".join(
        f"<p class='sd-source sd-note'>Note: {escape(note)}.</p>"
        for note in record.settings.get("notes", [])
    )
    return (
        f"<section class='sd-verdict {outcome}' aria-label='Verdict'><h2>{escape(headline)}</h2>"
        f"<p class='sd-reason'>{escape(reason)}</p><dl>{definitions}</dl>"
        f"<p class='sd-source sd-note'>{_source(record, whose)}</p>{notes}</section>"
    )


def headline_of(comparison: Comparison) -> str:
    """Return the outcome of a finished comparison in one line."""
    speedup = comparison.speedup
    if speedup is None:
        return "Too short to compare"
    speed = f"{speedup.median:.2f}× "
    if _is_no_difference(speedup):
        speed += "as fast: no clear difference"
    else:
        speed += "faster" if speedup.median > 1 else "as fast: slower"
    if comparison.identical is None:
        return f"{speed}, same distribution (sampled, so the texts may differ)"
    if comparison.identical:
        return f"{speed}, output identical"
    assert comparison.difference is not None
    gap = comparison.logit_gap
    closeness = "" if gap is None else f", where the two tokens are {gap:.4f} apart in logit"
    return f"{speed}, but output differs from token {comparison.difference.position + 1}{closeness}"


def reason_of(comparison: Comparison) -> str:
    """Return why: what a step gave against what it cost, in steps of the baseline.

    Their ratio is the speedup of the two runs shown.
    """
    ours, theirs = comparison.speculative, comparison.baseline
    if ours.num_steps is None or theirs.num_steps is None:
        return "What a step gave and cost is not reported by this back end."
    if not ours.num_steps or not theirs.num_steps or theirs.decode_s <= 0:
        return ""
    if ours.num_drafts == 0:
        return "Nothing was drafted, so both sides are plain decoding."
    plain_step_s = theirs.decode_s / theirs.num_steps
    gained = ours.num_output_tokens / ours.num_steps
    cost = ours.decode_s / ours.num_steps / plain_step_s
    share = ""
    if ours.draft_s is not None:
        share = f" (drafting: {ours.draft_s / ours.num_steps / plain_step_s:.2f})"
    return (
        f"A speculative step gave {gained:.2f} tokens and took as long as {cost:.2f} plain steps"
        f"{share}."
    )


def _is_no_difference(speedup: Spread) -> bool:
    is_once = speedup.low == speedup.high
    margin = NO_DIFFERENCE_ONCE if is_once else NO_DIFFERENCE
    is_mixed = not is_once and speedup.low < 1 < speedup.high
    return is_mixed or abs(speedup.median - 1) < margin


def _compared_facts(comparison: Comparison, *, num_runs: int) -> list[tuple[str, str, str]]:
    ours, theirs = comparison.speculative, comparison.baseline
    facts = [
        (
            "Tokens/s",
            f"{number(_median(comparison.speculative_tokens_per_second), 1)} against "
            f"{number(_median(comparison.baseline_tokens_per_second), 1)}",
            "speculative against baseline: output tokens ÷ decode time, median of the repeats",
        ),
        *_acceptance_facts(ours),
        (
            "Time to first token",
            f"{number(ours.time_to_first_token_s, 2)} against "
            f"{number(theirs.time_to_first_token_s, 2, ' s')}",
            "from the request to the first output token",
        ),
    ]
    if comparison.speedup is not None:
        low, high = comparison.speedup.low, comparison.speedup.high
        spread = f"{low:.2f}× to {high:.2f}×" if num_runs > 1 else "one run of each side"
        facts.append(("Spread", spread, "lowest and highest speedup of the repeats"))
    return facts


def _single_facts(record: RunRecord) -> list[tuple[str, str, str]]:
    facts = []
    for side in SIDES:
        if record.runs.get(side):
            stats = typical(record.stats(side))
            speed = f"{number(stats.tokens_per_second, 1)}, {stats.num_output_tokens} tokens"
            facts.append((f"{SIDE_NAMES[side]} tokens/s", speed, "output tokens ÷ decode time"))
            facts += _acceptance_facts(stats)
    return facts


def _acceptance_facts(stats: GenerationStats) -> list[tuple[str, str, str]]:
    if stats.num_drafts == 0:
        return []
    return [
        (
            "Acceptance rate",
            _of_drafts(stats, percent(stats.acceptance_rate)),
            "accepted ÷ drafted tokens",
        ),
        (
            "Mean acceptance length",
            _of_drafts(stats, number(stats.mean_acceptance_length, 2)),
            "1 + accepted ÷ drafts: output tokens per step that drafted",
        ),
    ]


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _source(record: RunRecord, whose: str) -> str:
    settings, machine = record.settings, record.environment
    drafting = _drafting(settings)
    if settings.get("num_draft_tokens"):
        drafting += f", num_draft_tokens {settings['num_draft_tokens']}"
    if settings.get("min_draft_prob"):
        drafting += f", min_draft_prob {settings['min_draft_prob']}"
    dtype, draft_dtype = settings.get("dtype", ""), settings.get("draft_dtype")
    if draft_dtype not in (None, dtype):
        dtype = f"{dtype} (draft {draft_dtype})"
    parts = [
        f"{settings.get('target', 'an unknown target')} with {drafting}",
        f"{dtype} on {machine.get('cpu', 'an unknown processor')}"
        if "CPU" in str(settings.get("device"))
        else f"{dtype} on {settings.get('device', 'an unknown device')}",
        str(machine.get("date", ""))[:10],
    ]
    return f"<span class='sd-chip'>{escape(whose)}</span> {escape(' · '.join(filter(None, parts)))}"


def markdown_text(text: str) -> str:
    """Return a sentence for Markdown, in which it stays as it is."""
    return re.sub(r"([^\w\s])", r"\\\1", text, flags=re.ASCII)


def commands_markdown(
    snippets: Sequence[Snippet], draft_kind: DraftKind, num_draft_tokens: int
) -> str:
    """Return the commands to take away, a block with its title for each."""
    drafting = DRAFT_NAMES[draft_kind]
    if num_draft_tokens:
        drafting += f", num_draft_tokens {num_draft_tokens}"
    parts = [
        f"The same without this page, for the pair last built or run ({drafting}). Scripts named "
        "here lie in this project's folder."
    ]
    for snippet in snippets:
        fence = "```"
        while fence in snippet.text:
            fence += "`"
        language = {"shell": "bash"}.get(snippet.language, snippet.language)
        parts += [
            f"**{markdown_text(snippet.title)}**",
            f"{fence}{language}\n{snippet.text.rstrip()}\n{fence}",
        ]
    return "\n\n".join(parts)


def backend_note_html(text: str, *, is_error: bool = False) -> str:
    """Return whether a back end can be used here."""
    css_class = "sd-note sd-unusable" if is_error else "sd-note"
    return f"<p class='{css_class}' role='status'>{escape(text)}</p>"


def expectation_html(example: Example) -> str:
    """Return what an example prompt is an example of."""
    text = f"Example {example.kind}: {example.expectation}."
    return f"<p class='sd-note'>{escape(text)}</p>"


def status_html(text: str, *, is_error: bool = False) -> str:
    """Return the line that says what is going on, or what went wrong."""
    role, css_class = ("alert", "sd-status sd-error") if is_error else ("status", "sd-status")
    return f"<div class='{css_class}' role='{role}'>{escape(text)}</div>"


def phases_html(current: str | None, how_far: str = "") -> str:
    """Return the phases of a tuning as a list.

    Args:
        current: The phase that goes on. None: nothing has begun; "": all are over.
        how_far: That phase is.
    """
    names = list(PHASES)
    num_past = 0 if current is None else names.index(current) if current else len(names)
    items = []
    for index, (name, text) in enumerate(PHASES.items()):
        state = " class='sd-past'" if index < num_past else ""
        words = text
        if name == current:
            state = " aria-current='step'"
            words = f"{text}<small>{escape(how_far)}</small>" if how_far else text
        items.append(f"<li{state}><b>{name}</b>: {words}</li>")
    return f"<ol class='sd-phases'>{''.join(items)}</ol>"
