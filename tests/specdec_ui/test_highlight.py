"""Tokens as HTML: their marks, their place, and text that is shown as it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import get_args

import pytest
from hypothesis import given, strategies as st

from engines import (
    DROPPED_ORIGINS,
    OUTPUT_ORIGINS,
    GenerationEvent,
    Prefill,
    RunEvent,
    RunRecord,
    Step,
    Token,
    TokenOrigin,
    stats_of,
)
from specdec_ui.highlight import legend_html, step_html, token_html
from specdec_ui.state import RunState
from specdec_ui.theme import DROPS_STYLE, TOKEN_STYLES
from tests.engines.test_stats import MERGED_STEP, ROUNDS, UNTOLD, untold

ORIGINS: tuple[TokenOrigin, ...] = get_args(TokenOrigin)
NEWLINE, TAB, ASIDE = "n", "h", "c"  # classes of what stands inside a token

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror='alert(1)'>",
    "</i></span></div>",
    "<!-- ",
    "<![CDATA[x]]>",
    "<?php ?>",
    "&lt;b&gt; &amp; &#60; &nbsp",
    "' onmouseover='alert(1)",
    '" style="color:red',
    "${1+1}",
    "{{value}}",
    "`x`",
    "\\u{zz}",
    "<b>1</b>",
)


@dataclass
class ShownToken:
    """One token as a browser would take it."""

    css_class: str
    title: str
    text: str = ""  # its own, which copying a lane gives
    aside: str = ""  # a name or a placeholder in place of text
    marks: list[str] = field(default_factory=list)


class LaneParser(HTMLParser):
    """Reads a lane as a browser does, and refuses anything that `highlight` does not write."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[ShownToken] = []
        self.open: list[tuple[str, str]] = []
        self.times: list[str] = []

    def feed(self, data: str) -> None:
        super().feed(data.replace("\r\n", "\n").replace("\r", "\n"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        css_class = values.pop("class")
        match tag, css_class, [kind for kind, _ in self.open]:
            case "span", "s", []:
                self.times.append(values.pop("style"))
            case "i", _, ["span"]:
                self.tokens.append(ShownToken(css_class, values.pop("title")))
            case ("b", ("n" | "h"), ["span", "i"]) | ("span", "c", ["span", "i"]):
                self.tokens[-1].marks.append(css_class)
            case _:
                raise AssertionError(f"<{tag} class={css_class!r}> within {self.open}")
        assert not values, f"<{tag}> has the attributes {values}"
        self.open.append((tag, css_class))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        match self.open:
            case [_, _]:
                self.tokens[-1].text += data
            case [_, _, (_, "c")]:
                self.tokens[-1].aside += data
            case _:
                raise AssertionError(f"{data!r} stands within {self.open}")

    def refuse(self, data: str) -> None:
        raise AssertionError(f"{data!r} was read as markup")

    handle_comment = handle_pi = unknown_decl = refuse

    def handle_decl(self, decl: str) -> None:
        self.refuse(decl)


def shown(steps: Iterable[Step]) -> list[ShownToken]:
    parser = LaneParser()
    parser.feed("".join(step_html(step) for step in steps))
    parser.close()
    assert parser.open == []
    return parser.tokens


def plain_step(token: Token) -> Step:
    return Step((token,), (), 0, 0.0, 0.1, 1.0)


def shown_token(token: Token) -> ShownToken:
    """Return one token read back, from a step in which it may stand."""
    step = plain_step(token)
    if token.origin in DROPPED_ORIGINS:
        step = Step((), (token,), 1, 0.0, 0.1, 1.0)
    (only,) = shown([step])
    return only


def kept_text(tokens: Iterable[ShownToken]) -> str:
    dropped = {TOKEN_STYLES[origin].css_class for origin in DROPPED_ORIGINS}
    dropped.add(DROPS_STYLE.css_class)
    return "".join(token.text for token in tokens if token.css_class not in dropped)


# A greedy target continues 5 6 7, and the draft proposed 5 6 9 9.
TOY_STEP = Step(
    tokens=(Token(5, "5", "accepted"), Token(6, "6", "accepted"), Token(7, "7", "recovered")),
    rejected=(Token(9, "9", "rejected"), Token(9, "9", "unverified")),
    num_draft_tokens=4,
    draft_s=0.1,
    target_s=0.2,
    elapsed_s=1.5,
)


@pytest.mark.parametrize("origin", ORIGINS)
def test_every_origin_has_its_class_and_says_its_name(origin: TokenOrigin):
    token = shown_token(Token(5, "word", origin))
    assert token.css_class == TOKEN_STYLES[origin].css_class
    assert token.title.startswith(f"{origin} · id 5")
    assert token.text == "word"


def test_an_origin_is_either_kept_or_dropped():
    assert set(ORIGINS) == OUTPUT_ORIGINS | DROPPED_ORIGINS
    assert not OUTPUT_ORIGINS & DROPPED_ORIGINS


def test_the_legend_draws_every_state_in_its_own_style_and_says_what_it_means():
    legend = legend_html()
    for origin, style in TOKEN_STYLES.items():
        assert f"<i class='{style.css_class}'>{origin}</i>" in legend
        assert style.meaning.replace("'", "&#x27;") in legend


def test_the_legend_explains_the_mark_of_dropped_drafts_that_are_not_told():
    assert f"<i class='{DROPS_STYLE.css_class}'>3</i>" in legend_html()
    assert DROPS_STYLE.meaning in legend_html()


def test_a_title_holds_the_numbers_that_the_back_end_reports():
    token = Token(7, "x", "accepted", target_prob=0.75, draft_prob=0.5, uniform=0.125)
    assert shown_token(token).title == ("accepted · id 7 · target 0.750 · draft 0.500 · drew 0.125")


def test_a_title_leaves_out_what_is_not_reported():
    assert shown_token(Token(7, "x", "target")).title == "target · id 7"


def test_a_probability_of_zero_is_a_number_too():
    token = Token(7, "x", "rejected", target_prob=0.0, draft_prob=1.0, uniform=0.0)
    assert shown_token(token).title == ("rejected · id 7 · target 0.000 · draft 1.000 · drew 0.000")


def test_dropped_drafts_stand_between_the_kept_ones_and_what_replaced_them():
    origins = [token.title.partition(" ")[0] for token in shown([TOY_STEP])]
    assert origins == ["accepted", "accepted", "rejected", "unverified", "recovered"]
    assert [token.text for token in shown([TOY_STEP])] == ["5", "6", "9", "9", "7"]


def test_dropped_drafts_that_are_not_told_have_their_number_in_their_place():
    tokens = shown([untold(TOY_STEP)])
    assert [token.css_class for token in tokens] == ["a", "a", DROPS_STYLE.css_class, "r"]
    assert (tokens[2].text, tokens[2].title) == (
        "2",
        "2 draft tokens dropped; this back end does not report which",
    )
    assert kept_text(tokens) == kept_text(shown([TOY_STEP])) == "567"


def test_one_dropped_draft_is_told_as_one():
    step = Step((Token(7, "7", "recovered"),), None, 1, None, 0.2, 1.5)
    assert shown([step])[0].title.startswith("1 draft token dropped;")


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(replace(untold(TOY_STEP), num_draft_tokens=2), id="nothing was dropped"),
        pytest.param(replace(untold(TOY_STEP), num_draft_tokens=None), id="not even the number"),
        pytest.param(replace(MERGED_STEP, num_draft_tokens=8), id="passes as one"),
    ],
)
def test_there_is_no_mark_where_no_drop_is_known(step: Step):
    assert [token.css_class for token in shown([step])] == [
        TOKEN_STYLES[token.origin].css_class for token in step.tokens
    ]


