"""Everything that makes tokens. Its public names; nothing here imports torch.

Read in this order: `events`, `base`, `rejection`, `speculative`, `generation`, `benchmark`.
"""

from engines.backends import BACKENDS
from engines.base import LOADING, Backend, BackendStatus, BuildProgress, Engine, EngineInfo
from engines.benchmark import (
    MAX_REPEATS,
    SIDES,
    Comparison,
    RunEvent,
    RunRecord,
    Side,
    comparison_of,
    run,
    settings_of,
)
from engines.config import (
    BUNDLED,
    DRAFT_KINDS,
    MAX_NUM_DRAFT_TOKENS,
    DraftKind,
    EngineConfig,
    GenerationRequest,
    SamplingParams,
    check_prompt,
)
from engines.doctor import doctor
from engines.errors import EngineError
from engines.events import (
    OUTPUT_ORIGINS,
    Finish,
    GenerationEvent,
    Prefill,
    Step,
    Token,
    TokenOrigin,
    TopEntry,
)
from engines.recording import read_recording, recording_lines, write_recording
from engines.replay import ReplayEngine
from engines.slot import EngineSlot
from engines.stats import FirstDifference, GenerationStats, Spread, stats_of
from engines.store import EngineStore, StoreEntry

__all__ = [
    "BACKENDS",
    "BUNDLED",
    "DRAFT_KINDS",
    "LOADING",
    "MAX_NUM_DRAFT_TOKENS",
    "MAX_REPEATS",
    "OUTPUT_ORIGINS",
    "SIDES",
    "Backend",
    "BackendStatus",
    "BuildProgress",
    "Comparison",
    "DraftKind",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineInfo",
    "EngineSlot",
    "EngineStore",
    "Finish",
    "FirstDifference",
    "GenerationEvent",
    "GenerationRequest",
    "GenerationStats",
    "Prefill",
    "ReplayEngine",
    "RunEvent",
    "RunRecord",
    "SamplingParams",
    "Side",
    "Spread",
    "Step",
    "StoreEntry",
    "Token",
    "TokenOrigin",
    "TopEntry",
    "check_prompt",
    "comparison_of",
    "doctor",
    "read_recording",
    "recording_lines",
    "run",
    "settings_of",
    "stats_of",
    "write_recording",
]
