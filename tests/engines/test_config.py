"""What a caller leaves open: which draft, and how it drafts."""

import pytest

from engines.config import (
    BUNDLED,
    BUNDLED_DRAFT,
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFT_KINDS,
    resolve_draft,
)


@pytest.mark.parametrize(
    ("target", "draft", "draft_kind", "expected"),
    [
        (BUNDLED, None, None, (BUNDLED_DRAFT, "model")),
        (BUNDLED, "", None, (BUNDLED_DRAFT, "model")),
        (BUNDLED, "mine", None, ("mine", "model")),
        (BUNDLED, None, "model", (BUNDLED_DRAFT, "model")),
        (BUNDLED, None, "prompt_lookup", (None, "prompt_lookup")),
        (BUNDLED, None, "none", (None, "none")),
        ("other", None, None, (None, "prompt_lookup")),
        ("other", "mine", None, ("mine", "model")),
        ("other", None, "model", (None, "model")),  # refused where it is used
        ("other", "mine", "prompt_lookup", ("mine", "prompt_lookup")),
    ],
)
def test_the_bundled_target_has_a_draft_of_its_own(target, draft, draft_kind, expected):
    assert resolve_draft(target, draft, draft_kind) == expected


def test_every_draft_kind_has_a_default_number_of_draft_tokens():
    assert set(DEFAULT_NUM_DRAFT_TOKENS) == set(DRAFT_KINDS)
