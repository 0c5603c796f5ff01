"""The error tree, and the one place where a library's exceptions become ours.

EngineError                     its text is shown to the user as it stands
├─ BackendUnavailableError      a package, driver or device is missing
├─ ModelLoadError               a checkpoint is missing, unreadable or too large for the device
├─ ModelNotBuiltError           a checkpoint must be fetched or converted first
├─ UnsupportedModelError        a back end cannot run a model; another can
├─ IncompatibleModelsError      the draft and the target do not share a vocabulary
├─ EngineBuildError             an engine could not be built, stored or read back
├─ RecordingError               a recorded run cannot be written or read
└─ GenerationError              a loaded engine failed while generating

A bad argument is a `ValueError` that names the field, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class EngineError(Exception):
    """Something the user can act on. Its text is shown as it stands."""


class BackendUnavailableError(EngineError):
    """A package, driver or device is missing."""


class ModelLoadError(EngineError):
    """A checkpoint is missing, unreadable or too large for the device."""


class ModelNotBuiltError(EngineError):
    """A checkpoint must be fetched or converted before it can be loaded."""


class UnsupportedModelError(EngineError):
    """A back end cannot run a model. The text names one that can."""


class IncompatibleModelsError(EngineError):
    """The draft and the target do not share a vocabulary."""


class EngineBuildError(EngineError):
    """An engine could not be built, stored or read back."""


class RecordingError(EngineError):
    """A recorded run cannot be written or read."""


class GenerationError(EngineError):
    """A loaded engine failed while generating. It stays usable, or its `is_open` says not."""


@contextmanager
def translate_errors(
    action: str, table: Mapping[type[Exception], type[EngineError]]
) -> Iterator[None]:
    """Raise an exception listed in `table` as its own kind; the first matching entry decides.

    The text becomes one sentence: what was being done, and the first line of the cause. An
    unlisted exception is a bug and passes with its traceback.
    """
    try:
        yield
    except EngineError:
        raise
    except tuple(table) as exc:
        error = next(error for kind, error in table.items() if isinstance(exc, kind))
        cause = str(exc).strip().partition("\n")[0] or type(exc).__name__
        raise error(f"{action}: {cause}") from exc
