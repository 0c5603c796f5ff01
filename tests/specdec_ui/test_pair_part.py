"""What the page says of a pair: the verdict first, every rule, nothing unescaped, when it asks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engines import PairReport, RuleResult
from specdec_ui.pair_part import RULE_NAMES, on_check, report_html
from tests.engines.pairs.tokenizers_of_kinds import WORDS, bpe, write_model

REPORT = PairReport(
    "target",
    "draft",
    (
        RuleResult("token_texts", "ok", "all 3 ids mean the same text"),
        RuleResult("size_order", "warning", "the draft is no smaller", "choose a smaller draft"),
    ),
)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    target = write_model(tmp_path / "target", bpe())
    return str(target), str(write_model(tmp_path / "draft", bpe(), num_hidden_layers=1))


def shown(*args: str, may_fetch: bool = False) -> str:
    *_, last = on_check("auto", *args, may_fetch=may_fetch)
    return last


def test_the_verdict_comes_first_then_what_speaks_against_then_every_rule():
    text = report_html(REPORT)
    verdict = text.index("! The draft can propose for the target, with a caveat.")
    against = text.index("<p>The draft is no smaller; choose a smaller draft.</p>")
    rules = text.index("<details><summary>All 2 rules</summary>")
    assert verdict < against < rules
    assert "<li class='sd-ok'><b>Text of every id</b>: All 3 ids mean the same text.</li>" in text


def test_what_a_model_says_is_escaped():
    text = report_html(
        PairReport("t", "d", (RuleResult("token_texts", "refused", "<script>alert(1)</script>"),))
    )
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_every_rule_has_a_name_for_people(pair: tuple[str, str]):
    text = shown(pair[0], "model", pair[1])
    assert "✓ The draft fits the target." in text
    assert all(name in text for name in RULE_NAMES.values())
    assert "<p class='sd-note'>The pair takes about " in text


def test_a_pair_that_does_not_fit_into_memory_is_marked(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
    text = shown(pair[0], "model", pair[1])
    assert "<p class='sd-note sd-unusable'>The pair takes about " in text
    assert "1 MB are free" in text


def test_a_target_alone_takes_memory_too(pair: tuple[str, str]):
    assert "The pair takes about 46 MB of memory (target 45 MB, KV caches" in (
        shown(pair[0], "prompt_lookup", "")
    )


def test_a_pair_that_does_not_fit_is_said_with_both_texts(pair: tuple[str, str], tmp_path: Path):
    other = write_model(tmp_path / "other", bpe([*WORDS[:6], "dog", "cat", *WORDS[8:]]))
    text = shown(pair[0], "model", str(other))
    assert "✗ The draft cannot propose for the target." in text
    assert "id 6 is &#x27;cat&#x27; in the target, &#x27;dog&#x27; in the draft" in text


@pytest.mark.parametrize(
    ("target", "kind", "draft", "text"),
    [
        ("anything", "prompt_lookup", "", "No draft model"),
        ("anything", "none", "", "No draft model"),
        ("", "model", "x", "Name a target."),
        ("x", "model", " ", "Name a draft."),
        ("/nowhere", "model", "x", "there is no model &#x27;/nowhere&#x27;"),
        ("org/far", "model", "org/farther", "&#x27;org/far&#x27; is not on this machine yet"),
    ],
)
def test_where_nothing_can_be_compared_a_sentence_says_why(
    target: str, kind: str, draft: str, text: str
):
    assert text in shown(target, kind, draft)


def test_a_model_elsewhere_is_fetched_only_where_the_user_asks():
    *earlier, last = on_check("auto", "org/far", "model", "org/farther")
    assert "fetching the small files of org/far" in earlier[0]
    assert "cannot be fetched" in last  # there is no network in tests
