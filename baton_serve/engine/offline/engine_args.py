"""A model's folder and the arguments of vLLM's LLM to what an engine is made of."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.offline.params import GENERATION_CONFIG, Defaults
from baton_serve.engine.pooling.kind import ModelKind, detect_model_kind

NEUTRAL: dict[str, tuple[object, ...]] = {
    "cpu_offload_gb": (0,),
    "disable_async_output_proc": (False, True),
    "disable_custom_all_reduce": (False, True),
    "max_seq_len_to_capture": (8192,),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "tokenizer_mode": ("auto",),
}
"""Arguments of vLLM's LLM that mean nothing here, with the values that ask for nothing."""
ALIASES = {"kv_cache_memory_bytes": "kv_cache_bytes"}


class EngineArgs:
    """`options` are those of `EngineConfig`, under vLLM's names."""

    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer or model
        self.options = options


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """`tokenizer` is one of transformers; `defaults` is what the model's own generation_config.json says."""

    config: EngineConfig
    tokenizer: Any
    defaults: Defaults
    kind: ModelKind


def open_model(args: EngineArgs) -> OpenedModel:
    """Raises `engine.errors`."""
    config = _config(args.model, args.options)
    return OpenedModel(
        config=config,
        tokenizer=_tokenizer(args.tokenizer, config),
        defaults=_defaults(Path(args.model)),
        kind=detect_model_kind(Path(args.model), runner=config.runner, task=config.task),
    )


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Raises `ConfigError` for a name that nobody knows, or a value that is not served."""
    known = {entry.name for entry in fields(EngineConfig)}
    values: dict[str, Any] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if given == "swap_space":
            name, value = "host_kv_bytes", int(value * (1 << 30))
        if name in known:
            values[name] = value
        elif name not in NEUTRAL:
            raise ConfigError(f"LLM: unknown argument {given!r}; known are {', '.join(sorted(known))}")
        elif value not in NEUTRAL[name]:
            raise ConfigError(f"LLM: {given}={value!r} is not supported by this engine")
    return EngineConfig(model=model, **values)


def _tokenizer(folder: str, config: EngineConfig) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{folder} has no tokenizer that can be used: {exc}") from exc


def _defaults(folder: Path) -> Defaults:
    path = folder / "generation_config.json"
    if not path.is_file():
        return Defaults()
    stated = json.loads(path.read_text())
    return Defaults({name: stated[name] for name in GENERATION_CONFIG if isinstance(stated.get(name), (int, float))})
