"""Baton: disaggregated prefill/decode serving of large language models, for Intel Arc GPUs, CUDA GPUs and CPUs.

Users import from here: `from baton_serve import LLM, SamplingParams`. Each name is loaded at its first use, because the
engine needs torch and transformers, which take seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from baton_serve.services.common.version import VERSION

if TYPE_CHECKING:
    from baton_serve.engine.model.plugin_models import ModelRegistry
    from baton_serve.engine.offline.async_engine import AsyncLLM, AsyncLLMEngine
    from baton_serve.engine.offline.command_line import FlexibleArgumentParser
    from baton_serve.engine.offline.engine_args import AsyncEngineArgs, EngineArgs
    from baton_serve.engine.offline.llm import LLM
    from baton_serve.engine.offline.llm_engine import LLMEngine
    from baton_serve.engine.offline.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        Counter,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Gauge,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from baton_serve.engine.offline.prompts import TextPrompt, TokensPrompt
    from baton_serve.engine.offline.request_params import (
        BeamSearchParams,
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
    )
    from baton_serve.engine.offline.requested_adapters import LoRARequest
    from baton_serve.engine.offline.structured import GuidedDecodingParams, StructuredOutputsParams

__version__ = VERSION

_MODULES = {
    "LLM": "offline.llm",
    "AsyncLLMEngine": "offline.async_engine",
    "BeamSearchParams": "offline.request_params",
    "EngineArgs": "offline.engine_args",
    "LLMEngine": "offline.llm_engine",
    "LoRARequest": "offline.requested_adapters",
    "PoolingParams": "offline.request_params",
    "SamplingParams": "offline.request_params",
    "GuidedDecodingParams": "offline.structured",
    "StructuredOutputsParams": "offline.structured",
    "ModelRegistry": "model.plugin_models",
    "AsyncEngineArgs": "offline.engine_args",
    "AsyncLLM": "offline.async_engine",
    "FlexibleArgumentParser": "offline.command_line",
    "RequestOutputKind": "offline.request_params",
    "TextPrompt": "offline.prompts",
    "TokensPrompt": "offline.prompts",
    "RequestOutput": "offline.outputs",
    "CompletionOutput": "offline.outputs",
    "PoolingOutput": "offline.outputs",
    "PoolingRequestOutput": "offline.outputs",
    "EmbeddingOutput": "offline.outputs",
    "EmbeddingRequestOutput": "offline.outputs",
    "ClassificationOutput": "offline.outputs",
    "ClassificationRequestOutput": "offline.outputs",
    "ScoringOutput": "offline.outputs",
    "ScoringRequestOutput": "offline.outputs",
    "Counter": "offline.outputs",
    "Gauge": "offline.outputs",
}
"""The module of `baton_serve.engine` that defines each name."""

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "ModelRegistry",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


# Python calls this only for names that the module does not have (PEP 562).
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"baton_serve.engine.{_MODULES[name]}"), name)


# Names that have not been loaded yet should also appear in completion and in `help`.
def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
