"""Whether the chosen draft can propose for the chosen target: what the page says, and when."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr

from engines import (
    EngineConfig,
    EngineStore,
    Outcome,
    PairReport,
    RuleResult,
    check_references,
    create_backend,
)
from specdec_ui.theme import own_html
from specdec_ui.views import USER_ERRORS

MARKS: dict[Outcome, str] = {"ok": "✓", "warning": "!", "refused": "✗"}
HEADINGS: dict[Outcome, str] = {
    "ok": "The draft fits the target.",
    "warning": "The draft can propose for the target, with a caveat.",
    "refused": "The draft cannot propose for the target.",
}
RULE_NAMES = {
    "token_texts": "Text of every id",
    "padded_sizes": "Vocabulary sizes",
    "rollback": "Rollback",
    "tokenizer_kinds": "Splitting of text",
    "special_tokens": "Special tokens",
    "beginnings": "Beginning of a text",
    "chat_templates": "Chat template",
    "context_lengths": "Context length",
    "size_order": "Size",
}
NO_DRAFT = "No draft model: there is nothing that would have to fit the target."
LOOKING = "<p class='sd-note' role='status'>Comparing target and draft …</p>"


def pair_part(controls: dict[str, Any]) -> tuple[gr.HTML, gr.Button]:
    """Add what the page says of the pair, and the button that asks again."""
    shown = own_html(LOOKING, elem_id="sd-pair")
    return shown, gr.Button("Check the pair", size="sm", elem_id="sd-check")


def on_check(
    backend: str, target: str, draft_kind: str, draft: str, *, may_fetch: bool = True
) -> Iterator[str]:
    """Say whether the draft fits the target and both the memory, by their small files alone.

    Args:
        backend: Each takes memory in its own way.
        target: As the user names it.
        draft_kind: Only a model has to fit.
        draft: As the user names it.
        may_fetch: Small files that are not here may be downloaded, which the user must ask for.
    """
    if draft_kind != "model":
        yield note_html(NO_DRAFT) + _memory_html(backend, str(target).strip(), None)
        return
    target, draft = str(target).strip(), str(draft).strip()
    if not target or not draft:
        yield note_html(f"Name a {'draft' if target else 'target'}.")
        return
    steps = check_references(target, draft, EngineStore(), may_fetch=may_fetch)
    try:
        while True:
            if line := next(steps):
                yield note_html(line)
    except StopIteration as ended:
        yield report_html(ended.value) + _memory_html(backend, target, draft)
    except USER_ERRORS as exc:
        yield note_html(f"{exc}.")


def _memory_html(backend: str, target: str, draft: str | None) -> str:
    """Return what the pair takes; nothing where that is not known before it is built."""
    try:
        need = create_backend(backend).memory_need(EngineConfig(backend, target, draft))
    except USER_ERRORS:  # Build and Run say it
        return ""
    if need is None:
        return ""
    css_class = "sd-note" if need.num_bytes <= need.free_bytes else "sd-note sd-unusable"
    return f"<p class='{css_class}'>The pair takes {escape(need.text)}.</p>"


def note_html(text: str) -> str:
    """Return a sentence in place of a report."""
    return f"<p class='sd-note' role='status'>{escape(text)}</p>"


def report_html(report: PairReport) -> str:
    """Return what was found: the verdict, what speaks against the pair, and every rule."""
    against = "".join(
        f"<p>{_sentence(result)}</p>" for result in (*report.of("refused"), *report.of("warning"))
    )
    rules = "".join(
        f"<li class='sd-{result.outcome}'><b>{escape(RULE_NAMES[result.rule])}</b>: "
        f"{_sentence(result)}</li>"
        for result in report.results
    )
    return (
        f"<div class='sd-pair sd-{report.outcome}' role='status'>"
        f"<strong>{MARKS[report.outcome]} {HEADINGS[report.outcome]}</strong>{against}"
        f"<details><summary>All {len(report.results)} rules</summary><ul>{rules}</ul></details>"
        "</div>"
    )


def _sentence(result: RuleResult) -> str:
    return f"{escape(result.advice[:1].upper() + result.advice[1:])}."
