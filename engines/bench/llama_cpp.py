"""The bundled target through llama.cpp, alone: how fast it is where nothing has to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.environment import usable_cpus
from engines.packages import version_of

PACKAGE = "xllamacpp"
CONTEXT_LENGTH = 1024


class LlamaCpp:
    """A loaded GGUF file."""

    def __init__(self, file: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = CONTEXT_LENGTH
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = usable_cpus()
        params.verbosity = -1
        self._server: Any = xllamacpp.Server(params)

    def generate(self, token_ids: Sequence[int], max_new_tokens: int) -> tuple[int, float]:
        """Return how many tokens greedy decoding gave and the seconds that it took by its clock."""
        result = self._server.handle_completions(
            {
                "prompt": list(token_ids),
                "n_predict": max_new_tokens,
                "temperature": 0,
                "cache_prompt": False,
            }
        )
        timings = result["timings"]
        return timings["predicted_n"], timings["predicted_ms"] / 1000


def is_there() -> bool:
    """Return whether its package is installed."""
    return version_of(PACKAGE) is not None
