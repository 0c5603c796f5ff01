"""The environment of a run: enough to judge a figure, and nothing about whose machine it is."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
from datetime import datetime
from pathlib import Path

import pytest

from engines.environment import environment, usable_cpus


def test_it_holds_these_facts_and_no_others():
    facts = environment()

    assert facts.keys() == {
        "date",
        "system",
        "python",
        "cpu",
        "num_cpus",
        "memory_bytes",
        "versions",
    }
    assert facts["versions"].keys() <= {"onnxruntime", "torch", "transformers", "gradio", "numpy"}
    assert facts["memory_bytes"] > 2**20
    assert facts["cpu"]


def test_the_date_says_its_time_zone():
    assert datetime.fromisoformat(environment()["date"]).utcoffset() is not None


def test_it_names_no_user_host_or_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for variable in ("USER", "LOGNAME", "USERNAME", "HOSTNAME"):
        monkeypatch.setenv(variable, "name-of-a-person")
    monkeypatch.setattr(platform, "node", lambda: "name-of-a-host")
    monkeypatch.setattr(socket, "gethostname", lambda: "name-of-a-host")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    told = json.dumps(environment())

    assert getpass.getuser() == "name-of-a-person"
    for name in ("name-of-a-person", "name-of-a-host", str(tmp_path), os.path.expanduser("~")):
        assert name not in told


def test_processors_are_those_that_this_process_may_use():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)
