"""The time of a phase over several runs, and what is reported of it when."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engines.distill.clock import Clock


class Hand:
    """What the machine's clock shows."""

    now = 1000.0


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(time, "monotonic", lambda: hand.now)
    return hand


def test_a_phase_takes_what_all_of_its_runs_took(hand: Hand):
    phase: dict[str, Any] = {}
    first = Clock(phase)
    hand.now += 5
    first.store()
    hand.now += 100  # interrupted: what was not kept is not counted, nor what lies between

    second = Clock(phase)
    hand.now += 2

    assert second.elapsed_s == 7
    second.store()
    assert phase == {"elapsed_s": 7}


def test_reports_are_due_half_a_second_apart(hand: Hand):
    clock = Clock({})
    due = []
    for _ in range(8):
        hand.now += 0.25
        due.append(clock.is_time_to_report())

    assert due == [False, True] * 4


def test_a_rate_is_that_since_the_last_call(hand: Hand):
    clock = Clock({})
    hand.now += 1
    assert clock.rate(50) is None

    hand.now += 2
    assert clock.rate(250) == 100
