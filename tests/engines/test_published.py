"""The published figures: which target they belong to, and their ratios."""

from __future__ import annotations

import pytest

from engines.published import PUBLISHED, published_figures


@pytest.mark.parametrize(
    ("target", "num_figures"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", 3),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", 3),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", 2),
        ("meta-llama/Llama-3.1-8B-Instruct", 0),
        ("SmolLM2-135M-Instruct", 0),
    ],
)
def test_a_target_has_the_figures_of_its_name(target: str, num_figures: int):
    assert len(published_figures(target)) == num_figures


def test_the_ratios_are_those_that_were_published():
    ratios = {(figure.target, figure.draft): round(figure.speedup, 2) for figure in PUBLISHED}

    assert ratios["Llama-3.1-405B", "Llama 3.2 3B"] == 3.61
    assert ratios["Llama-3.1-70B", "Llama 3.2 1B"] == 2.86
    assert ratios["Llama-3.3-70B", "Llama 3.2 1B"] == 3.55


def test_each_figure_names_its_source():
    assert all(figure.source.startswith("https://developer.nvidia.com/") for figure in PUBLISHED)
