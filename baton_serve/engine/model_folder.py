"""Reads config.json and chooses the weight files of a model folder (`--load-format`); explains broken ones.

Every defect of a folder is raised as a `ModelError` that names the folder and the cause.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open

from baton_serve.contracts.flag_choices import LoadFormat
from baton_serve.contracts.loader_options import SHARD_PATTERN
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ModelError, UnsupportedModelError

HfConfig: TypeAlias = Any  # transformers' configs are untyped bags of attributes

LOAD_ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    UnpicklingError,
    ValueError,
)
"""Errors that transformers and safetensors raise for broken or unusual folders. Both document none of them."""
GGUF_ERRORS = (*LOAD_ERRORS, LookupError, NotImplementedError)
"""Errors that transformers and the package gguf raise for a broken or unknown GGUF file."""
_SIZES = (
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""Fields of config.json that must be positive integers."""
PICKLE_INDEX = "pytorch_model.bin.index.json"
"""Lists PyTorch's files of a checkpoint that is divided into several."""
_WANTED = {
    "pt": "pytorch_model.bin",
    "npcache": "pytorch_model.bin",
}
"""Names of files by load format, for errors."""
_SUCCESSORS = {
    "chatglm": "GLM-4-9B-chat in transformers' format (glm-4-9b-chat-hf)",
    "exaone": "EXAONE 4",
    "internlm": "InternLM 3",
    "internlm2": "InternLM 3",
    "minicpm": "MiniCPM3-4B",
    "phi3small": "Phi 4 mini",
    "qwen": "Qwen 1.5 or newer",
}
"""Newer models that are served, by the types of models that bring code of their own."""
_LARGEST_SIZE = 2**31 - 1
"""Sizes are stored as int32 in kernels' arguments."""
_LFS_POINTER = b"version https://git-lfs"
"""First bytes of the text file that Git LFS leaves in place of a large file that was not downloaded."""


def read_config(folder: Path, config: EngineConfig) -> HfConfig:
    """Read the config.json of a model folder with transformers, after checks of what transformers would report
    unclearly or late.

    Raises `ModelError` if the folder, its config or its weights files are missing or broken, and
    `UnsupportedModelError` for a model type that this version of transformers does not know.
    """
    from transformers import AutoConfig  # takes seconds: only models that are read by transformers should pay them

    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a local folder in Hugging Face's format")
    path = folder / "config.json"
    if not path.is_file():
        if config.model.endswith(".gguf"):
            raise ModelError(f"{folder} has no config.json beside {config.model}; `baton unpack FILE FOLDER` makes one")
        raise ModelError(f"{folder} has no config.json; it is not a model in Hugging Face's format")
    try:
        stated = json.loads(path.read_text())
    except (RecursionError, ValueError) as exc:
        raise ModelError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(stated, dict):
        raise ModelError(f"{path} is not an object; it is not a model's config in Hugging Face's format")
    _refuse_sizes(path, stated)
    _refuse_unknown(folder, stated, config)
    may_be_gguf = config.load_format == "gguf" or (config.load_format == "auto" and any(folder.glob("*.gguf")))
    if (
        config.load_format != "dummy"
        and not may_be_gguf
        and not weight_files(folder, config.load_format, config.loader.pattern)
    ):
        is_sharded = config.load_format == "sharded_state"
        wanted = config.loader.pattern if is_sharded else _WANTED.get(config.load_format, "*.safetensors")
        raise ModelError(f"{folder} has no {wanted} files; convert the weights, or use --load-format dummy")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=config.trust_remote_code)
    except LOAD_ERRORS as exc:
        raise ModelError(f"{path} cannot be used: {first_line(exc)}") from exc


def weight_files(folder: Path, load_format: LoadFormat = "auto", pattern: str = SHARD_PATTERN) -> list[Path]:
    """Return the weight files that a loader with this `load_format` reads, sorted; empty if the folder has none, or
    only a GGUF file.

    `pattern` is how the files of the format sharded_state are named. Raises `ModelError` if the index of a checkpoint
    in PyTorch's own format is broken.
    """
    tensors = sorted(folder.glob("*.safetensors"))
    if load_format in ("pt", "npcache") or (not tensors and load_format in ("auto", "bitsandbytes")):
        index, lone = folder / PICKLE_INDEX, folder / "pytorch_model.bin"
        if index.is_file():
            try:
                return sorted({folder / str(name) for name in json.loads(index.read_text())["weight_map"].values()})
            except (AttributeError, KeyError, TypeError, ValueError) as exc:
                raise ModelError(f"{index} cannot be used: {first_line(exc)}") from exc
        return [lone] if lone.is_file() else []
    if load_format == "sharded_state":
        return [path for paths in shard_paths(folder, pattern).values() for path in paths]
    return tensors


