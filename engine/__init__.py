"""Token ids in, KV and token ids out. Import from here; modules below are the engine's own."""

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    ModelError,
    RequestError,
    UnsupportedModelError,
    UsageError,
)
from engine.kv_cache import KVCache
from engine.outputs import (
    CompletedBlocks,
    EngineStats,
    FailedRequest,
    FirstTokenInfo,
    NamedBlock,
    Reservation,
    SequenceOutput,
    StepResult,
)
from engine.sequence import Mode

__all__ = [
    "CapacityError",
    "CompletedBlocks",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "FailedRequest",
    "FirstTokenInfo",
    "KVCache",
    "Mode",
    "ModelError",
    "NamedBlock",
    "RequestError",
    "Reservation",
    "SequenceOutput",
    "StepResult",
    "UnsupportedModelError",
    "UsageError",
]
