"""Child process that distils: `python -m engines.distill.worker SPEC`, a `DistillSpec` as JSON.

It writes one line of JSON for each report. A process of its own gives its memory back, and may be
killed at any moment: what it has done so far is in the output folder.
"""

from __future__ import annotations

import sys

import torch
import transformers

from engines.child import ERROR_PREFIX
from engines.distill.pipeline import Distillation
from engines.distill.spec import DistillSpec
from engines.errors import EngineError


def main() -> int:
    """Run one distillation and return the exit code."""
    transformers.utils.logging.disable_progress_bar()
    # cuDNN's attention would be planned anew for every length of the text so far.
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        for progress in Distillation(DistillSpec.from_json(sys.argv[1])).run():
            sys.stdout.write(f"{progress.to_json()}\n")
            sys.stdout.flush()
    except (EngineError, ValueError) as exc:
        sys.stdout.write(f"{ERROR_PREFIX}{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
