"""The files that run in TensorRT-LLM's interpreter: standard library only, for Python 3.10."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.child import PROJECT_ROOT
from engines.tensorrt_llm_backend.runtime.probe import MARK

SCRIPTS = sorted((PROJECT_ROOT / "engines" / "tensorrt_llm_backend" / "runtime").glob("*.py"))
THEIRS = {"tensorrt_llm", "torch"}
# Of modules that Python 3.10 has: what it does not have in them.
NEW_NAMES = {
    *("ExceptionGroup", "BaseExceptionGroup", "add_note", "StrEnum"),
    *("ReprEnum", "verify", "UTC", "file_digest"),
    *("TaskGroup", "Self", "Never", "LiteralString"),
    *("NotRequired", "Required", "TypeVarTuple", "Unpack"),
    *("assert_never", "assert_type", "reveal_type", "dataclass_transform"),
    *("batched", "getencoding"),
}
NEW_MODULES = {"tomllib", "wsgiref.types"}
needs_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def tree_of(script: Path) -> ast.Module:
    text = script.read_text(encoding="utf-8")
    return ast.parse(text, str(script), feature_version=(3, 10))


def modules_of(tree: ast.AST) -> set[str]:
    """Return every module that is imported somewhere below."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_there_are_three_scripts_and_their_package():
    assert [script.stem for script in SCRIPTS] == ["__init__", "build_engine", "probe", "worker"]


@needs_script
def test_their_syntax_is_that_of_python_3_10(script: Path):
    assert isinstance(tree_of(script), ast.Module)


@needs_script
def test_they_import_the_library_in_functions_only(script: Path):
    tree = tree_of(script)
    at_once = ast.Module([node for node in tree.body if not hasattr(node, "body")], [])

    def names(part: ast.AST) -> set[str]:
        return {module.partition(".")[0] for module in modules_of(part)}

    assert names(at_once) <= sys.stdlib_module_names
    assert names(tree) <= sys.stdlib_module_names | THEIRS


@needs_script
def test_they_use_no_names_newer_than_python_3_10(script: Path):
    tree = tree_of(script)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}

    assert not names & NEW_NAMES
    assert not modules_of(tree) & NEW_MODULES


def run_alone(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter that has the standard library and nothing else."""
    path = next(path for path in SCRIPTS if path.stem == script)
    return subprocess.run(
        [sys.executable, "-I", "-S", str(path), *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_probe_answers_where_nothing_is_installed():
    answer = run_alone("probe", "--import")

    (facts,) = (
        json.loads(line.removeprefix(MARK))
        for line in answer.stdout.splitlines()
        if line.startswith(MARK)
    )
    assert answer.returncode == 0, answer.stderr
    assert facts["tensorrt_llm"] is None
    assert facts["torch"] is None
    assert not facts["runs_engines"]
    assert not facts["builds_engines"]
    assert not facts["runs_pytorch"]


def test_the_build_says_in_one_sentence_that_the_library_is_missing(tmp_path: Path):
    spec = tmp_path / "build.json"
    spec.write_text(json.dumps({"output": str(tmp_path), "tensor_parallel_size": 1}))

    answer = run_alone("build_engine", str(spec))

    assert answer.returncode == 1
    assert answer.stdout.splitlines()[-1] == (
        "error: ModuleNotFoundError: No module named 'tensorrt_llm'"
    )
    assert answer.stderr == ""


def test_the_worker_can_be_asked_what_it_takes():
    answer = run_alone("worker", "--help")

    assert answer.returncode == 0, answer.stderr
    assert "--requests REQUESTS --replies REPLIES" in answer.stdout
