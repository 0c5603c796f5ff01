"""The evaluation: what it measures is what the engine's own loop does on the same prompts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from engines.base import Engine
from engines.config import EngineConfig, GenerationRequest, SamplingParams
from engines.distill import evaluation
from engines.distill.acceptance import Acceptance, replay, total
from engines.distill.evaluation import ALL, ANSWER_TOKENS, NUMS_DRAFT_TOKENS, SAMPLINGS, evaluate
from engines.distill.prompts import Prompt
from engines.distill.writing import write
from engines.events import Step
from engines.stats import stats_of
from tests.conftest import load_engine
from tests.engines.distill.conftest import float32_model, script_in

PROMPTS = [
    Prompt("Hello!", "greeting"),
    Prompt("1 + 1 =", "sums"),
    Prompt("A much longer one, so that openings differ", "greeting"),
]
NOISE = 0.02  # of a draft's weights that is neither right nor wrong always


@pytest.fixture(scope="module")
def near_draft(chat_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "near-draft"
    shutil.copytree(chat_target, folder)
    model = float32_model(folder)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter += torch.randn_like(parameter) * NOISE
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(chat_target: Path, near_draft: Path) -> Iterator[Engine]:
    with load_engine(EngineConfig(target=str(chat_target), draft=str(near_draft))) as engine:
        yield engine


def results_of(
    target: Path, draft: Path, prompts: Sequence[Prompt], *, seed: int = 0
) -> tuple[list[float], dict[str, Any]]:
    """Return the shares that were reported, and the results."""
    tokenizer, script = script_in(target)
    *shares, results = evaluate(
        float32_model(target), float32_model(draft), tokenizer, script, prompts, seed=seed
    )
    assert isinstance(results, dict)
    assert not any(isinstance(share, dict) for share in shares)
    return shares, results  # type: ignore[return-value]


def test_greedy_figures_are_those_of_the_engines_own_output(
    engine: Engine, chat_target: Path, near_draft: Path
):
    draft = float32_model(near_draft)
    agreed: dict[str, list[bool]] = {}
    parts: dict[tuple[str, int], list[Acceptance]] = {}
    for prompt in PROMPTS:
        ids = engine.encode(prompt.text, chat_template=True)
        request = GenerationRequest(ids, "none", 0, ANSWER_TOKENS)
        output = [token.id for event in engine.generate(request) if isinstance(event, Step)
                  for token in event.tokens]  # fmt: skip
        with torch.no_grad():
            logits = draft(torch.tensor([[*ids, *output]])).logits[0, len(ids) - 1 : -1]
        is_match = (logits.argmax(-1) == torch.tensor(output)).tolist()
        for name in (prompt.category, ALL):
            agreed.setdefault(name, []).extend(is_match)
            for number in NUMS_DRAFT_TOKENS:
                parts.setdefault((name, number), []).append(replay(is_match, number))

    _, results = results_of(chat_target, near_draft, PROMPTS)

    assert results["greedy"].keys() == {"greeting", "sums", ALL}
    assert results["num_left_out"] == 0
    for name, figures in results["greedy"].items():
        assert figures["num_prompts"] == {"greeting": 2, "sums": 1, ALL: 3}[name]
        assert figures["num_tokens"] == len(agreed[name])
        assert figures["agreement"] == fmean(agreed[name])
        for number in NUMS_DRAFT_TOKENS:
            expected = total(parts[name, number])
            assert figures["num_draft_tokens"][str(number)] == {
                "acceptance_rate": expected.acceptance_rate,
                "mean_acceptance_length": expected.mean_acceptance_length,
            }
    assert 0.2 < results["greedy"][ALL]["agreement"] < 0.95


def test_figures_at_temperature_1_are_those_of_the_engines_own_loop(
    engine: Engine, chat_target: Path, near_draft: Path
):
    number, num_runs = 2, 12
    prompts = [Prompt(f"{run} and more", category=str(run)) for run in range(num_runs)]
    looped = []
    for run, prompt in enumerate(prompts):
        request = GenerationRequest(
            engine.encode(prompt.text, chat_template=True),
            "model",
            number,
            ANSWER_TOKENS,
            SamplingParams(temperature=1, seed=run),
            min_draft_prob=0,
        )
        length = stats_of(list(engine.generate(request))).mean_acceptance_length
        assert length is not None
        looped.append(length)

    figures = results_of(chat_target, near_draft, prompts)[1]["temperature 1"]
    replayed = [
        figures[prompt.category]["num_draft_tokens"][str(number)]["mean_acceptance_length"]
        for prompt in prompts
    ]

    standard_error = sqrt((variance(looped) + variance(replayed)) / num_runs)
    assert 1.2 < fmean(looped) < 2.8
    assert abs(fmean(looped) - fmean(replayed)) <= 4 * standard_error
    assert standard_error < 0.07


def test_answers_that_do_not_fit_together_are_written_a_few_at_a_time(
    chat_target: Path, near_draft: Path, monkeypatch: pytest.MonkeyPatch
):
    _, together = results_of(chat_target, near_draft, PROMPTS)
    sizes = []

    def written(*args: Any, openings: Sequence[list[int]], **options: Any) -> Any:
        sizes.append(len(openings))
        return write(*args, openings=openings, **options)

    memory = SimpleNamespace(available=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(evaluation, "write", written)
    _, apart = results_of(chat_target, near_draft, PROMPTS)

    assert sizes == [1] * 6
    assert apart["greedy"].keys() == together["greedy"].keys()
    for name, figures in apart["greedy"].items():
        assert figures == together["greedy"][name]


def test_the_target_as_its_own_draft_is_always_accepted(chat_target: Path):
    _, results = results_of(chat_target, chat_target, PROMPTS[:1])

    for sampling in SAMPLINGS:
        figures = results[sampling][ALL]
        assert figures["agreement"] == pytest.approx(1, abs=1e-3)
        for number in NUMS_DRAFT_TOKENS:
            assert figures["num_draft_tokens"][str(number)]["acceptance_rate"] > 0.99


def test_a_prompt_without_a_category_counts_once(chat_target: Path):
    _, results = results_of(chat_target, chat_target, [Prompt("Hello!"), PROMPTS[1]])

    assert [(name, figures["num_prompts"]) for name, figures in results["greedy"].items()] == [
        (ALL, 2),
        ("sums", 1),
    ]


def test_the_reported_share_grows_to_all_of_it(chat_target: Path):
    shares, _ = results_of(chat_target, chat_target, PROMPTS[:1])

    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.01
    assert shares[-1] == 1


def test_prompts_that_are_too_long_are_left_out_and_counted(chat_target: Path):
    short, longest, longer = Prompt("short"), Prompt("x" * 600), Prompt("x" * 601)
    _, results = results_of(chat_target, chat_target, [short, longer, longest])

    assert results["num_left_out"] == 1
    assert results["greedy"][ALL]["num_prompts"] == 2
    with pytest.raises(ValueError, match="no prompt to evaluate on has 600 tokens or fewer"):
        results_of(chat_target, chat_target, [longer])
