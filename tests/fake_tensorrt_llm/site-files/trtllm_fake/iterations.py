"""The loop inside the PyTorch flow: one prefill, then a draft and its verification at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from trtllm_fake.decoding import Sampling, verify
from trtllm_fake.table import TableModel

Propose: TypeAlias = Callable[[list[int]], list[int]]  # all ids so far -> draft ids

NGRAM_SIZES = (2, 1)


@dataclass(frozen=True)
class Iteration:
    """One pass of the target."""

    new_ids: list[int]
    draft_ids: list[int]
    num_accepted_tokens: int
    is_prefill: bool


def draft_by_model(draft: TableModel, num_draft_tokens: int) -> Propose:
    def propose(token_ids: list[int]) -> list[int]:
        extended = list(token_ids)
        for _ in range(num_draft_tokens):
            extended.append(int(draft.logits(extended).argmax()))
        return extended[len(token_ids) :]

    return propose


def draft_by_lookup(num_draft_tokens: int) -> Propose:
    """Propose what followed the last ids where they stood before."""

    def propose(token_ids: list[int]) -> list[int]:
        for size in NGRAM_SIZES:
            tail = token_ids[-size:]
            for end in range(len(token_ids) - 1, size - 1, -1):
                if token_ids[end - size : end] == tail:
                    return token_ids[end : end + num_draft_tokens]
        return []

    return propose


def iterate(
    model: TableModel, prompt: list[int], sampling: Sampling, propose: Propose | None
) -> Iterator[Iteration]:
    """Yield passes without end. A sampled draft id is kept where the target samples it too."""
    token_ids = list(prompt)
    generator = sampling.generator()
    is_prefill = True
    while True:
        draft_ids = [] if is_prefill or propose is None else propose(token_ids)
        new_ids, _ = verify(model, token_ids, draft_ids, None, sampling, generator, None)
        token_ids += new_ids
        yield Iteration(new_ids, draft_ids, len(new_ids) - 1, is_prefill)
        is_prefill = False


def statistics(
    number: int, iteration: Iteration, *, has_drafts: bool, has_draft_model: bool
) -> dict[str, Any]:
    """Return what get_stats tells of one iteration; draft ids of 0 are not counted."""
    stats: dict[str, Any] = {
        "iter": number,
        "iterLatencyMS": 1.5,
        "numActiveRequests": 1,
        "gpuMemUsage": 20_000_000_000,
        "kvCacheStats": {"usedNumBlocks": 1, "maxNumBlocks": 100, "tokensPerBlock": 32},
        "inflightBatchingStats": {
            "numContextRequests": int(iteration.is_prefill),
            "numGenRequests": int(not iteration.is_prefill),
        },
    }
    if has_drafts:
        has_draft = int(bool(iteration.draft_ids))
        stats["specDecodingStats"] = {
            "numDraftTokens": sum(token_id != 0 for token_id in iteration.draft_ids),
            "numAcceptedTokens": iteration.num_accepted_tokens,
            "numRequestsWithDraftTokens": has_draft,
            "acceptanceLength": 1.0 + iteration.num_accepted_tokens if has_draft else 0.0,
            "iterLatencyMS": 0.5 if has_draft_model else 0.0,
            "draftOverhead": 0.25 if has_draft_model else 0.0,
        }
    return stats
