"""The engine: it takes token ids, and returns KV blocks and token ids. Other packages import from here only.

`Engine`, `KVCache` and the classes of the offline API are imported at first access, because they load torch, which
takes seconds. The settings, the errors and the scheduler's data types load in milliseconds. `LLM` is the offline API
for lists of prompts: text in, text out, in one process. `LLMEngine` and `AsyncLLMEngine` accept further requests while
others are running.
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
    from baton_serve.engine.offline.request_params import BeamSearchParams, PoolingParams, SamplingParams
    from baton_serve.engine.offline.requested_adapters import LoRARequest
    from baton_serve.engine.offline.structured import GuidedDecodingParams, StructuredOutputsParams

_LATE = {
    "AsyncLLMEngine": "baton_serve.engine.offline.async_engine",
    "BeamSearchParams": "baton_serve.engine.offline.request_params",
    "Engine": "baton_serve.engine.engine",
    "KVCache": "baton_serve.engine.kv.kv_cache",
    "EngineArgs": "baton_serve.engine.offline.engine_args",
    "LLM": "baton_serve.engine.offline.llm",
    "LLMEngine": "baton_serve.engine.offline.llm_engine",
    "LoRARequest": "baton_serve.engine.offline.requested_adapters",
    "PoolingParams": "baton_serve.engine.offline.request_params",
    "SamplingParams": "baton_serve.engine.offline.request_params",
    "GuidedDecodingParams": "baton_serve.engine.offline.structured",
    "StructuredOutputsParams": "baton_serve.engine.offline.structured",
}
"""Names that `__getattr__` imports at first access, with the module that defines each."""

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
    "GuidedDecodingParams",
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
    "StructuredOutputsParams",
    "UnsupportedModelError",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    """Import a public name of this package when it is first accessed (PEP 562), because its module loads torch, which
    takes seconds. Raises `AttributeError` for a name that the package does not have."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
