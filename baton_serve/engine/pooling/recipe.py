"""How an embedding is made of hidden states, as the model's folder says: Sentence Transformers' modules.json.

Without one, vLLM's defaults: decoders take the last token, encoders the first, and the vector is normalised.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton_serve.engine.errors import ModelError, UnsupportedModelError

PoolingType = Literal["cls", "mean", "last"]

MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
NAMES: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
"""How newer folders spell it."""
SETTINGS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`dense` are folders of linear layers between pooling and normalisation. `max_seq_length`: as it was trained."""

    pooling: PoolingType
    normalize: bool = True
    dense: tuple[Path, ...] = ()
    max_seq_length: int | None = None


def read_recipe(folder: Path, *, is_decoder: bool) -> Recipe:
    """Raises `ModelError`."""
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
            raise UnsupportedModelError(f"{modules} has a module of type {kind}; served are {served}")
    if pooling is None:
        raise UnsupportedModelError(f"{modules} has no module of type Pooling: its vectors cannot be pooled")
    return Recipe(pooling=pooling, normalize=normalize, dense=tuple(dense), max_seq_length=_max_seq_length(folder))


def _pooling_type(path: Path) -> PoolingType:
    config = read_json(path)
    name = config.get("pooling_mode")
    if isinstance(name, str) and name in NAMES:
        return NAMES[name]
    wanted = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(name, str) or len(wanted) != 1 or wanted[0] not in MODES:
        asked = name or ", ".join(wanted) or "nothing"
        raise UnsupportedModelError(f"{path} asks for {asked}; one of {', '.join(MODES)} is served")
    return MODES[wanted[0]]


def _max_seq_length(folder: Path) -> int | None:
    for name in SETTINGS:
        if (folder / name).is_file():
            length = read_json(folder / name).get("max_seq_length")
            return length if isinstance(length, int) else None
    return None


def read_json(path: Path) -> Any:
    """Raises `ModelError`."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path} cannot be read: {exc}") from exc
