"""Finds the folder of a model from the value of `--model`, and the folder of caches."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

_PART = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)")
"""The name of one file of a split GGUF model: its number, from 1, and the number of files."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def model_folder(model: str) -> Path:
    """Return the folder of a model: `model` itself, or the folder that contains it if `model` is a GGUF file."""
    path = Path(model)
    return path.parent if path.suffix == ".gguf" else path


def gguf_parts(file: Path) -> list[Path]:
    """Return all files of a split GGUF model in order, given the first one, which has the metadata; `[file]` if it is
    not split."""
    if (found := _PART.fullmatch(file.name)) is None:
        return [file]
    start, _, of, count, end = found.groups()
    return [file.with_name(f"{start}{number:05}{of}{count}{end}") for number in range(1, int(count) + 1)]


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder has a file with a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def is_lone_gguf(model: str) -> bool:
    """Return whether `model` is a GGUF file without a config.json and a tokenizer beside it."""
    file = Path(model)
    if file.suffix != ".gguf" or not file.is_file():
        return False
    return not (file.parent / "config.json").is_file() or not has_tokenizer(file.parent)


def gguf_cache_folder(file: Path, environ: Mapping[str, str]) -> Path:
    """Return the folder in this user's cache in which the config and tokenizer of this GGUF file are unpacked."""
    # The digest of the path keeps files of the same name in different folders apart.
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    return cache_folder(environ) / "gguf" / digest


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of all Baton's caches but that of downloaded models: `baton` in VLLM_CACHE_ROOT or
    XDG_CACHE_HOME of the environment `environ`, or in ~/.cache."""
    root = environ.get("VLLM_CACHE_ROOT") or environ.get("XDG_CACHE_HOME")
    return (Path(root).expanduser() if root else Path.home() / ".cache") / "baton"


def process_cache_folder() -> Path:
    """Return `cache_folder` for the environment variables of this process. Raises RuntimeError if the user has no home
    folder."""
    return cache_folder(os.environ)
