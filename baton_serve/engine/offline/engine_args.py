"""Turns vLLM's arguments and a model's folder into the config, tokenizer and defaults of an engine."""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton_serve.contracts.model_path import is_lone_gguf, model_folder
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ConfigError, ModelError
from baton_serve.engine.loading.gguf_folder import unpack_to_cache
from baton_serve.engine.offline.params import GENERATION_CONFIG, Defaults
from baton_serve.engine.pooling.kind import ModelKind, detect_model_kind
from baton_serve.model_hub import HubError, is_hub_name, obtain_model

NEUTRAL: dict[str, tuple[object, ...]] = {
    "cpu_offload_gb": (0,),
    "disable_async_output_proc": (False, True),
    "disable_custom_all_reduce": (False, True),
    "max_seq_len_to_capture": (8192,),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "tokenizer_mode": ("auto",),
}
"""Arguments of vLLM's `LLM` that this engine does not have, with the values that can be ignored."""
ALIASES = {"kv_cache_memory_bytes": "kv_cache_bytes"}
"""vLLM's names of fields that `EngineConfig` calls differently."""


class EngineArgs:
    """Arguments of an engine. `options` are the fields of `EngineConfig`, and vLLM's names for them."""

    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = options


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """The result of opening a model's folder; no weight is loaded yet.

    `tokenizer` is of transformers, and `defaults` come from the model's generation_config.json.
    """

    config: EngineConfig
    tokenizer: Any
    defaults: Defaults
    kind: ModelKind


def open_model(args: EngineArgs) -> OpenedModel:
    """Read the tokenizer and the kind of a model; unpack it first if it is a single GGUF file.

    Raises `ConfigError` or `ModelError`.
    """
    given = _local_path(args.model)
    model = str(unpack_to_cache(Path(given), os.environ)) if is_lone_gguf(given) else given
    config, folder = _config(model, args.options), model_folder(model)
    tokenizer = folder if args.tokenizer in (None, args.model) else model_folder(_local_path(args.tokenizer))
    return OpenedModel(
        config=config,
        tokenizer=_tokenizer(str(tokenizer), config),
        defaults=_defaults(folder),
        kind=detect_model_kind(folder, runner=config.runner, task=config.task),
    )


def _local_path(model: str) -> str:
    """Return the path of a model, and download a model of the hub if it is missing. Raises `ModelError`."""
    if not is_hub_name(model):
        return model
    try:
        return str(obtain_model(model, os.environ))
    except HubError as exc:
        raise ModelError(str(exc)) from exc


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Return the config. Raises `ConfigError` for an unknown argument or an unsupported value."""
    known = {entry.name for entry in fields(EngineConfig)}
    values: dict[str, Any] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if given == "swap_space":  # vLLM's is in GiB
            name, value = "host_kv_bytes", int(value * (1 << 30))
        if name in known:
            values[name] = value
        # Raise instead of ignoring a misspelled argument.
        elif name not in NEUTRAL:
            raise ConfigError(f"LLM: unknown argument {given!r}; known arguments are {', '.join(sorted(known))}")
        elif value not in NEUTRAL[name]:
            raise ConfigError(f"LLM: {given}={value!r} is not supported by this engine")
    # `EngineConfig.check` follows when the engine is made; the tokenizer is loaded before.
    return EngineConfig(model=model, **values)


def _tokenizer(folder: str, config: EngineConfig) -> Any:
    from transformers import AutoTokenizer  # takes seconds: import it only when a model is opened

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"cannot load a tokenizer from {folder}: {exc}") from exc


def _defaults(folder: Path) -> Defaults:
    """Read the sampling defaults of a model; empty if its folder states none."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return Defaults()
    stated = json.loads(path.read_text())
    return Defaults({name: stated[name] for name in GENERATION_CONFIG if isinstance(stated.get(name), (int, float))})
