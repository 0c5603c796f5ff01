"""Tokens to coloured spans. The HTML of a lane only ever grows, so that only what is new is sent.

Model text is data: it is escaped here, and never enters a template.
"""

from __future__ import annotations

from html import escape

from engines import DROPPED_ORIGINS, Step, Token
from specdec_ui.theme import DROPS_STYLE, TOKEN_STYLES


def step_html(step: Step) -> str:
    """Return one step's tokens, dropped drafts in the place where they were dropped.

    Attributes stand in single quotes, which JSON sends without an escape. `--t` is the time at
    which a replay shows the step.
    """
    pieces = [token_html(token) for token in step.tokens_in_place]
    if step.rejected is None and step.num_dropped_tokens:
        pieces.insert(step.dropped_place, drops_html(step.num_dropped_tokens))
    return f"<span class='s' style='--t:{step.elapsed_s:.3f}s'>{''.join(pieces)}</span>"


def token_html(token: Token) -> str:
    """Return one token; its title holds its numbers."""
    css_class = TOKEN_STYLES[token.origin].css_class
    return f"<i class='{css_class}' title='{escape(_title(token))}'>{_text_html(token)}</i>"


def drops_html(num_tokens: int) -> str:
    """Return the mark in place of dropped drafts of which only the number is known."""
    drafts = "1 draft token" if num_tokens == 1 else f"{num_tokens} draft tokens"
    title = f"{drafts} dropped; this back end does not report which"
    return f"<i class='{DROPS_STYLE.css_class}' title='{title}'>{num_tokens}</i>"


def legend_html() -> str:
    """Return the legend of the token states."""
    entries = "".join(
        f"<li class='sd-of-{style.css_class}'>"
        f"<span class='sd-text'><i class='{style.css_class}'>{name}</i></span> "
        f"{escape(style.meaning)}</li>"
        for name, style in (*TOKEN_STYLES.items(), ("3", DROPS_STYLE))
    )
    return f"<ul class='sd-legend' aria-label='What the colours and marks mean'>{entries}</ul>"


def _title(token: Token) -> str:
    parts = [token.origin, f"id {token.id}"]
    if token.target_prob is not None:
        parts.append(f"target {token.target_prob:.3f}")
    if token.draft_prob is not None:
        parts.append(f"draft {token.draft_prob:.3f}")
    if token.uniform is not None:
        parts.append(f"drew {token.uniform:.3f}")
    return " · ".join(parts)


def _text_html(token: Token) -> str:
    if token.control:
        return f"<span class='c'>{escape(token.control)}</span>"
    if not token.text:  # part of a character that a later token completes
        return "<span class='c'>…</span>"
    # A raw carriage return would reach the page as a line break.
    text = escape(token.text).replace("\r", "&#13;")
    if token.origin in DROPPED_ORIGINS:  # marked, but without breaking the line
        return text.replace("\n", "<b class='n'></b>").replace("\t", "<b class='h'></b>")
    return text.replace("\n", "<b class='n'></b>\n").replace("\t", "<b class='h'></b>\t")
