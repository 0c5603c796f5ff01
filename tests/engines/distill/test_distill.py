"""A distillation as its user has it: a child process that may be stopped at any moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines import EngineConfig, GenerationRequest, stats_of
from engines.distill import RECORD, DistillProgress, DistillSpec, distill
from engines.errors import EngineBuildError
from tests.conftest import load_engine


@pytest.fixture
def spec(plain_target: Path, tmp_path: Path) -> DistillSpec:
    return DistillSpec(
        str(tmp_path / "draft"),
        str(plain_target),
        num_layers=3,
        minutes=0.04,
        sequence_length=48,
    )


def stopped_at(spec: DistillSpec, is_it: Callable[[DistillProgress], bool]) -> None:
    """Run until a report is the one waited for, then stop as the page does: by closing."""
    running = distill(spec)
    assert any(report is not None and is_it(report) for report in running)
    children = [process.pid for process in psutil.Process().children()]
    running.close()
    assert children
    assert not any(map(psutil.pid_exists, children))


def state_of(spec: DistillSpec) -> dict[str, Any]:
    phases: dict[str, Any] = json.loads((spec.folder / "distill" / "state.json").read_text())
    return phases["phases"]  # type: ignore[no-any-return]


def accepts_as_a_draft(spec: DistillSpec) -> float:
    """Load the folder beside its target and return the acceptance rate of a greedy run."""
    config = EngineConfig(target=spec.target, draft=str(spec.folder))
    with load_engine(config) as engine:
        ids = engine.encode("hello", chat_template=False)
        stats = stats_of(list(engine.generate(GenerationRequest(ids, "model", 4, 64))))
    assert stats.acceptance_rate is not None
    return stats.acceptance_rate


def test_a_distillation_makes_a_draft_that_agrees_more_than_it_did_untrained(spec: DistillSpec):
    reports = [report for report in distill(spec) if report is not None]

    phases = list(dict.fromkeys(report.phase for report in reports))
    assert phases == ["prepare", "generate", "train", "evaluate", "save"]
    for phase in phases[1:]:
        fractions = [r.fraction for r in reports if r.phase == phase and r.fraction is not None]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1
    assert reports[-1].message == f"saved in {spec.folder}"

    record = json.loads((spec.folder / RECORD).read_text())
    curve = record["train"]["curve"]
    assert curve[0]["num_tokens"] == 0
    assert curve[-1]["agreement"] > curve[0]["agreement"]
    assert curve[-1]["overlap"] > curve[0]["overlap"]
    assert [report.agreement for report in reports if report.phase == "train" and report.agreement
            is not None] == [point["agreement"] for point in curve]  # fmt: skip
    assert (record["layers"], record["spec"]["seed"]) == ([0, 1, 3], 0)

    card = (spec.folder / "README.md").read_text()
    assert "### Greedy\n\n| category |" in card
    assert "### Temperature 1\n\n| category |" in card
    assert card.count("| all |") == 2
    assert not (spec.folder / "distill").exists()
    assert not list(spec.folder.glob(".*"))
    assert accepts_as_a_draft(spec) > 0


def test_a_distillation_goes_on_after_an_interruption_at_every_phase(
    spec: DistillSpec, tmp_path: Path
):
    questions = tmp_path / "questions.txt"
    questions.write_text("\n".join(f"Question {number}?" for number in range(96)))
    spec = replace(spec, evaluation=str(questions))
    resumed = replace(spec, resume=True)

    def texts() -> dict[str, tuple[int, bytes]]:
        files = (spec.folder / "distill").glob("text-*.npz")
        return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}

    stopped_at(spec, lambda report: report.phase == "generate")
    first = texts()
    num_kept = state_of(spec)["generate"]["num_chunks"]
    kept = [f"text-{number:05d}.npz" for number in range(num_kept)]
    assert len(kept) >= 1

    stopped_at(resumed, lambda report: report.phase == "train" and bool(report.num_tokens))
    second = texts()
    assert len(second) > len(first)
    assert [second[name] for name in kept] == [first[name] for name in kept]
    curve = state_of(spec)["train"]["curve"]
    assert state_of(spec)["generate"]["is_done"]
    accepts_as_a_draft(spec)  # what is there so far is whole

    stopped_at(
        resumed,
        lambda report: report.phase == "evaluate" and 0 < (report.fraction or 0) < 1,
    )
    longer = state_of(spec)["train"]["curve"]
    assert texts() == second
    assert longer[: len(curve)] == curve
    assert len(longer) > len(curve)
    elapsed = [point["elapsed_s"] for point in longer]
    assert elapsed == sorted(set(elapsed))
    assert elapsed[-1] >= spec.minutes * 60 * 0.65 > elapsed[-1] - 2
    draft = (spec.folder / "model.safetensors").stat().st_mtime_ns

    phases = {report.phase for report in distill(resumed) if report is not None}
    record = json.loads((spec.folder / RECORD).read_text())
    assert phases == {"prepare", "evaluate", "save"}
    assert record["train"]["curve"] == longer
    assert record["evaluate"]["results"]["greedy"]["all"]["num_prompts"] == 96
    assert (spec.folder / "model.safetensors").stat().st_mtime_ns == draft
    assert not (spec.folder / "distill").exists()


def test_what_a_library_says_is_passed_on_and_a_failure_is_one_sentence(
    spec: DistillSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = ["a warning", "5", "null", '["list"]', '{"phase": "train"}']
    (tmp_path / "sitecustomize.py").write_text(f"print(*{said!r}, sep='\\n', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reports: list[DistillProgress | None] = []

    with pytest.raises(EngineBuildError) as caught:
        reports.extend(distill(replace(spec, num_layers=9)))

    assert [report for report in reports if report is not None] == [
        DistillProgress("prepare", 0.0, message=line) for line in said
    ]
    assert str(caught.value) == ("distilling: num_layers is 9, and the target has 4: use 1 to 4")
    assert not spec.folder.exists()
