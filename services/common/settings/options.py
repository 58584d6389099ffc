"""Describes a field of a settings Struct as an option: its flag, its allowed values, and how text becomes a value.

Supported types are `str`, `int`, `float`, `bool`, `Literal`, lists of these, `dict` (as JSON), and each of them
`| None`. The `msgspec.Meta` of a field gives its description and bounds. Its `extra` may contain `group` (a heading of
--help, for this field and the next ones), `aliases` (more flags), `synonyms` (other names of choices), `positional`,
`objects` (items of a list may be JSON objects) and `secret` (also set for names that end with `_key`). `refused` has
values that an error should explain.
"""

import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.settings.shared_settings import fields_in_help_order

Value = str | int | float | bool | list[str] | list[int] | list[float] | dict[str, object] | None

# A unit is the end of a field's name.
_UNITS = {"s": "seconds", "bytes": "bytes", "tokens": "tokens", "model_len": "tokens", "port": "port"}
# As in vLLM, a small letter is a power of 1000 and a capital letter is a power of 1024.
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SCALED = re.compile(r"(-?[0-9.]+) ?([kmgtKMGT])(?:iB)?")
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a process (flag, variable and key of the file), made from one field of its settings class."""

    name: str
    kind: type
    """One of `str`, `int`, `float`, `bool` and `dict`. For a list it is the type of each item."""
    is_list: bool
    is_optional: bool
    choices: tuple[str, ...]
    synonyms: Mapping[str, str]
    """Choices by their other names, in lower case."""
    bounds: Mapping[str, float]
    """Limits by their names in `msgspec.Meta`: `ge`, `gt`, `le`, `lt`, `min_length`, `max_length`."""
    pattern: str | None
    refused: Mapping[str, str]
    """Values of vLLM that are not among the choices, with what to use instead."""
    description: str
    group: str
    aliases: tuple[str, ...]
    takes_objects: bool
    """True if the items of the list may be JSON objects, which are kept as texts."""
    is_positional: bool
    is_secret: bool
    is_required: bool
    default: Value
    """The default value; None if the option is required."""

    @property
    def flag(self) -> str:
        """The option's main command-line flag, such as `--drain-timeout-s`."""
        return "--" + self.name.replace("_", "-")

    @property
    def unit(self) -> str:
        """The unit of the option's value, by the end of its name, such as `seconds` for `drain_timeout_s`; "" if there
        is none.
        """
        if self.kind not in (int, float):
            return ""
        return next((unit for end, unit in _UNITS.items() if f"_{self.name}".endswith(f"_{end}")), "")

    def allowed(self) -> str:
        """Return which values the option allows, as text for an error message, such as `an integer >= 1`."""
        if self.choices:
            kind = "one of " + ", ".join(self.choices)
        else:
            kind = {int: "an integer", float: "a number", bool: "true or false", dict: "a JSON object"}.get(
                self.kind, "a text"
            )
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        if self.kind is int and self.unit == "bytes":
            kind += " (a unit may follow: 512M, 4G)"
        limits = [f"{sign} {self.bounds[key]:g}" for key, sign in signs.items() if key in self.bounds]
        if self.bounds.get("min_length"):
            limits.append("that is not empty")
        if "max_length" in self.bounds:
            limits.append(f"of at most {self.bounds['max_length']:g} characters")
        if self.pattern is not None:
            limits.append(f"like {self.pattern}")
        return " ".join([("a list, each " if self.is_list else "") + kind, " and ".join(limits)]).strip()

    def convert(self, given: object, where: str) -> Value:
        """Return the option's value for `given`, the text of a flag or variable, or a value of the configuration file.

        Raises `ConfigurationError` if it is not allowed; `where` names the flag, variable or key in the message.
        """
        try:
            return self._convert(given)
        except (ValueError, TypeError, OverflowError):
            # An error ends up in logs, where a secret must not appear.
            if isinstance(given, str) and given in self.refused:
                raise ConfigurationError(f"{where}: {given} is not supported: {self.refused[given]}") from None
            shown = "the value given" if self.is_secret else repr(given)
            raise ConfigurationError(f"{where}: {shown} is not allowed (allowed: {self.allowed()})") from None

    def _convert(self, given: object) -> Value:
        if given is None or (self.is_optional and isinstance(given, str) and given.lower() in ("none", "null")):
            if not self.is_optional:
                raise ValueError
            return None
        if not self.is_list:
            return typing.cast(Value, self._item(given))
        items = _object_items(given) if self.takes_objects else _items(given)
        return typing.cast(Value, [self._item(item) for item in items])

    def _item(self, given: object) -> object:
        # YAML reads the word `off` as false.
        value = "off" if given is False and "off" in self.choices else _CONVERTERS[self.kind](given)
        if self.choices and value not in self.choices:
            # Documents write the names of formats and data types in either case.
            lower = str(value).lower()
            value = self.synonyms.get(lower, lower)
            if value not in self.choices:
                raise ValueError
        # Bounds limit the length of a text and the value of a number. A bool is an int in Python, but has no bounds.
        size = len(value) if isinstance(value, str) else value
        if isinstance(size, int | float) and not isinstance(size, bool):
            self._check(size, value)
        return value

    def _check(self, size: float, value: object) -> None:
        bounds = self.bounds
        if isinstance(value, str):
            low, high = bounds.get("min_length", 0), bounds.get("max_length", math.inf)
            is_good = low <= size <= high and (self.pattern is None or re.search(self.pattern, value) is not None)
        else:
            is_good = bounds.get("ge", -math.inf) <= size <= bounds.get("le", math.inf)
            is_good = is_good and bounds.get("gt", -math.inf) < size < bounds.get("lt", math.inf)
        # Infinity fails `gt < size < lt` even without bounds; it is allowed only then.
        if not is_good and not (size == math.inf and not bounds):
            raise ValueError