def test_drafts_behind_the_end_of_the_answer_come_last():
    step = Step(
        tokens=(Token(5, "5", "accepted"), Token(2, "", "accepted", control="</s>")),
        rejected=(Token(8, "8", "discarded"),),
        num_draft_tokens=3,
        draft_s=0.1,
        target_s=0.2,
        elapsed_s=1.5,
    )
    assert [token.css_class for token in shown([step])] == ["a", "a", "d"]


def test_a_bonus_token_follows_the_draft_that_was_kept_whole():
    step = Step((Token(5, "5", "accepted"), Token(6, "6", "bonus")), (), 1, 0.1, 0.2, 1.5)
    assert [token.css_class for token in shown([step])] == ["a", "b"]


def test_the_coloured_tokens_add_up_to_the_figures():
    stats = stats_of(ROUNDS)
    counts = Counter(
        token.css_class for token in shown(event for event in ROUNDS if isinstance(event, Step))
    )
    assert counts["a"] == stats.num_accepted_tokens == 5
    assert counts["a"] + counts["x"] + counts["u"] + counts["d"] == stats.num_draft_tokens == 12
    assert (counts["b"], counts["r"], counts["t"]) == (1, 2, 0)
    assert counts["a"] + counts["b"] + counts["r"] == stats.num_output_tokens == 8


