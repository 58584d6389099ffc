"""Decides whether the weights in a folder may replace those of the running model (`/update_weights_from_disk`): same
architecture and shapes.

It reads configs and the headers of weight files, and no weights. So it finds most errors in milliseconds, before the
model that serves requests is unloaded. An error that it cannot find is found when the new weights are loaded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from baton_serve.contracts.flag_choices import LoadFormat
from baton_serve.contracts.model_path import model_folder
from baton_serve.engine.errors import ModelError
from baton_serve.engine.model.fingerprint import VOLATILE_KEYS
from baton_serve.engine.model_folder import first_line, weight_files

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""

_FREE_KEYS = frozenset({*VOLATILE_KEYS, "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"})
"""Fields of config.json that may differ between two checkpoints of one architecture."""
_MAY_BE_MISSING = ("lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that programs leave out if they can be derived from others: tied embeddings and rotary frequencies."""
_MAX_SHOWN = 3
"""Number of differences that an error names."""


def check_replacement(loaded: str, model: str, load_format: LoadFormat) -> None:
    """Check that a running instance can replace the weights of the model `loaded` by those of `model`, which it reads
    as `load_format` says. Both are folders, or GGUF files in folders.

    Raises `ModelError` if a file is missing or broken, or if architecture, names or shapes of the weights differ.
    """
    before, after = model_folder(loaded), model_folder(model)
    _compare_configs(_read_config(before), _read_config(after), after)
    if load_format == "dummy":
        return
    files = weight_files(after, load_format)
    if not files and not any(after.glob("*.gguf")):
        raise ModelError(f"{after} has no weight files for load_format {load_format}: is the checkpoint complete?")
    shapes, own = read_shapes(files), read_shapes(weight_files(before))
    # Without headers of both (GGUF, pickled files, random weights) only loading shows whether the weights fit.
    if shapes and own:
        compare_shapes(own, shapes, after)


def read_shapes(files: list[Path]) -> Shapes:
    """Return the shapes of all tensors in these safetensors files, by name; empty if a file has another format. Raises
    `ModelError` for a file that cannot be read."""
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        # Pickled files have no header, and reading them would take as long as loading them.
        if path.suffix != ".safetensors":
            return {}
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as exc:
            raise ModelError(f"{path} cannot be read as safetensors: {first_line(exc)}") from exc
    return found


def compare_shapes(before: Shapes, after: Shapes, folder: Path) -> None:
    """Raise `ModelError` if the weights `after` lack tensors of the weights `before`, or have them in other shapes;
    `folder` is named in the message."""
    missing = sorted(name for name in before.keys() - after.keys() if not name.endswith(_MAY_BE_MISSING))
    problems = [f"{name} is missing" for name in missing]
    problems += [
        f"{name} has the shape {list(after[name])} instead of {list(shape)}"
        for name, shape in sorted(before.items())
        if name in after and after[name] != shape
    ]
    if problems:
        raise ModelError(f"the weights in {folder} do not fit the loaded model: {_listed(problems)}")


def _compare_configs(before: Mapping[str, Any], after: Mapping[str, Any], folder: Path) -> None:
    # A field that only one of them has may be a default that another version of transformers writes.
    keys = sorted((before.keys() & after.keys()) - _FREE_KEYS)
    problems = [f"{key} is {after[key]} instead of {before[key]}" for key in keys if after[key] != before[key]]
    if problems:
        raise ModelError(f"{folder} has another architecture than the loaded model: {_listed(problems)}")


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path} cannot be read: {first_line(exc)}") from exc
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MAX_SHOWN
    return "; ".join(problems[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")
