"""Decides how hidden states become an embedding (last token, CLS, mean, normalized), from modules.json of Sentence
Transformers.

Without this file vLLM's defaults apply: the last token for decoders, the first for encoders, and a normalized vector.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton_serve.engine.errors import ModelError, UnsupportedModelError

PoolingType = Literal["cls", "mean", "last", "model"]
"""`model`: the model itself makes the vector."""

MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Pooling methods by their field in older folders; exactly one is true."""
NAMES: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
"""Pooling methods by their name in newer folders."""
SETTINGS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
"""Files in which Sentence Transformers states the length of inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the hidden states of a model become an embedding, as the files of Sentence Transformers state it.

    `dense` are the folders of linear layers between pooling and normalization. `max_seq_length` is the length of inputs
    in training, in tokens; None: not stated.
    """

    pooling: PoolingType
    normalize: bool = True
    is_always_normalized: bool = False
    """The model itself normalizes its vectors."""
    dense: tuple[Path, ...] = ()
    max_seq_length: int | None = None


def read_recipe(folder: Path, *, is_decoder: bool) -> Recipe:
    """Read how a model's hidden states become an embedding, from modules.json and the files that it names. Without
    modules.json, take the last token's state of decoders (`is_decoder`) and the first token's of encoders.

    Raises `ModelError` if a file is broken, and `UnsupportedModelError` if a file asks for an unsupported module.
    """
    modules = folder / "modules.json"
    if not modules.is_file():
        return Recipe(pooling="last" if is_decoder else "cls")
    pooling: PoolingType | None = None
    normalize, dense = False, []
    for module in read_json(modules):
        kind, path = str(module.get("type", "")).rsplit(".", 1)[-1], folder / str(module.get("path", ""))
        if kind == "Pooling":
            pooling = _pooling_type(path / "config.json")
        elif kind == "Dense":
            dense.append(path)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            served = "Transformer, Pooling, Dense and Normalize"
            raise UnsupportedModelError(f"{modules} has a module of type {kind}; supported are {served}")
    if pooling is None:
        raise UnsupportedModelError(f"{modules} has no module of type Pooling: its vectors cannot be pooled")
    return Recipe(pooling=pooling, normalize=normalize, dense=tuple(dense), max_seq_length=_max_seq_length(folder))


def _pooling_type(path: Path) -> PoolingType:
    """Return the pooling method that the config.json of a Pooling module states. Raises `UnsupportedModelError` for an
    unknown method or several methods."""
    config = read_json(path)
    name = config.get("pooling_mode")
    if isinstance(name, str) and name in NAMES:
        return NAMES[name]
    wanted = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(name, str) or len(wanted) != 1 or wanted[0] not in MODES:
        asked = name or ", ".join(wanted) or "nothing"
        raise UnsupportedModelError(f"{path} asks for {asked}; supported is one of {', '.join(MODES)}")
    return MODES[wanted[0]]


def _max_seq_length(folder: Path) -> int | None:
    """Return the length of the inputs with which the model was trained, in tokens, or None if no file states it."""
    for name in SETTINGS:
        if (folder / name).is_file():
            length = read_json(folder / name).get("max_seq_length")
            return length if isinstance(length, int) else None
    return None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises `ModelError` if it is missing or broken."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path} cannot be read: {exc}") from exc
