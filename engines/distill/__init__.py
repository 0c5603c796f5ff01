"""Makes draft models: a few of a target's own layers, taught on text that the target writes.

`spec.py` says what is asked for and what is reported, `pipeline.py` is the way from one to the
other. torch is imported only in the child process that does the work.
"""

from __future__ import annotations

import json
from collections.abc import Generator

from engines.child import child_lines, own_module
from engines.distill.output_folder import check_output
from engines.distill.spec import RECORD, DistillProgress, DistillSpec, Phase

__all__ = ["RECORD", "DistillProgress", "DistillSpec", "check_output", "distill"]


def distill(spec: DistillSpec) -> Generator[DistillProgress | None, None, None]:
    """Make a draft in a child process, yielding its reports, and None while it is silent.

    Closing the generator kills the child. The best draft so far and what a resumed run needs are
    in the output folder at any time. The target must be built.

    Raises:
        EngineBuildError: It failed; the text says at what, and what is done so far is kept.
    """
    phase: Phase = "prepare"
    for line in child_lines(
        own_module("engines.distill.worker", spec.to_json()),
        action="distilling",
        env={"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
    ):
        if line is None:
            yield None
            continue
        try:
            progress = DistillProgress.from_mapping(json.loads(line))
        except (ValueError, TypeError, AttributeError):  # a library's own words
            progress = DistillProgress(phase, 0.0, message=line)
        phase = progress.phase
        yield progress
