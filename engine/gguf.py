"""Weights in a GGUF file, which transformers turns into numbers under the model's own names.

The file lies in a folder in Hugging Face's format, whose config and tokenizer count; those within the file do not.
"""

import importlib.util
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from contracts.model_path import model_folder
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError, UnsupportedModelError
from engine.model_folder import LOAD_ERRORS, first_line


def gguf_file(config: EngineConfig) -> Path | None:
    """The file that holds the weights; None: they lie in other files, or are made up. Raises `ModelError` or
    `ConfigError`."""
    path, folder = Path(config.model), model_folder(config.model)
    if config.load_format == "dummy":
        return None
    if path != folder:
        found = [path]
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
    else:
        found = sorted(folder.glob("*.gguf"))
        if config.load_format == "auto" and (not found or any(folder.glob("*.safetensors"))):
            return None
    if len(found) != 1:
        names = ", ".join(file.name for file in found)
        raise ModelError(
            f"{folder} has {len(found)} GGUF files{f' ({names})' if found else ''}; name one of them as the model"
        )
    _check(config)
    return found[0]


def gguf_tensors(file: Path, skeleton: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """In host memory, by the names of `skeleton`'s parameters. Raises `ModelError`."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # only such a model should cost it

    try:
        loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)
    except (*LOAD_ERRORS, LookupError, NotImplementedError) as exc:
        raise ModelError(f"the weights in {file} cannot be loaded: {first_line(exc)}") from exc
    return cast(dict[str, Tensor], loaded["tensors"])


def _check(config: EngineConfig) -> None:
    if config.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size: weights in a GGUF file are read by one device; convert the model")
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedModelError(
            "weights in a GGUF file are read with the Python package gguf, which is not installed:"
            " pip install 'baton-serve[gguf]'"
        )
