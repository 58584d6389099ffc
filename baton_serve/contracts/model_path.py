"""Finds the folder of a model from the value of `--model`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def model_folder(model: str) -> Path:
    """Return the folder of a model that is given as a folder or as a GGUF file in it."""
    path = Path(model)
    return path.parent if path.suffix == ".gguf" else path


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder has the file of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def is_lone_gguf(model: str) -> bool:
    """Return whether `model` is a GGUF file without a config.json and a tokenizer beside it."""
    file = Path(model)
    if file.suffix != ".gguf" or not file.is_file():
        return False
    return not (file.parent / "config.json").is_file() or not has_tokenizer(file.parent)


def gguf_cache_folder(file: Path, environ: Mapping[str, str]) -> Path:
    """Return the folder in this user's cache into which a GGUF file is unpacked."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # The digest of the path keeps files of the same name in different folders apart.
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    return cache / "baton" / "gguf" / digest
