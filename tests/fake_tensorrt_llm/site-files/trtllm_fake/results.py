"""What ModelRunnerCpp.generate returns, as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_fake.api import Given

if TYPE_CHECKING:
    from trtllm_fake.requests import Request
    from trtllm_fake.runner import ModelRunnerCpp


def to_result(
    runner: ModelRunnerCpp, given: Given, requests: list[Request], *, is_spoilt: bool
) -> Any:
    """Return output ids, or a dictionary of them with lengths and logits where asked for.

    Args:
        is_spoilt: The logits are not numbers.
    """
    import torch  # late: it costs seconds, and many a process only imports the package

    outputs = [request.prompt + request.new_ids for request in requests]
    width = max(runner.max_seq_len, *map(len, outputs))
    # TypeError where end_id is None, as in the library.
    output_ids = torch.full((len(outputs), 1, width), given.end_id, dtype=torch.int32)
    for row, output in enumerate(outputs):
        output_ids[row, 0, : len(output)] = torch.tensor(output, dtype=torch.int32)
    if not given.return_dict:
        return output_ids
    result: dict[str, Any] = {"output_ids": output_ids}
    if given.output_sequence_lengths:
        lengths = [[len(output)] for output in outputs]
        result["sequence_lengths"] = torch.tensor(lengths, dtype=torch.int32)
    if runner.gather_generation_logits or given.output_generation_logits:
        size = runner.vocab_size_padded
        # [1, num_new_tokens, vocab_size_padded] each
        logits = [
            torch.from_numpy(np.reshape(request.logits, (1, -1, size)).astype(np.float32))
            for request in requests
        ]
        if is_spoilt:
            logits = [torch.full_like(rows, float("nan")) for rows in logits]
        has_drafts = given.draft_tokens_list is not None
        result["generation_logits"] = logits if has_drafts else _stack(logits)
    return result


def _stack(logits: list[Any]) -> Any:
    """Return [num_requests, 1, longest, vocab_size_padded], zeros behind the shorter ones."""
    import torch

    longest = max(rows.shape[1] for rows in logits)
    pad = torch.nn.functional.pad
    return torch.stack([pad(rows, (0, 0, 0, longest - rows.shape[1])) for rows in logits])
