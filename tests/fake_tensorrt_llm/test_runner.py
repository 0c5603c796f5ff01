"""A runner decodes as promised: alone, behind a draft, and at its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.fake_tensorrt_llm.calls import (
    PROMPT,
    Install,
    K,
    S,
    generate,
    ids_tensor,
    lib,
    new_ids,
)
from tests.fake_tensorrt_llm.scenario import Scenario


@pytest.mark.parametrize("num_draft_tokens", [1, 2, K])
def test_drafting_changes_no_greedy_output(
    num_draft_tokens: int, install: Install, open_pair: Callable[..., Any]
):
    install(Scenario())
    draft, target = open_pair()
    plain = new_ids(generate(target, PROMPT, 60), len(PROMPT))

    token_ids, num_accepted, num_drafted = list(PROMPT), 0, 0
    while len(token_ids) < 55:
        proposed = new_ids(generate(draft, token_ids, num_draft_tokens), len(token_ids))
        step = generate(target, token_ids, num_draft_tokens + 1, draft_tokens_list=[proposed])
        new = new_ids(step, len(token_ids))
        assert len(proposed) == num_draft_tokens
        assert 1 <= len(new) <= num_draft_tokens + 1
        assert new[:-1] == proposed[: len(new) - 1]
        token_ids += new
        num_accepted += len(new) - 1
        num_drafted += num_draft_tokens

    assert token_ids[len(PROMPT) :] == plain[: len(token_ids) - len(PROMPT)]
    assert 0 < num_accepted < num_drafted


def test_the_draft_agrees_about_two_times_in_three(install: Install):
    install(Scenario())
    table = lib("trtllm_fake.table").TableModel
    target, draft = table(258, 320, is_draft=False), table(258, 320, is_draft=True)
    contexts = np.random.default_rng(0).integers(0, 258, (1000, 2)).tolist()

    choices = [(target.logits(ids).argmax(), draft.logits(ids).argmax()) for ids in contexts]

    assert 0.6 < np.mean([a == b for a, b in choices]) < 0.75
    assert max(max(pair) for pair in choices) < 258


def test_output_ids_are_padded_with_the_end_id(install: Install, open_pair: Callable[..., Any]):
    install(Scenario())
    _, target = open_pair()
    result = generate(target, PROMPT, 2)

    assert set(result) == {"output_ids", "sequence_lengths"}
    assert result["output_ids"].shape == (1, 1, S)
    assert result["output_ids"].dtype == result["sequence_lengths"].dtype == torch.int32
    assert result["output_ids"][0, 0, :3].tolist() == PROMPT
    assert set(result["output_ids"][0, 0, 5:].tolist()) == {-1}
    assert result["sequence_lengths"].tolist() == [[5]]
    only_ids = generate(target, PROMPT, 2, return_dict=False)
    assert torch.equal(only_ids, result["output_ids"])


@pytest.mark.parametrize(
    ("length", "num_new_tokens", "draft_ids", "message"),
    [
        (3, 2, [], "Assertion failed"),
        (3, 2, [1] * (K + 1), "exceeds maximum draft tokens length"),
        (S - K, 2, None, r"Maximum input length \(92\) exceeds the engine or specified limit"),
        (3, S, None, r"\+ maximum new tokens \(96\) exceeds the engine or specified limit"),
        (0, 2, None, "Prompt length"),
        (3, 2, [320], "not in the vocabulary"),
    ],
)
def test_a_request_beyond_the_limits_is_refused(
    length: int,
    num_new_tokens: int,
    draft_ids: list[int] | None,
    message: str,
    install: Install,
    open_pair: Callable[..., Any],
):
    install(Scenario())
    _, target = open_pair()

    with pytest.raises(RuntimeError, match=message):
        generate(
            target,
            [5] * length,
            num_new_tokens,
            draft_tokens_list=None if draft_ids is None else [draft_ids],
        )


def test_other_requests_that_are_refused(install: Install, open_pair: Callable[..., Any]):
    install(Scenario())
    draft, target = open_pair()
    with pytest.raises(RuntimeError, match=r"larger than maximum number of draft tokens \(0\)"):
        generate(draft, PROMPT, 2, draft_tokens_list=[[1]])
    with pytest.raises(TypeError):
        generate(target, PROMPT, 2, end_id=None)
    with pytest.raises(RuntimeError, match="batch size"):
        target.generate([ids_tensor(PROMPT)] * 2, end_id=-1)
    with pytest.raises(RuntimeError, match="beam width"):
        generate(target, PROMPT, 2, num_beams=2)
    with pytest.raises(AssertionError, match="not lossless"):
        generate(target, PROMPT, 2, draft_tokens_list=[[1]], top_k=None, temperature=1.0)


def test_what_does_not_fit_is_shortened_in_silence(
    install: Install, open_pair: Callable[..., Any], capfd: pytest.CaptureFixture[str]
):
    install(Scenario())
    _, target = open_pair(max_num_tokens=12)
    prompt = generate(target, PROMPT, 7)["output_ids"][0, 0, :10].tolist()
    best = new_ids(generate(target, prompt, K), len(prompt))

    new = new_ids(generate(target, prompt, K + 1, draft_tokens_list=[best]), len(prompt))

    assert new == best[:3]  # two of four drafts fit, and the target adds one
    assert "Draft tokens shortened from 4 to 2" in capfd.readouterr().err


def test_an_accepted_end_token_is_left_out(install: Install, open_pair: Callable[..., Any]):
    install(Scenario())
    _, target = open_pair()
    best = new_ids(generate(target, PROMPT, K + 1), len(PROMPT))

    def step(end_id: int) -> list[int]:
        drafts = [best[:K]]
        result = generate(target, PROMPT, K + 1, draft_tokens_list=drafts, end_id=end_id)
        return new_ids(result, len(PROMPT))

    assert step(-1) == best
    assert step(best[2]) == best[:2]
    assert step(best[0]) == []


def test_a_plain_request_ends_before_its_end_id_and_after_a_stop_word(
    install: Install, open_pair: Callable[..., Any]
):
    install(Scenario())
    _, target = open_pair()
    best = new_ids(generate(target, PROMPT, 10), len(PROMPT))

    ended = generate(target, PROMPT, 10, end_id=best[4])
    stopped = generate(target, PROMPT, 10, stop_words_list=[[[best[4]], [300]]])

    assert new_ids(ended, len(PROMPT)) == best[:4]
    assert new_ids(stopped, len(PROMPT)) == best[:5]


def test_streaming_yields_everything_so_far(install: Install, open_pair: Callable[..., Any]):
    fake = install(Scenario())
    _, target = open_pair()
    best = new_ids(generate(target, PROMPT, 5), len(PROMPT))

    chunks = [new_ids(r, len(PROMPT)) for r in generate(target, PROMPT, 5, streaming=True)]
    assert chunks == [best[: n + 1] for n in range(5)]
    assert fake.read_calls("abandoned") == []

    stream = generate(target, PROMPT, 5, streaming=True)
    next(stream)
    stream.close()
    assert len(fake.read_calls("abandoned")) == 1


def test_logits_come_in_two_shapes(install: Install, open_pair: Callable[..., Any]):
    install(Scenario())
    _, target = open_pair(gather_generation_logits=True)
    plain = generate(target, PROMPT, 3)
    best = new_ids(plain, len(PROMPT))
    verified = generate(target, PROMPT, 3, draft_tokens_list=[[best[0], best[1] + 1]])

    assert plain["generation_logits"].shape == (1, 1, 3, 320)
    assert plain["generation_logits"][0, 0].argmax(-1).tolist() == best
    (rows,) = verified["generation_logits"]
    assert rows.shape == (1, 2, 320)
    assert torch.equal(rows[0], plain["generation_logits"][0, 0, :2])


def test_logits_need_to_be_gathered(install: Install, open_pair: Callable[..., Any]):
    install(Scenario())
    draft, target = open_pair()

    with pytest.raises(RuntimeError, match="gather_generation_logits"):
        generate(draft, PROMPT, 1, output_generation_logits=True)
    with pytest.raises(RuntimeError, match="gather_generation_logits"):
        generate(
            target, PROMPT, 2, draft_tokens_list=[[1]], draft_logits_list=[torch.zeros(1, 320)]
        )
    assert "generation_logits" not in generate(draft, PROMPT, 1)


def test_sampling_with_draft_logits_follows_the_target(install: Install):
    install(Scenario())
    decoding = lib("trtllm_fake.decoding")
    model = lib("trtllm_fake.table").TableModel(3, 3, is_draft=False)
    draft_logits = np.array([[0.0, 1.0, 0.5]])
    draft_probs = decoding.softmax(draft_logits[0])
    num_draws = 2000
    counts = np.zeros(3)
    for seed in range(num_draws):
        sampling = decoding.Sampling(temperature=0.7, seed=2 * seed + 1)
        drafted = [decoding.draw(draft_probs, np.random.default_rng(2 * seed))]
        new, _ = decoding.verify(
            model, [1, 2], drafted, draft_logits, sampling, sampling.generator(), None
        )
        counts[new[0]] += 1

    expected = decoding.softmax(model.logits([1, 2]) / 0.7)
    error = np.sqrt(expected * (1 - expected) / num_draws)
    assert (abs(counts / num_draws - expected) < 4 * error).all()


def test_the_same_seed_samples_the_same(install: Install, open_pair: Callable[..., Any]):
    install(Scenario())
    draft, _ = open_pair()

    def sample(seed: int) -> list[int]:
        settings = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "random_seed": seed}
        return new_ids(generate(draft, PROMPT, 10, **settings), len(PROMPT))

    assert sample(1) == sample(1) != sample(2)


def test_a_temperature_alone_samples_nothing(install: Install, open_pair: Callable[..., Any]):
    install(Scenario())
    draft, _ = open_pair()
    settings = {"top_k": None, "temperature": 1.0}

    drawn = new_ids(generate(draft, PROMPT, 10, **settings), len(PROMPT))

    assert drawn == new_ids(generate(draft, PROMPT, 10), len(PROMPT))


def test_a_generation_may_fail(install: Install, open_pair: Callable[..., Any]):
    install(Scenario(generate="error", generate_after=1))
    _, target = open_pair()
    generate(target, PROMPT, 1)
    with pytest.raises(RuntimeError, match="CUDA error"):
        generate(target, PROMPT, 1)

    install(Scenario(generate="short"))
    _, target = open_pair(gather_generation_logits=True)
    assert len(new_ids(generate(target, PROMPT, 5), len(PROMPT))) == 1

    install(Scenario(generate="nan_logits"))
    _, target = open_pair(gather_generation_logits=True)
    assert generate(target, PROMPT, 5)["generation_logits"].isnan().all()