def options_of(settings: type[msgspec.Struct]) -> list[Option]:
    """Return the options of a settings class, one for each field, in the order in which `--help` shows them."""
    hints = typing.get_type_hints(settings, include_extras=True)
    options: list[Option] = []
    group = ""
    for field in fields_in_help_order(settings):
        option = _option(field, hints[field.name], group)
        group = option.group
        options.append(option)
    return options


def _option(field: msgspec.structs.FieldInfo, hint: object, group: str) -> Option:
    metas: list[msgspec.Meta] = []
    if typing.get_origin(hint) is typing.Annotated:
        hint, *marks = typing.get_args(hint)
        metas = [mark for mark in marks if isinstance(mark, msgspec.Meta)]
    extra: dict[str, typing.Any] = {}
    for meta in metas:
        extra |= meta.extra or {}
    kind, is_list, is_optional, choices = _shape(hint)
    default: typing.Any = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    names = ("ge", "gt", "le", "lt", "min_length", "max_length")
    return Option(
        name=field.name,
        kind=kind,
        is_list=is_list,
        is_optional=is_optional,
        choices=choices,
        synonyms=extra.get("synonyms", {}),
        bounds={name: bound for meta in metas for name in names if (bound := getattr(meta, name)) is not None},
        pattern=next((meta.pattern for meta in metas if meta.pattern is not None), None),
        description=next((meta.description for meta in reversed(metas) if meta.description), ""),
        refused=extra.get("refused", {}),
        group=extra.get("group", group),
        aliases=tuple(extra.get("aliases", ())),
        takes_objects=bool(extra.get("objects", False)),
        is_positional=bool(extra.get("positional", False)),
        is_secret=bool(extra.get("secret", field.name.endswith("_key"))),
        is_required=default is msgspec.NODEFAULT,
        default=None if default is msgspec.NODEFAULT else default,
    )


def _shape(hint: object) -> tuple[type, bool, bool, tuple[str, ...]]:
    """Return four facts of `hint`, the type of a setting: the type of its value or items, whether it is a list, whether
    None is allowed, and its choices (empty without a Literal).
    """
    is_optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        is_optional = len(members) < len(typing.get_args(hint))
        assert len(members) == 1, f"a setting has one type, not {hint}"
        (hint,) = members
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is list:
        kind, _, _, choices = _shape(typing.get_args(hint)[0])
        return kind, True, is_optional, choices
    if typing.get_origin(hint) is typing.Literal:
        return str, False, is_optional, tuple(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return dict, False, is_optional, ()
    assert isinstance(hint, type) and hint in _CONVERTERS, f"{hint} is not supported as the type of a setting"
    return hint, False, is_optional, ()


def _items(given: object) -> list[object]:
    """Return the items of the value of a list option: it is given as a JSON array, as text with commas, or as a list in
    the configuration file.
    """
    if isinstance(given, str):
        text = given.strip()
        given = json.loads(text) if text.startswith("[") else [part.strip() for part in text.split(",") if part.strip()]
    return list(given) if isinstance(given, list | tuple) else [given]


def _object_items(given: object) -> list[object]:
    """Return the items of a list option whose items may be JSON objects; an object becomes its JSON text. An array in
    place of an item adds its own items.
    """
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = f"[{given}]"
    found: list[object] = []
    for item in _items(given):
        inner = json.loads(item) if isinstance(item, str) and item.lstrip().startswith("[{") else [item]
        found += [json.dumps(each) if isinstance(each, dict) else each for each in inner]
    return found


def _to_int(given: object) -> int:
    """Convert `given`, a number or a text, to an integer. `16k` is 16,000, and `4G` and `4GiB` are 2**32, as in vLLM.
    Raises `ValueError` or `TypeError` if it is not one.
    """
    if isinstance(given, bool):  # `true` in a file is an int for Python, but surely a mistake here.
        raise ValueError
    if isinstance(given, str) and (scaled := _SCALED.fullmatch(given.strip())):
        given = float(scaled[1]) * _SCALES[scaled[2].upper() if given.endswith("iB") else scaled[2]]
    if isinstance(given, float) and given.is_integer():
        return int(given)
    if isinstance(given, int):
        return given
    return int(_to_str(given))


def _to_float(given: object) -> float:
    value = float(_to_str(given))
    if math.isnan(value):
        raise ValueError
    return value


def _to_bool(given: object) -> bool:
    if isinstance(given, bool):
        return given
    value = _BOOLS.get(str(given).lower())
    if value is None:
        raise ValueError
    return value


def _to_str(given: object) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return str(given)
    raise ValueError


def _to_dict(given: object) -> dict[str, object]:
    value = json.loads(given) if isinstance(given, str) else given
    if not isinstance(value, dict):
        raise ValueError
    return value


_CONVERTERS: dict[type, typing.Callable[[object], object]] = {
    str: _to_str,
    int: _to_int,
    float: _to_float,
    bool: _to_bool,
    dict: _to_dict,
}
