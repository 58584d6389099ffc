"""Token ids in, KV and token ids out. Import from here; modules below are the engine's own.

`Engine`, `KVCache` and `LLM` bring torch with them, so they are imported when first asked for: values, errors and the
pure cores of the engine load in milliseconds. `LLM` is the offline API: text in, text out, in one process.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import (
    AdapterError,
    CapacityError,
    ConfigError,
    EngineError,
    ModelError,
    RequestError,
    UnsupportedModelError,
    UsageError,
)
from engine.outputs import (
    CompletedBlocks,
    CompletedPart,
    EngineStats,
    FailedRequest,
    FirstTokenInfo,
    NamedBlock,
    Reservation,
    SequenceOutput,
    StepResult,
)
from engine.sequence import Mode

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.kv_cache import KVCache
    from engine.offline.llm import LLM
    from engine.offline.lora import LoRARequest
    from engine.offline.params import PoolingParams, SamplingParams

_LATE = {
    "Engine": "engine.engine",
    "KVCache": "engine.kv_cache",
    "LLM": "engine.offline.llm",
    "LoRARequest": "engine.offline.lora",
    "PoolingParams": "engine.offline.params",
    "SamplingParams": "engine.offline.params",
}

__all__ = [
    "LLM",
    "AdapterError",
    "CapacityError",
    "CompletedBlocks",
    "CompletedPart",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "FailedRequest",
    "FirstTokenInfo",
    "KVCache",
    "LoRARequest",
    "Mode",
    "ModelError",
    "NamedBlock",
    "PoolingParams",
    "RequestError",
    "Reservation",
    "SamplingParams",
    "SequenceOutput",
    "StepResult",
    "UnsupportedModelError",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
