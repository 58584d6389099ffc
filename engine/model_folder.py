"""A model's folder in Hugging Face's format, as far as every kind of model has it: config, lengths, broken files.

Every way in which a folder can be broken ends in a `ModelError` that names the folder and the cause.
"""

import json
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError

HfConfig: TypeAlias = Any  # transformers' configs are untyped bags of attributes

LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)


def read_config(folder: Path, config: EngineConfig) -> HfConfig:
    """Raises `ModelError`."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a local folder in Hugging Face's format")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; it is not a model in Hugging Face's format")
    try:
        json.loads(path.read_text())
    except ValueError as exc:
        raise ModelError(f"{path} is not valid JSON: {exc}") from exc
    if config.load_format == "auto" and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors files; convert the weights, or use --load-format dummy")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=config.trust_remote_code)
    except LOAD_ERRORS as exc:
        raise ModelError(f"{path} cannot be used: {first_line(exc)}") from exc


def max_model_len_of(config: EngineConfig, text_config: HfConfig) -> int:
    """Raises `ConfigError`."""
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is None:
        if config.max_model_len is None:
            raise ConfigError("the model's config names no max_position_embeddings; set max_model_len")
        return config.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) is more than the model was made for"
            f" (max_position_embeddings = {longest})"
        )
    return config.max_model_len or int(longest)


def broken_file(folder: Path) -> Path | None:
    """The first weights file that cannot even be opened: cut short, or something else under that name."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return file
    return None


def first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[0] if lines else ''}"
