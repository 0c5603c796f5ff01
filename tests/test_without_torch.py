"""What the page and the bundled pair need: an environment that has everything but PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from engines.child import PROJECT_ROOT

TORCH_EXTRA = ("torch", "functorch", "accelerate")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to every installed package but those that PyTorch brings."""
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(TORCH_EXTRA):
            (folder / path.name).symlink_to(path)
    return folder


def python(
    packages: Path, *args: str, store: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that sees these packages and no others."""
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{PROJECT_ROOT}"}
    if store is not None:
        environment["SPECDEC_STORE"] = str(store)
    return subprocess.run(
        [sys.executable, "-S", *args],
        cwd=PROJECT_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_environment_has_no_torch(packages: Path):
    result = python(packages, "-c", "import torch")
    assert "No module named 'torch'" in result.stderr


def test_the_page_can_be_made(packages: Path):
    code = "from engines import EngineSlot; from specdec_ui.layout import build_app; "
    result = python(packages, "-c", code + "build_app(EngineSlot())")
    assert (result.returncode, result.stderr) == (0, "")


def test_doctor_says_what_is_missing_for_what(packages: Path):
    result = python(packages, "-m", "engines", "doctor", "--json")
    backends = json.loads(result.stdout.splitlines()[-1])["backends"]
    assert backends["onnxruntime"]["usable"]
    assert not backends["transformers"]["usable"]
    assert backends["transformers"]["detail"] == (
        "needs torch, accelerate: run 'pip install -r requirements-torch.txt'"
    )


@pytest.mark.bundled
def test_the_bundled_pair_runs(packages: Path):
    result = python(
        packages,
        *("-m", "engines", "run", "--prompt", "Count to five.", "--baseline", "--json"),
        *("--max-new-tokens", "16"),
    )
    assert result.returncode == 0, result.stderr
    run = json.loads(result.stdout.splitlines()[-1])
    assert run["identical"] is True
    assert run["effective_settings"]["backend"] == "onnxruntime"


@pytest.mark.bundled
def test_the_bundled_draft_is_built_from_what_ships(packages: Path, tmp_path: Path):
    """The target's conversion is the store's own; the rest of the build is made anew."""
    from engines.checkpoints import built_path, parse_reference
    from engines.config import BUNDLED
    from engines.store import EngineStore

    target = built_path(parse_reference(BUNDLED), EngineStore())
    (tmp_path / target.name).symlink_to(target)
    result = python(packages, "-m", "engines", "build", store=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "unpack SmolLM2-135M-Draft" in result.stderr
    assert "narrow SmolLM2-135M-Draft" in result.stderr
    assert "these logits and those of transformers" in result.stderr


def test_another_model_is_refused_with_the_remedy(packages: Path, tiny_target: Path):
    result = python(packages, "-m", "engines", "build", "--target", str(tiny_target))
    assert result.returncode == 1
    assert "its heads have 8 dimensions" in result.stderr
    assert "pip install -r requirements-torch.txt" in result.stderr


def test_tuning_a_draft_says_what_it_needs(packages: Path, tmp_path: Path):
    output = tmp_path / "draft"
    result = python(packages, "-m", "engines", "distill", "--output", str(output), "--minutes", "1")
    assert result.returncode == 1
    assert "pip install -r requirements-torch.txt" in result.stderr
    assert not output.exists()
