"""Everything that makes tokens. Its public names; nothing here imports torch.

Read in this order: `events`, `base`, `rejection`, `speculative`, `generation`, `benchmark`.
"""

from engines.backends import BACKEND_CHOICES, BACKENDS, create_backend
from engines.base import LOADING, WAITING, Backend, BackendStatus, BuildProgress, Engine, EngineInfo
from engines.benchmark import (
    MAX_REPEATS,
    SIDES,
    Comparison,
    Parted,
    RunEvent,
    RunItem,
    RunRecord,
    Side,
    WarmUp,
    comparison_of,
    run,
    settings_of,
)
from engines.config import (
    AUTO,
    BUNDLED,
    BUNDLED_DRAFT,
    DEFAULT_MIN_DRAFT_PROB,
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFT_KINDS,
    MAX_NUM_DRAFT_TOKENS,
    Acceptance,
    DraftKind,
    DTypeName,
    EngineConfig,
    Flow,
    GenerationRequest,
    Quantization,
    SamplingParams,
    TensorRTOptions,
    check_prompt,
    resolve_draft,
)
from engines.doctor import doctor
from engines.errors import EngineError
from engines.events import (
    DROPPED_ORIGINS,
    OUTPUT_ORIGINS,
    Finish,
    GenerationEvent,
    Prefill,
    Step,
    Token,
    TokenOrigin,
    TopEntry,
    Totals,
)
from engines.pairs.compatibility import OUTCOMES, Outcome, PairReport, RuleResult
from engines.pairs.reading import check_references
from engines.published import PublishedFigure, published_figures
from engines.recording import read_recording, recording_lines, write_recording
from engines.replay import ReplayEngine
from engines.slot import EngineSlot
from engines.stats import FirstDifference, GenerationStats, Spread, stats_of, typical
from engines.store import EngineStore, StoreEntry
from engines.tensorrt_llm_backend.commands import Snippet, take_away
from engines.terminal import bytes_text

__all__ = [
    "AUTO",
    "BACKENDS",
    "BACKEND_CHOICES",
    "BUNDLED",
    "BUNDLED_DRAFT",
    "DEFAULT_MIN_DRAFT_PROB",
    "DEFAULT_NUM_DRAFT_TOKENS",
    "DRAFT_KINDS",
    "DROPPED_ORIGINS",
    "LOADING",
    "MAX_NUM_DRAFT_TOKENS",
    "MAX_REPEATS",
    "OUTCOMES",
    "OUTPUT_ORIGINS",
    "SIDES",
    "WAITING",
    "Acceptance",
    "Backend",
    "BackendStatus",
    "BuildProgress",
    "Comparison",
    "DTypeName",
    "DraftKind",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineInfo",
    "EngineSlot",
    "EngineStore",
    "Finish",
    "FirstDifference",
    "Flow",
    "GenerationEvent",
    "GenerationRequest",
    "GenerationStats",
    "Outcome",
    "PairReport",
    "Parted",
    "Prefill",
    "PublishedFigure",
    "Quantization",
    "ReplayEngine",
    "RuleResult",
    "RunEvent",
    "RunItem",
    "RunRecord",
    "SamplingParams",
    "Side",
    "Snippet",
    "Spread",
    "Step",
    "StoreEntry",
    "TensorRTOptions",
    "Token",
    "TokenOrigin",
    "TopEntry",
    "Totals",
    "WarmUp",
    "bytes_text",
    "check_prompt",
    "check_references",
    "comparison_of",
    "create_backend",
    "doctor",
    "published_figures",
    "read_recording",
    "recording_lines",
    "resolve_draft",
    "run",
    "settings_of",
    "stats_of",
    "take_away",
    "typical",
    "write_recording",
]