def shard_paths(folder: Path, pattern: str) -> dict[int, list[Path]]:
    """Return the files of a folder in the format sharded_state, by the rank that they belong to. `pattern` is their
    name with `{rank}` and `{part}`."""
    # The texts around the two numbers are matched as they stand, with their dots.
    first, middle, last = (re.escape(text) for text in re.split(r"\{rank\}|\{part\}", pattern))
    number = {"rank": r"(?P<rank>\d+)", "part": r"\d+"}
    left, right = re.findall(r"\{(rank|part)\}", pattern)
    name = re.compile(f"{first}{number[left]}{middle}{number[right]}{last}")
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if (match := name.fullmatch(path.name)) is not None:
            found.setdefault(int(match["rank"]), []).append(path)
    return found


def is_pickled(files: list[Path]) -> bool:
    """Return whether these weight files of one model are in PyTorch's own format (`*.bin`) instead of safetensors."""
    return bool(files) and files[0].suffix == ".bin"


def _refuse_sizes(path: Path, stated: dict[str, Any]) -> None:
    """Check the sizes in config.json. Raises `ModelError` if one is not a positive integer.

    Otherwise a later division, for example by 0 heads, would fail with a message that does not name the file.
    """
    # Multimodal models have the sizes of their language model in `text_config`.
    inner = stated.get("text_config")
    for part in (stated, inner if isinstance(inner, dict) else {}):
        for name in _SIZES:
            size = part.get(name)
            if isinstance(size, int | float) and not (isinstance(size, int) and 0 < size <= _LARGEST_SIZE):
                raise ModelError(f"{path}: {name} is {size}; it must be a positive integer: download the file again")


def _refuse_unknown(folder: Path, stated: dict[str, Any], config: EngineConfig) -> None:
    """Check the model type that config.json states. Raises `UnsupportedModelError` if only `trust_remote_code` or a
    newer transformers can load it.

    transformers itself would raise a very long message, or wait for an answer on the terminal.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    model_type = stated.get("model_type")
    if not model_type or model_type in CONFIG_MAPPING or config.trust_remote_code:
        return
    name = (stated.get("architectures") or [model_type])[0]
    reason = f"{name}: transformers {transformers.__version__} has no model of type {model_type!r}"
    if model_type in _SUCCESSORS and "auto_map" in stated:
        reason += f"; use {_SUCCESSORS[model_type]} instead"
    if "auto_map" in stated:
        raise UnsupportedModelError(
            f"{reason}; {folder} contains Python code for it, which runs only with --trust-remote-code, and works"
            " only if it attends through transformers' attention interface. A copy of the model in transformers' own"
            " format needs neither (docs/reference/models.md)"
        )
    raise UnsupportedModelError(f"{reason}; docs/reference/models.md lists the supported models")


def weights_error(folder: Path, exc: BaseException) -> ModelError:
    """Return the `ModelError` to raise because loading the weights of `folder` failed with `exc`. It names the first
    broken file, if one is found."""
    file = _broken_file(folder)
    reason = first_line(exc)
    # Cloning a repository without Git LFS is the most frequent cause, and the loader's own message does not hint at it.
    if file is not None and _begins_with(file, _LFS_POINTER):
        reason = "it is a pointer of Git LFS, not the weights: `git lfs pull` fetches them"
    elif file is not None:
        reason += " (truncated, or not in safetensors format: download it again)"
    return ModelError(f"the weights in {file or folder} cannot be loaded: {reason}")


def _begins_with(file: Path, text: bytes) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(text)) == text
    except OSError:
        return False


def _broken_file(folder: Path) -> Path | None:
    """Return the first weights file of a folder that cannot be opened, because it is truncated or in another format;
    None if all can be opened."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return file
    return None


_LOADING = threading.Lock()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress, inside `with`, transformers' messages about weights that are left out on purpose. Load models by
    transformers inside it only, since one thread of the process is inside at a time.

    While transformers loads, it replaces the method of a class that ties weights. With two threads the second one may
    restore the replacement, and no later model of the process would have tied weights.
    """
    from transformers.utils import logging as messages

    with _LOADING:
        level = messages.get_verbosity()
        messages.set_verbosity_error()
        try:
            yield
        finally:
            messages.set_verbosity(level)


def first_line(exc: BaseException) -> str:
    """Return the type of an exception and the first line of its message, for use in another message."""
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[0] if lines else ''}"
