"""What may be asked for, which layers a draft begins as, and what travels between processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from engines.distill import DistillProgress, DistillSpec
from engines.distill.spec import chosen_layers, part_seed

SPEC = DistillSpec("draft", num_layers=2)


@given(
    num_layers=st.integers(1, 40),
    num_more=st.integers(0, 40),
)
@example(num_layers=1, num_more=0)
@example(num_layers=40, num_more=0)
def test_as_many_different_layers_are_chosen_in_order_as_are_asked_for(
    num_layers: int, num_more: int
):
    total = num_layers + num_more
    layers = chosen_layers(replace(SPEC, num_layers=num_layers), total)

    assert len(layers) == num_layers
    assert list(layers) == sorted(set(layers))
    assert 0 <= layers[0] <= layers[-1] < total


@pytest.mark.parametrize(
    ("num_layers", "total", "layers"),
    [
        (1, 30, (0,)),
        (2, 30, (0, 29)),
        (3, 30, (0, 1, 29)),
        (4, 30, (0, 1, 28, 29)),
        (6, 30, (0, 1, 10, 19, 28, 29)),
        (30, 30, tuple(range(30))),
    ],
)
def test_the_ends_are_chosen_first_and_the_rest_evenly_between(
    num_layers: int, total: int, layers: tuple[int, ...]
):
    assert chosen_layers(replace(SPEC, num_layers=num_layers), total) == layers


def test_layers_that_are_named_are_taken_as_they_are():
    assert chosen_layers(replace(SPEC, layers=(1, 3)), 4) == (1, 3)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_layers": 5}, "num_layers is 5, and the target has 4: use 1 to 4"),
        ({"layers": (0, 4)}, "layers is 0,4: use numbers from 0 to 3"),
        ({"layers": (-1, 0)}, "layers is -1,0: use numbers from 0 to 3"),
        ({"layers": (5, 5)}, "layers is 5,5: name each once, the lowest first"),
        ({"layers": (9, 1)}, "layers is 9,1: name each once, the lowest first"),
        ({"layers": (0, 1.0)}, "layers is 0,1.0: use numbers from 0 to 3"),
    ],
)
def test_layers_that_a_target_lacks_are_refused(changes: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=f"^{told}$"):
        chosen_layers(replace(SPEC, **changes), 4)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"output": " "}, "output is empty: name a folder"),
        ({"output": "~nosuchuser/x"}, "there is no folder '~nosuchuser/x': "),
        ({"prompts": "~nosuchuser/x"}, "there is no folder '~nosuchuser/x': "),
        ({"evaluation": "~nosuchuser/x"}, "there is no folder '~nosuchuser/x': "),
        ({"target": ""}, "target is empty: name a model"),
        ({"num_layers": 0}, "num_layers is 0: use a whole number from 1"),
        ({"num_layers": True}, "num_layers is True: use a whole number"),
        ({"layers": (0, 1, 2)}, "layers names 3 layers and num_layers is 2: make them equal"),
        ({"layers": ()}, "layers names 0 layers and num_layers is 2"),
        ({"minutes": 0}, "minutes is 0: use more than 0"),
        ({"minutes": -1.0}, "minutes is -1.0: use more than 0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"minutes": float("inf")}, "minutes is inf: use more than 0, up to 10,080"),
        ({"minutes": "ten"}, "minutes is 'ten'"),
        ({"seed": -1}, "seed is -1: use a whole number from 0"),
        ({"seed": 2**53 + 1}, "seed is 9007199254740993"),
        ({"sequence_length": 31}, "sequence_length is 31: use a whole number from 32 to 4,096"),
        ({"sequence_length": 4097}, "sequence_length is 4097"),
        ({"max_tokens": 0}, "max_tokens is 0: use a whole number from 1"),
        ({"device": "tpu"}, "device is 'tpu': use one of auto, cpu, cuda"),
    ],
    ids=str,
)
def test_a_bad_argument_is_named_with_its_value_and_the_remedy(changes: dict[str, Any], told: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        replace(SPEC, **changes)

    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, layers=(3, 1), minutes=0.5, prompts="a b", max_tokens=9)]
)
def test_a_specification_comes_back_from_json(spec: DistillSpec):
    assert DistillSpec.from_json(spec.to_json()) == spec


def test_a_report_comes_back_from_json_without_what_is_unknown():
    report = DistillProgress("train", 1.5, fraction=0.25, loss=2.0, message="é\n")

    assert '"agreement"' not in report.to_json()
    assert (
        DistillProgress.from_mapping(
            {"phase": "train", "elapsed_s": 1.5, "fraction": 0.25, "loss": 2.0, "message": "é\n"}
            | {"invented": 1}
        )
        == report
    )


@given(seed=st.integers(0, 2**53), part=st.integers(0, 10**6))
@example(seed=2**53, part=10**6)
def test_the_seed_of_a_part_is_one_that_generators_take(seed: int, part: int):
    assert 0 <= part_seed(seed, part) < 2**63
    assert part_seed(seed, part) != part_seed(seed, part + 1)
