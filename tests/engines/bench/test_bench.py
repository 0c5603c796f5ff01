"""Benchmarks: the order of measurements, what is held to, and a whole one on tiny terms."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engines.base import Engine
from engines.bench.cpu import main, step_times
from engines.bench.passes import Passes
from engines.bench.timing import Figure, Ratio, alternate, report
from tests.conftest import TableModel


def test_the_first_way_is_another_one_each_time_and_the_first_round_does_not_count():
    order: list[str] = []

    def way(name: str):
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    values = alternate({name: way(name) for name in "abc"}, 3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert values == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


@pytest.mark.parametrize(
    ("value", "at_most", "expected"),
    [
        (1.0, True, "meets the aim"),
        (1.2, True, "holds"),
        (1.4, True, "does not hold"),
        (1.4, False, "meets the aim"),
        (1.2, False, "holds"),
        (1.0, False, "does not hold"),
    ],
)
def test_a_ratio_is_judged_by_its_marks(value: float, at_most: bool, expected: str):
    hold, aim = (1.3, 1.1) if at_most else (1.1, 1.3)
    assert Ratio("x", value, hold, aim, at_most=at_most).verdict == expected


def test_a_ratio_without_marks_is_shown():
    assert Ratio("x", 2.0).verdict == "shown"


def test_a_report_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]):
    report([Figure.of("step", [3.0, 1.0, 2.0], "ms")], [Ratio("r", 1.0, 1.3, 1.1)], {"K": 4})
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["figures"] == [
        {"name": "step", "median": 2.0, "low": 1.0, "high": 3.0, "unit": "ms"}
    ]
    assert result["ratios"][0]["verdict"] == "meets the aim"
    assert result["K"] == 4
    assert any("step" in row and "2.00" in row for row in table)


def test_passes_are_made_again_in_order():
    passes = Passes()
    model = passes.recording("target", TableModel.random(0))
    model.forward((1, 2, 3), num_logits=1)
    model.forward((4, 5), num_logits=2)
    model.truncate(4)
    assert model.num_cached_tokens == 4

    again = TableModel.random(0)
    passes.again({"target": again})

    assert again.token_ids == [1, 2, 3, 4]
    assert again.num_passes == 2


@pytest.mark.bundled
def test_steps_of_the_bundled_pair_are_timed(bundled_engine: Engine):
    steps = step_times(bundled_engine, [1, 2, 3])  # type: ignore[arg-type]
    assert {"target step of 1", "target step of 9", "draft step"} <= steps.keys()
    assert np.median(steps["draft step"]) < np.median(steps["target step of 1"])


@pytest.mark.bundled
def test_a_whole_benchmark_prints_its_ratios(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engines.bench.cpu.PROMPTS", ("Count to three.",))
    assert main(["--max-new-tokens", "6", "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["identical_to_plain"]["speculative"] is True
    assert len(result["ratios"]) >= 8
    assert all(np.isfinite(ratio["value"]) for ratio in result["ratios"])