def test_the_marks_of_dropped_drafts_add_up_to_the_figures():
    stats = stats_of(UNTOLD)
    tokens = shown(event for event in UNTOLD if isinstance(event, Step))
    numbers = [int(token.text) for token in tokens if token.css_class == DROPS_STYLE.css_class]
    assert numbers == [3, 4]
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (12, 12 - sum(numbers))


def test_a_step_carries_the_time_at_which_a_replay_shows_it():
    parser = LaneParser()
    parser.feed(step_html(TOY_STEP))
    assert parser.times == ["--t:1.500s"]


def test_a_lane_only_ever_grows():
    state = RunState(RunRecord("prompt", {}, {}))
    events: list[GenerationEvent] = [Prefill(3, 2, 0.5), TOY_STEP, TOY_STEP, *ROUNDS[1:]]
    before = ""
    for event in events:
        state.apply(RunEvent("speculative", 0, event))
        html = state.lanes["speculative"].html
        added = step_html(event) if isinstance(event, Step) else ""
        assert html == before + added
        before = html


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("text", HOSTILE)
def test_markup_in_a_token_is_shown_as_text(text: str, origin: TokenOrigin):
    assert shown_token(Token(5, text, origin)).text == text


@pytest.mark.parametrize("name", ["<|im_end|>", "</s>", *HOSTILE])
def test_a_control_token_shows_its_name_aside_from_the_text(name: str):
    token = shown_token(Token(2, "", "target", control=name))
    assert (token.aside, token.text, token.marks) == (name, "", [ASIDE])


# All but NUL, which HTML cannot carry.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@given(texts=st.lists(TEXT, min_size=1, max_size=8))
def test_any_text_reads_back_as_it_was(texts: list[str]):
    steps = [plain_step(Token(5, text, "target")) for text in texts]
    assert kept_text(shown(steps)) == "".join(texts)


@given(text=TEXT, origin=st.sampled_from(sorted(DROPPED_ORIGINS)))
def test_dropped_text_reads_back_but_for_the_breaks_it_is_kept_from_making(
    text: str, origin: TokenOrigin
):
    token = shown_token(Token(5, text, origin))
    assert token.text == text.replace("\n", "").replace("\t", "")
    assert token.marks.count(NEWLINE) == text.count("\n")
    assert token.marks.count(TAB) == text.count("\t")


def test_white_space_is_marked_and_kept():
    texts = ["a", "\n", "\n\n", "\t", "    b", "\r\n"]
    tokens = shown(plain_step(Token(5, text, "target")) for text in texts)
    assert [token.text for token in tokens] == texts
    assert [token.marks for token in tokens] == [[], [NEWLINE], [NEWLINE] * 2, [TAB], [], [NEWLINE]]


@pytest.mark.parametrize("origin", sorted(DROPPED_ORIGINS))
def test_a_dropped_newline_is_marked_but_breaks_no_line(origin: TokenOrigin):
    token = Token(5, "one\n\ttwo\r\n", origin)
    assert not {"\n", "\r", "\t"} & set(token_html(token))
    assert shown_token(token).marks == [NEWLINE, TAB, NEWLINE]


@pytest.mark.parametrize("origin", ["target", "accepted", "rejected"])
def test_an_unfinished_character_has_a_placeholder_that_is_no_text(origin: TokenOrigin):
    token = shown_token(Token(5, "", origin))
    assert (token.aside, token.text, token.marks) == ("…", "", [ASIDE])


def test_a_character_split_over_tokens_is_shown_once_and_whole():
    steps = [plain_step(Token(5, text, "target")) for text in ("", "", "🙂", "日", "é")]
    assert kept_text(shown(steps)) == "🙂日é"


def test_attributes_need_no_escape_in_json():
    html = step_html(TOY_STEP)
    assert '"' not in html
    assert json.dumps(html, ensure_ascii=False) == f'"{html}"'


def long_token(origin: TokenOrigin) -> Token:
    return Token(151_000, " speed", origin, target_prob=0.123456, draft_prob=0.5, uniform=0.25)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(plain_step(long_token("target")), id="one token to a step"),
        pytest.param(
            Step(
                tokens=(*[long_token("accepted")] * 3, long_token("recovered")),
                rejected=(long_token("rejected"),),
                num_draft_tokens=4,
                draft_s=0.1,
                target_s=0.2,
                elapsed_s=1234.5678,
            ),
            id="a draft of four",
        ),
    ],
)
def test_a_token_costs_few_bytes_its_share_of_the_step_included(step: Step):
    sent = json.dumps(step_html(step), ensure_ascii=False).encode()
    assert len(sent) / len(shown([step])) < 160
