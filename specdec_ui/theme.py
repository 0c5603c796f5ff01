"""Colours, marks and names: one table of token states for text, legend and charts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from engines import Side, TokenOrigin

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, slots=True)
class Shade:
    """A text colour on a background, with a contrast of at least 4.5 to 1."""

    text: str
    background: str


@dataclass(frozen=True, slots=True)
class TokenStyle:
    """How one part that a token can play is drawn, in either theme."""

    css_class: str  # short: it is sent with every token
    mark: str  # the sign that says the same without colour; "" for none
    decoration: str  # CSS text-decoration
    light: Shade
    dark: Shade
    meaning: str
    is_rare: bool = False  # of some back ends only: in the legend where a lane has one


TOKEN_STYLES: dict[TokenOrigin, TokenStyle] = {
    "accepted": TokenStyle(
        css_class="a",
        mark="",
        decoration="underline solid 2px",
        light=Shade("#0b4a24", "#cdf3da"),
        dark=Shade("#b4f3cb", "#14472b"),
        meaning="drafted, and the target agrees",
    ),
    "recovered": TokenStyle(
        css_class="r",
        mark="↻",
        decoration="underline double 1px",
        light=Shade("#653900", "#ffe6b8"),
        dark=Shade("#ffdb9c", "#513600"),
        meaning="the target's own, in place of the first rejected draft",
    ),
    "bonus": TokenStyle(
        css_class="b",
        mark="+",
        decoration="underline dotted 2px",
        light=Shade("#0a3a75", "#d3e6ff"),
        dark=Shade("#b3d5ff", "#15386b"),
        meaning="the target's own, on top of a draft kept whole",
    ),
    "target": TokenStyle(
        css_class="t",
        mark="",
        decoration="none",
        light=Shade("#27272a", "transparent"),
        dark=Shade("#f4f4f5", "transparent"),
        meaning="the target's own, nothing was drafted",
    ),
    "unreported": TokenStyle(
        css_class="o",
        mark="~",
        decoration="underline dashed 1px",
        light=Shade("#4a4636", "#ebe7d8"),
        dark=Shade("#dcd6bd", "#3d3926"),
        meaning="in the output; this back end does not report which part it played",
        is_rare=True,
    ),
    "rejected": TokenStyle(
        css_class="x",
        mark="×",
        decoration="line-through solid 2px",
        light=Shade("#8a0f0f", "#ffdada"),
        dark=Shade("#ffbcbc", "#541c1c"),
        meaning="drafted, and the target disagrees",
    ),
    "unverified": TokenStyle(
        css_class="u",
        mark="?",
        decoration="line-through dotted 1px",
        light=Shade("#52525b", "#ececee"),
        dark=Shade("#c4c4cc", "#33333a"),
        meaning="drafted behind a rejected one, so never judged",
    ),
    "discarded": TokenStyle(
        css_class="d",
        mark="∎",
        decoration="line-through dashed 1px",
        light=Shade("#55258a", "#eee1fb"),
        dark=Shade("#dcc4ff", "#38244f"),
        meaning="drafted behind the end of the answer",
    ),
}
# Dropped drafts of which only the number is known: the number, in their place
DROPS_STYLE = TokenStyle(
    css_class="m",
    mark="⊘",
    decoration="none",
    light=Shade("#6f2f2f", "#f3e3e3"),
    dark=Shade("#f0c8c8", "#422a2a"),
    meaning="so many drafts were dropped; this back end does not report which",
    is_rare=True,
)

SIDE_COLOURS: dict[Side, str] = {"speculative": "#2f9e5f", "baseline": "#8a8f98"}
AGREEMENT_COLOUR, OVERLAP_COLOUR, LOSS_COLOUR = "#2f9e5f", "#3f83e8", "#b7791f"
SIDE_NAMES: dict[Side, str] = {"speculative": "Speculative", "baseline": "Baseline"}


def page_theme() -> gr.themes.Base:
    """Return Gradio's default theme with secondary text that can be read (4.5 to 1 and more)."""
    light, dark = "#57575f", "#b4b4bd"
    return gr.themes.Default().set(
        body_text_color_subdued=light,
        body_text_color_subdued_dark=dark,
        block_info_text_color=light,
        block_info_text_color_dark=dark,
        block_label_text_color="#27272a",
        block_title_text_color="#27272a",
    )


def own_html(value: str, **options: Any) -> gr.HTML:
    """Return HTML of ours, styled by our style sheet alone."""
    return gr.HTML(value, apply_default_css=False, elem_classes="sd-html", **options)


def page_css() -> str:
    """Return the page's style sheet: the token table as rules, then the hand-written rest."""
    rules = []
    for style in (*TOKEN_STYLES.values(), DROPS_STYLE):
        name = style.css_class
        rules.append(
            f".sd-text .{name}{{color:{style.light.text};background:{style.light.background};"
            f"text-decoration:{style.decoration}}}"
        )
        rules.append(
            f".dark .sd-text .{name}{{color:{style.dark.text};background:{style.dark.background}}}"
        )
        if style.mark:
            rules.append(f'.sd-text .{name}::before{{content:"{style.mark}"}}')
        if style.is_rare:
            rules.append(f"body:not(:has(.sd-lane .{name})) .sd-of-{name}{{display:none}}")
    for side, colour in SIDE_COLOURS.items():
        rules.append(f":root{{--sd-{side}:{colour}}}")
    return "\n".join(rules) + "\n" + (ASSETS / "page.css").read_text(encoding="utf-8")


def page_script() -> str:
    """Return the page's script as an element for its head."""
    return f"<script>{(ASSETS / 'page.js').read_text(encoding='utf-8')}</script>"
