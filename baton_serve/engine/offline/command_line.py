"""Adds the arguments of an engine as flags to a parser, as vLLM's `EngineArgs.add_cli_args` does."""

import json
import types
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from baton_serve.engine.config import EngineConfig

SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "quantization": "-q"}
"""The arguments for which vLLM has a short flag."""


class FlexibleArgumentParser(ArgumentParser):
    """An argument parser like vLLM's: it accepts underscores in the names of flags, such as `--max_model_len 4096` for
    `--max-model-len 4096`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse `args` as `argparse` does, into `namespace` if one is given; `args` None: the arguments of this
        process. Return the parsed values, and the arguments that no flag of this parser takes."""
        import sys  # `sys.argv` is read at the call, as `argparse` does

        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(argument) for argument in given], namespace)


def add_arguments(parser: ArgumentParser, names: Iterable[str]) -> ArgumentParser:
    """Add the flag `--model`, and a flag for each of these arguments of an engine, to `parser`, and return it.

    A flag that is not given sets no attribute, so that `LLM(**vars(args))` gets only what the user has given.
    """
    group = parser.add_argument_group("engine", "arguments of the engine")
    hints = get_type_hints(EngineConfig)
    group.add_argument("--model", default=SUPPRESS, help="folder, GGUF file, or name on the hub")
    for name in names:
        flags = [f"--{name.replace('_', '-')}", *([SHORT[name]] if name in SHORT else [])]
        group.add_argument(*flags, dest=name, default=SUPPRESS, **_kind(hints.get(name)))
    return parser


def _kind(hint: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a flag with values of type `hint`. If `hint` is None or
    another type, the value is read as JSON."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not types.NoneType)
    if hint is bool:
        return {"action": BooleanOptionalAction}
    if get_origin(hint) is tuple:
        return {"nargs": "*"}
    if hint in (int, float, str):
        return {"type": hint}
    # The engine checks the choices itself, and also knows vLLM's other spellings.
    if get_origin(hint) is Literal:
        return {"type": str}
    return {"type": _value, "nargs": "?", "const": True}


def _value(text: str) -> Any:
    """Return the value that `text` states in JSON, such as a number, a truth value or a dict; the text itself if it is
    not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _with_dashes(argument: str) -> str:
    name, separator, value = argument.partition("=")
    return f"{name.replace('_', '-')}{separator}{value}" if argument.startswith("--") else argument
