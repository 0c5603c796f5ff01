"""Rules of a pair: what is refused and why, what is a warning, what is right."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.errors import IncompatibleModelsError
from engines.pairs.compatibility import (
    RULES,
    Difference,
    PairReport,
    RuleResult,
    check_pair,
)
from engines.pairs.profile import ModelProfile, TokenizerProfile
from tests.engines.pairs.tokenizers_of_kinds import (
    SIZES,
    WORDS,
    bpe,
    byte_level,
    unigram,
    word_piece,
)

CONFIG = {"model_type": "llama", **SIZES, "vocab_size": 512}
SMALLER = {**CONFIG, "num_hidden_layers": 1}


def model(tokenizer: Any, name: str = "target", **settings: Any) -> ModelProfile:
    config = (CONFIG if name == "target" else SMALLER) | settings
    return ModelProfile(name, config, TokenizerProfile.of(tokenizer))


def report(target: Any, draft: Any) -> PairReport:
    return check_pair(model(target), model(draft, "draft"))


def result(found: PairReport, rule: str) -> RuleResult:
    return next(result for result in found.results if result.rule == rule)


def exchanged(first: str, second: str) -> list[str]:
    names = {first: second, second: first}
    return [names.get(word, word) for word in WORDS]


@pytest.mark.parametrize("make", [bpe, unigram, word_piece, byte_level])
def test_a_pair_of_one_tokenizer_is_compatible_by_every_rule(make: Any):
    found = report(make(), make())
    assert {result.outcome for result in found.results} == {"ok"}, found
    assert len(found.results) == len(RULES)
    assert found.outcome == "ok"
    assert found.require() == ()


@pytest.mark.parametrize("make", [bpe, unigram, word_piece])
def test_fr01_ids_that_mean_other_text_are_refused_with_both_texts(make: Any):
    found = report(make(), make(exchanged("cat", "dog")))
    refused = result(found, "token_texts")
    assert refused.outcome == found.outcome == "refused"
    assert refused.differences == (Difference(6, "cat", "dog"), Difference(7, "dog", "cat"))
    assert "differ at 2 of 10 ids" in refused.text
    assert "id 6 is 'cat' in the target, 'dog' in the draft; id 7 is 'dog' in" in refused.text
    with pytest.raises(IncompatibleModelsError, match="'draft' cannot draft for 'target': their"):
        found.require()


def test_fr10_what_would_allow_another_tokenizer_is_named():
    remedy = result(report(bpe(), bpe(exchanged("cat", "dog"))), "token_texts").remedy
    assert "'prompt_lookup'" in remedy
    assert "pairs with different tokenizers are not supported" in remedy


def test_no_more_than_five_ids_are_shown():
    words = [*WORDS[:3], *(f"word{n}" for n in range(7))]
    refused = result(report(bpe(), bpe(words)), "token_texts")
    assert len(refused.differences) == 5
    assert refused.text.count("in the target") == 5


@pytest.mark.parametrize("other", ["<unused7>", "<|extra_3|>", "<reserved_special_token_5>"])
def test_fr05_an_id_that_no_text_is_made_of_may_differ(other: str):
    words = [other if word == "<unused1>" else word for word in WORDS]
    found = report(bpe(), bpe(words))
    warning = result(found, "token_texts")
    assert warning.outcome == found.outcome == "warning"
    assert warning.differences == (Difference(9, "<unused1>", other),)
    assert "drafts are rejected there, the output is the target's own" in warning.text
    assert found.require() == (warning.text,)


def test_special_tokens_that_differ_in_text_are_a_warning():
    words = ["<|begin|>" if word == "<s>" else word for word in WORDS]
    special = {"bos_token": "<|begin|>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = report(bpe(), bpe(words, special=special))
    assert result(found, "token_texts").outcome == "warning"
    assert "bos_token is '<s>' (id 0) in the target, '<|begin|>' (id 0) in the draft" in (
        result(found, "special_tokens").text
    )


def test_tokens_that_only_one_side_has_are_a_warning_where_the_draft_can_read_them():
    found = report(bpe(added=["<tool>", "</tool>"]), bpe())
    warning = result(found, "token_texts")
    assert warning.outcome == "warning"
    assert warning.differences == (Difference(10, "<tool>", None), Difference(11, "</tool>", None))
    assert "id 10 is '<tool>' in the target, nothing in the draft" in warning.text


def test_a_draft_without_a_row_for_what_the_target_says_is_refused():
    target = model(bpe(added=["<tool>", "</tool>"]), vocab_size=12)
    found = check_pair(target, model(bpe(), "draft", vocab_size=10))
    refused = result(found, "padded_sizes")
    assert refused.outcome == "refused"
    assert "the target can say 12 ids, and the draft has rows for 10" in refused.text


def test_fr03_padded_sizes_that_differ_are_compatible():
    tokenizer = TokenizerProfile({id_: str(id_) for id_ in range(151_665)}, kind="BPE")
    target = ModelProfile("t", {**CONFIG, "vocab_size": 152_064}, tokenizer)
    draft = ModelProfile("d", {**SMALLER, "vocab_size": 151_936}, tokenizer)
    right = result(check_pair(target, draft), "padded_sizes")
    assert right.outcome == "ok"
    assert right.text == (
        "152064 and 151936 rows for 151665 ids, padding ignored: 399 of the target and 271 of the "
        "draft"
    )


def test_a_tokenizer_larger_than_its_model_is_a_warning():
    target = model(bpe(added=["<tool>"]), vocab_size=10)
    found = check_pair(target, model(bpe(added=["<tool>"]), "draft", vocab_size=10))
    assert result(found, "padded_sizes").outcome == "warning"


def test_fr12_tokenizers_of_two_kinds_are_told_with_both_names():
    found = report(bpe(), unigram())
    warning = result(found, "tokenizer_kinds")
    assert warning.outcome == "warning"
    assert "the model is BPE in the target, Unigram in the draft" in warning.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lowercase": True}, "the normalizer is none in the target, Lowercase in the draft"),
        ({"splits": True}, "the pre-tokenizer is none in the target, Whitespace in the draft"),
    ],
)
def test_text_that_is_split_otherwise_is_a_warning(settings: dict[str, Any], text: str):
    warning = result(report(bpe(), bpe(**settings)), "tokenizer_kinds")
    assert warning.outcome == "warning"
    assert text in warning.text
    assert "the prompt is prepared by the target's alone, for both" in warning.text


def test_one_kind_of_splitting_with_other_settings_is_a_warning():
    one, other = byte_level(), byte_level()
    other.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    warning = result(report(one, other), "tokenizer_kinds")
    assert "the pre-tokenizer is ByteLevel on both sides, set otherwise" in warning.text


def test_fr09_another_beginning_is_a_warning_with_the_ids_of_both():
    warning = result(report(bpe(adds_bos=True), bpe()), "beginnings")
    assert warning.outcome == "warning"
    assert warning.text.startswith(
        "'hi' becomes [0, 5] in the target, nothing around it in the draft"
    )
    right = result(report(bpe(adds_bos=True), bpe(adds_bos=True)), "beginnings")
    assert right.text == "tokens around a text: 'hi' becomes [0, 5] on both sides"


@pytest.mark.parametrize(
    ("target", "draft", "outcome", "text"),
    [
        ("a", "a", "ok", "the chat template is the same"),
        ("a", "b", "warning", "the draft has another chat template"),
        ("a", None, "warning", "the draft has no chat template"),
        (None, "a", "warning", "the target has no chat template"),
        (None, None, "warning", "the target has no chat template"),
        ({"default": "a", "tools": "b"}, {"default": "a", "tools": "b"}, "ok", "is the same"),
        ({"default": "a"}, "a", "warning", "the draft has another chat template"),
    ],
)
def test_chat_templates(target: Any, draft: Any, outcome: str, text: str):
    said = result(report(bpe(chat_template=target), bpe(chat_template=draft)), "chat_templates")
    assert said.outcome == outcome
    assert text in said.text


@pytest.mark.parametrize(("length", "outcome"), [(256, "warning"), (512, "ok"), (1024, "ok")])
def test_a_draft_that_reads_less_ends_a_run_earlier(length: int, outcome: str):
    draft = model(bpe(), "draft", max_position_embeddings=length)
    said = result(check_pair(model(bpe()), draft), "context_lengths")
    assert said.outcome == outcome
    assert ("a run ends at 256" in said.text) == (outcome == "warning")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model_type": "mamba"}, "the draft has the state of a 'mamba'"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "the draft has layers of the kind linear_attention",
        ),
    ],
)
def test_a_cache_that_cannot_forget_is_refused(settings: dict[str, Any], text: str):
    found = check_pair(model(bpe()), model(bpe(), "draft", **settings))
    refused = result(found, "rollback")
    assert refused.outcome == "refused"
    assert text in refused.text


def test_windows_can_be_rolled_back():
    draft = model(bpe(), "draft", layer_types=["sliding_attention", "full_attention"])
    assert result(check_pair(model(bpe()), draft), "rollback").outcome == "ok"


def test_a_model_with_an_encoder_is_refused():
    target = replace(model(bpe(), model_type="t5"), is_decoder=False)
    refused = result(check_pair(target, model(bpe(), "draft")), "rollback")
    assert refused.text == "the target is an encoder with a decoder ('t5')"


def test_a_draft_larger_than_its_target_is_a_warning():
    found = check_pair(model(bpe(), "draft"), model(bpe()))
    warning = result(found, "size_order")
    assert (warning.outcome, warning.remedy) == ("warning", "choose a smaller draft")


def test_an_architecture_that_is_not_known_here_is_no_reason_to_refuse():
    draft = model(bpe(), "draft", model_type="brand_new")
    assert result(check_pair(model(bpe()), draft), "size_order").outcome == "ok"


def test_several_reasons_are_all_told():
    draft = model(bpe(exchanged("cat", "dog")), "draft", model_type="mamba")
    with pytest.raises(IncompatibleModelsError) as raised:
        check_pair(model(bpe()), draft).require()
    assert "their tokenizers differ" in str(raised.value)
    assert "the state of a 'mamba'" in str(raised.value)


def test_two_large_vocabularies_are_compared_within_a_second():
    texts = {id_: f"token {id_}" for id_ in range(150_000)}
    others = {**texts, 140_000: "another"}
    target, draft = (
        ModelProfile(name, {**CONFIG, "vocab_size": 152_064}, TokenizerProfile(ids))
        for name, ids in (("target", texts), ("draft", others))
    )
    started = time.perf_counter()
    found = check_pair(target, draft)
    assert time.perf_counter() - started < 1
    assert result(found, "token_texts").differences == (
        Difference(140_000, "token 140000", "another"),
    )


def test_a_report_is_plain_values():
    values = report(bpe(), bpe(exchanged("cat", "dog"))).to_dict()
    assert (values["target"], values["draft"], values["outcome"]) == ("target", "draft", "refused")
    assert [rule["rule"] for rule in values["rules"]] == [rule.__name__ for rule in RULES]
    assert values["rules"][0]["differences"][0] == {"id": 6, "target": "cat", "draft": "dog"}


def test_a_profile_reads_the_language_model_of_a_larger_one(tmp_path: Path):
    tokenizer = bpe()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 99}}'
    )
    profile = ModelProfile.of(tmp_path, tokenizer, name="x")
    assert profile.config["model_type"] == "gemma3_text"
    assert profile.num_rows == 99
    assert profile.num_params is None
