"""The table of token states: readable in both themes, told apart without colour."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from engines import DROPPED_ORIGINS, TokenOrigin
from specdec_ui.theme import (
    DROPS_STYLE,
    SIDE_COLOURS,
    TOKEN_STYLES,
    Shade,
    TokenStyle,
    page_css,
    page_script,
    page_theme,
)

READABLE = 4.5  # WCAG 2.2, level AA, for text of normal size
VISIBLE = 3.0  # and for graphics
# What lies behind a lane, the legend and the panels.
BACKGROUNDS = {"light": ("#ffffff",), "dark": ("#27272a", "#18181b", "#0f0f11")}
INNER_CLASSES = {"s", "n", "h", "c"}  # of a step and of the marks inside a token

STYLES: dict[str, TokenStyle] = dict(TOKEN_STYLES.items()) | {"dropped, not told": DROPS_STYLE}

THEMES = pytest.mark.parametrize("theme", ["light", "dark"])
STATES = pytest.mark.parametrize("state", STYLES)


def luminance(colour: str) -> float:
    assert re.fullmatch("#[0-9a-f]{6}", colour), colour
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def shade(state: str, theme: str) -> Shade:
    style = STYLES[state]
    return style.light if theme == "light" else style.dark


def rule(selector: str) -> str:
    """Return what the style sheet says of a selector."""
    found = re.search(rf"^{re.escape(selector)}\{{([^}}]*)\}}$", page_css(), re.MULTILINE)
    assert found, f"there is no rule for {selector}"
    return found[1]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("#000000", "#ffffff", 21.0), ("#777777", "#ffffff", 4.48), ("#ffffff", "#ffffff", 1.0)],
)
def test_contrast_is_computed_as_wcag_defines_it(one: str, other: str, expected: float):
    assert contrast(one, other) == pytest.approx(expected, abs=0.005)


@THEMES
@STATES
def test_the_text_of_a_state_can_be_read(state: str, theme: str):
    colours = shade(state, theme)
    is_clear = colours.background == "transparent"
    for background in BACKGROUNDS[theme] if is_clear else (colours.background,):
        assert contrast(colours.text, background) >= READABLE


@THEMES
def test_secondary_text_can_be_read(theme: str):
    suffix = "_dark" if theme == "dark" else ""
    for name in ("body_text_color_subdued", "block_info_text_color"):
        for background in BACKGROUNDS[theme]:
            assert contrast(getattr(page_theme(), name + suffix), background) >= READABLE


@THEMES
@pytest.mark.parametrize("side", SIDE_COLOURS)
def test_the_bar_of_a_side_can_be_seen(side, theme: str):
    for background in BACKGROUNDS[theme]:
        assert contrast(SIDE_COLOURS[side], background) >= VISIBLE


def test_every_origin_has_a_style():
    assert set(TOKEN_STYLES) == set(get_args(TokenOrigin))


def test_states_are_told_apart_without_colour():
    assert len({style.decoration for style in TOKEN_STYLES.values()}) == len(TOKEN_STYLES)
    assert DROPS_STYLE.mark
    marks = [style.mark for style in STYLES.values() if style.mark]
    assert len(set(marks)) == len(marks)


def test_only_what_is_dropped_is_struck_through():
    struck = {
        origin for origin, style in TOKEN_STYLES.items() if "line-through" in style.decoration
    }
    assert struck == {"rejected", "unverified", "discarded"}


def test_every_state_says_what_it_means_in_its_own_words():
    meanings = {style.meaning for style in STYLES.values()}
    assert len(meanings) == len(STYLES)
    assert all(meanings)


def test_classes_are_unique_and_short():
    classes = [style.css_class for style in STYLES.values()]
    assert len(set(classes)) == len(classes)
    assert INNER_CLASSES.isdisjoint(classes)
    assert all(len(name) == 1 for name in classes)


@STATES
def test_the_style_sheet_draws_a_state_in_both_themes(state: str):
    style = STYLES[state]
    assert rule(f".sd-text .{style.css_class}") == (
        f"color:{style.light.text};background:{style.light.background};"
        f"text-decoration:{style.decoration}"
    )
    assert rule(f".dark .sd-text .{style.css_class}") == (
        f"color:{style.dark.text};background:{style.dark.background}"
    )


@pytest.mark.parametrize("state", [name for name, style in STYLES.items() if style.mark])
def test_the_style_sheet_puts_a_mark_before_the_text(state: str):
    style = STYLES[state]
    assert rule(f".sd-text .{style.css_class}::before") == f'content:"{style.mark}"'


def test_all_that_is_dropped_can_be_hidden_and_is_left_out_of_a_copy():
    dropped = [style.css_class for name, style in TOKEN_STYLES.items() if name in DROPPED_ORIGINS]
    classes = ", ".join(f".{name}" for name in (*dropped, DROPS_STYLE.css_class))
    hidden = f"body[data-sd-hide-dropped] .sd-text :is({classes})"
    assert f"{hidden} {{ display: none; }}" in page_css()
    assert f"\n.sd-text :is({classes}) {{ user-select: none;" in page_css()


def test_the_legend_has_a_state_of_some_back_ends_only_where_a_lane_has_it():
    rare = {state for state, style in STYLES.items() if style.is_rare}
    assert rare == {"unreported", "dropped, not told"}
    for state in rare:
        name = STYLES[state].css_class
        assert rule(f"body:not(:has(.sd-lane .{name})) .sd-of-{name}") == "display:none"
    assert page_css().count(":has(.sd-lane") == len(rare)


def test_the_hand_written_rules_follow_and_use_the_colours_of_the_sides():
    css = page_css()
    for side, colour in SIDE_COLOURS.items():
        assert css.index(f"--sd-{side}:{colour}") < css.index(f"var(--sd-{side})")


def test_nothing_is_fetched_from_elsewhere():
    for text in (page_css(), page_script()):
        assert not re.search(r"https?:|//\w+\.|@import|url\(", text)


def test_the_script_is_one_element():
    script = page_script()
    assert script.startswith("<script>")
    assert script.index("</script>") == len(script) - len("</script>")
