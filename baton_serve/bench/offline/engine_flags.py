"""Flags for the arguments of `LLM`: the fields of `EngineConfig`, and vLLM's arguments that `LLM` accepts."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from baton_serve.engine.config import EngineConfig
from baton_serve.engine.offline.engine_args import ALIASES, NEUTRAL, WITHOUT_EFFECT
from baton_serve.services.local.settings import DEMO_MODEL

SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
"""Short flags of vLLM's commands, by argument."""


def add_engine_flags(made: argparse.ArgumentParser) -> None:
    """Add `--model`, `--tokenizer` and a flag for each argument of `LLM`, all without a default but the model."""
    made.add_argument("--model", default=str(DEMO_MODEL), help="folder or hub name (default: the bundled demo model)")
    made.add_argument("--tokenizer", help="folder of another tokenizer")
    group = made.add_argument_group("engine", "the arguments of `LLM`")
    hints = get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name != "model":
            _add(group, field.name, _kind_of(hints[field.name]))
    for name, target in ALIASES.items():
        _add(group, name, _kind_of(hints[target]))
    for name, values in NEUTRAL.items():
        if name not in hints:
            _add(group, name, type(values[0]) if values[0] is not None else str)
    for name in WITHOUT_EFFECT:
        is_switch = name.startswith(("disable_", "enable_", "use_"))
        _add(group, name, bool if is_switch else str)
    _add(group, "swap_space", float)


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `LLM` that the flags gave, without model and tokenizer."""
    own = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    names = own | {*ALIASES, *NEUTRAL, *WITHOUT_EFFECT, "swap_space"}
    given = {name: value for name, value in vars(options).items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result as vLLM does, and make the folder of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=4) + "\n")


def _kind_of(hint: Any) -> type:
    """Return the type of a flag's value: bool, int, float, tuple (of words) or str."""
    text = str(hint)
    if "tuple" in text:
        return tuple
    parts = getattr(hint, "__args__", ()) or (hint,)
    return next((kind for kind in (bool, int, float) if kind in parts or hint is kind), str)


def _add(group: argparse._ArgumentGroup, name: str, kind: type) -> None:
    flags: Sequence[str] = [f"--{name.replace('_', '-')}", *([SHORT[name]] if name in SHORT else [])]
    default = argparse.SUPPRESS
    if kind is bool:
        group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, default=default)
    elif kind is tuple:
        group.add_argument(*flags, dest=name, nargs="+", default=default, metavar="VALUE")
    else:
        group.add_argument(*flags, dest=name, type=kind, default=default, metavar=kind.__name__.upper())
