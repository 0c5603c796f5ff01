"""Whether a draft may propose for a target: both must mean the same text by the same id."""

from __future__ import annotations

from collections.abc import Mapping

from engines.errors import IncompatibleModelsError

NUM_DIFFERENCES_SHOWN = 5


def check_vocabularies(
    target: str, target_ids: Mapping[str, int], draft: str, draft_ids: Mapping[str, int]
) -> None:
    """Compare two tokenizers id by id. Padded embedding rows do not count.

    Args:
        target: The target's name, for the message.
        target_ids: Its vocabulary, text to id.
        draft: The draft's name.
        draft_ids: Its vocabulary.

    Raises:
        IncompatibleModelsError: An id differs; the text names up to five with both strings.
    """
    if target_ids == draft_ids:
        return
    target_texts = {id_: text for text, id_ in target_ids.items()}
    draft_texts = {id_: text for text, id_ in draft_ids.items()}
    different = [
        id_
        for id_ in sorted(target_texts.keys() | draft_texts.keys())
        if target_texts.get(id_) != draft_texts.get(id_)
    ]
    shown = "; ".join(
        f"id {id_} is {target_texts.get(id_)!r} there, {draft_texts.get(id_)!r} here"
        for id_ in different[:NUM_DIFFERENCES_SHOWN]
    )
    raise IncompatibleModelsError(
        f"'{draft}' cannot draft for '{target}': their tokenizers differ at {len(different)} ids "
        f"({shown}); choose a draft of the target's family, or the draft kind 'prompt_lookup'"
    )
