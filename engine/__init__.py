"""Token ids in, KV and token ids out. Import from here; modules below are the engine's own.

`Engine`, `KVCache` and `LLM` bring torch with them, so they are imported when first asked for: values, errors and the
pure cores of the engine load in milliseconds. `LLM` is the offline API: text in, text out, in one process; `LLMEngine`
and `AsyncLLMEngine` are the same for requests that come and go.
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
    from engine.offline.async_engine import AsyncLLMEngine
    from engine.offline.llm import LLM
    from engine.offline.llm_engine import LLMEngine
    from engine.offline.lora import LoRARequest
    from engine.offline.opening import EngineArgs
    from engine.offline.params import BeamSearchParams, PoolingParams, SamplingParams

_LATE = {
    "AsyncLLMEngine": "engine.offline.async_engine",
    "BeamSearchParams": "engine.offline.params",
    "Engine": "engine.engine",
    "KVCache": "engine.kv_cache",
    "EngineArgs": "engine.offline.opening",
    "LLM": "engine.offline.llm",
    "LLMEngine": "engine.offline.llm_engine",
    "LoRARequest": "engine.offline.lora",
    "PoolingParams": "engine.offline.params",
    "SamplingParams": "engine.offline.params",
}

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CapacityError",
    "CompletedBlocks",
    "CompletedPart",
    "ConfigError",
    "Engine",
    "EngineArgs",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "FailedRequest",
    "FirstTokenInfo",
    "KVCache",
    "LLMEngine",
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
