"""Token ids in, KV and token ids out. Import from here; modules below are the engine's own.

`Engine`, `KVCache` and `LLM` bring torch with them, so they are imported when first asked for: values, errors and the
pure cores of the engine load in milliseconds. `LLM` is the offline API: text in, text out, in one process; `LLMEngine`
and `AsyncLLMEngine` are the same for requests that come and go.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from baton_serve.engine.config import EngineConfig
from baton_serve.engine.core.outputs import (
    CompletedBlocks,
    CompletedLayerGroups,
    EngineStats,
    FailedRequest,
    FirstTokenInfo,
    NamedBlock,
    Reservation,
    SequenceOutput,
    StepResult,
)
from baton_serve.engine.core.sequence import Mode
from baton_serve.engine.errors import (
    AdapterError,
    CapacityError,
    ConfigError,
    EngineError,
    ModelError,
    RequestError,
    UnsupportedModelError,
    UsageError,
)

if TYPE_CHECKING:
    from baton_serve.engine.engine import Engine
    from baton_serve.engine.kv.kv_cache import KVCache
    from baton_serve.engine.offline.async_engine import AsyncLLMEngine
    from baton_serve.engine.offline.engine_args import EngineArgs
    from baton_serve.engine.offline.llm import LLM
    from baton_serve.engine.offline.llm_engine import LLMEngine
    from baton_serve.engine.offline.lora import LoRARequest
    from baton_serve.engine.offline.params import BeamSearchParams, PoolingParams, SamplingParams

_LATE = {
    "AsyncLLMEngine": "baton_serve.engine.offline.async_engine",
    "BeamSearchParams": "baton_serve.engine.offline.params",
    "Engine": "baton_serve.engine.engine",
    "KVCache": "baton_serve.engine.kv.kv_cache",
    "EngineArgs": "baton_serve.engine.offline.engine_args",
    "LLM": "baton_serve.engine.offline.llm",
    "LLMEngine": "baton_serve.engine.offline.llm_engine",
    "LoRARequest": "baton_serve.engine.offline.lora",
    "PoolingParams": "baton_serve.engine.offline.params",
    "SamplingParams": "baton_serve.engine.offline.params",
}

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CapacityError",
    "CompletedBlocks",
    "CompletedLayerGroups",
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
