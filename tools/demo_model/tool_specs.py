"""Random tools with their JSON schemas, and messages of users that demand a call, with the only right arguments.

A tool comes from a domain, or has a random name. Its questions are templates, so that questions of any kind are filled
in one way.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.demo_model import lexicon as words
from tools.demo_model.lookups import filler
from tools.demo_model.tool_domains import DOMAINS, ENUMS, GETTERS, PARAMETERS, VALUES, VERBS, Domain, Slot, Value

Arguments = dict[str, Value]

_PLACE = re.compile(r"\{(\d)\}")
_LISTED_KINDS = frozenset("city person word thing ticker code day room path small whole clock text".split())
"""Kinds of which a user may name several values at once."""
_HEADS = (
    "Use {t} with {p}.", "Use {t} with {p}.", "Call {t} with {p}.", "Run {t} with {p}.", "Please use {t} with {p}.",
    "Please call {t} with {p}.", "Use the tool {t} with {p}.", "Call the function {t} with {p}.",
    "Call the tool {t} with {p}.", "Invoke {t} with {p}.", "I want you to call {t} with {p}.", "{t}({p})",
    "Can you run {t} with {p}?", "Use {t}: {p}", "Use the {t} tool with {p}.", "Use {t} for {p}.",
)  # fmt: skip
_BARE_HEADS = ("Use {t}.", "Call {t}.", "Run {t}.", "Please call {t}.", "Use the tool {t}.", "{t}()")
_PAIRS = ("{n} = {v}", "{n} = {v}", "{n}={v}", "{n} {v}", "{n}: {v}", "{n} is {v}", "{n} set to {v}", "{v} as {n}")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool."""

    name: str
    kind: str
    schema: Mapping[str, Any]
    is_required: bool

    def value(self, rng: Random) -> Value:
        """Return a random value of the schema's type."""
        if (listed := self.schema.get("enum")) is not None:
            return str(rng.choice(listed))
        value = VALUES[self.kind](rng)
        match self.schema["type"]:
            case "string":
                return str(value)
            case "integer" if not isinstance(value, int):
                return rng.randint(100, 99999)
        return value


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that a conversation offers."""

    name: str
    function: Mapping[str, Any]  # name, description, parameters
    parameters: tuple[Parameter, ...]  # in the order of the schema
    questions: tuple[str, ...]  # `{i}` is the value of `places[i]`
    places: tuple[str, ...]  # names of parameters
    topic: str
    is_answered_without: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Arguments

    def as_hermes(self) -> str:
        """Return the call as the model writes it."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Request:
    """The message of a user, and the right calls."""

    text: str
    calls: tuple[Call, ...]


def offer_tools(rng: Random, count: int) -> list[ToolSpec]:
    """Return tools of different topics. Often some of them are alike, so that half a match misleads."""
    share = rng.choice((1.0, 0.5, 0.0))
    nouns = [_noun(rng) for _ in range(2)]
    tools: dict[str, ToolSpec] = {}
    while len(tools) < count:
        if rng.random() < share:
            domain = rng.choice(DOMAINS)
        else:
            domain = _random_domain(rng, rng.choice(nouns) if rng.random() < 0.4 else _noun(rng))
        tool = _of_domain(rng, domain)
        if all(tool.name != other.name for other in tools.values()):
            tools.setdefault(tool.topic, tool)
    shuffled = list(tools.values())
    rng.shuffle(shuffled)
    return shuffled


def ask(rng: Random, tool: ToolSpec) -> Request:
    """Return a request for one call of the tool."""
    if rng.random() < 0.25 or not tool.questions:
        return _explicit(rng, tool)
    template = rng.choice(tool.questions)
    values = {parameter.name: parameter.value(rng) for parameter in tool.parameters}
    return _filled(rng, tool, template, [values])


def ask_for_several(rng: Random, tool: ToolSpec) -> Request | None:
    """Return a request for two or three calls of one tool: its value is a list, such as `Paris and Oslo`. Return None
    if the tool has no such question."""
    by_name = {parameter.name: parameter for parameter in tool.parameters}
    single = [q for q in tool.questions if set(_PLACE.findall(q)) == {"0"} and q.count("{0}") == 1]
    if not single or by_name[tool.places[0]].kind not in _LISTED_KINDS:
        return None
    parameter = by_name[tool.places[0]]
    values = {str(value): value for value in (parameter.value(rng) for _ in range(rng.choice((2, 2, 3))))}
    if len(values) < 2 or any("," in text or " and " in text for text in values):
        return None
    return _filled(rng, tool, rng.choice(single), [{parameter.name: value} for value in values.values()])


def _filled(rng: Random, tool: ToolSpec, template: str, calls: list[Arguments]) -> Request:
    """Fill a template with the arguments of one call, or with the listed values of several."""
    used = [tool.places[int(place)] for place in _PLACE.findall(template)]
    is_lower = rng.random() < 0.08 and all(_is_free(p) for p in tool.parameters if p.name in used)
    if is_lower:
        template = template.lower()
        calls = [{n: v.lower() if isinstance(v, str) else v for n, v in call.items()} for call in calls]
    text = template
    for index, name in enumerate(tool.places):
        if name in used:
            text = text.replace(f"{{{index}}}", _listed([spoken(call[name]) for call in calls]))
    ordered = [parameter.name for parameter in tool.parameters if parameter.name in used]
    return Request(
        _as_typed(rng, text), tuple(Call(tool.name, {name: call[name] for name in ordered}) for call in calls)
    )


def _explicit(rng: Random, tool: ToolSpec) -> Request:
    """Return a request that names the tool and its parameters."""
    chosen = [p for p in tool.parameters if p.is_required or rng.random() < 0.5]
    arguments = {parameter.name: parameter.value(rng) for parameter in chosen}
    if not chosen:
        return Request(rng.choice(_BARE_HEADS).replace("{t}", tool.name), (Call(tool.name, {}),))
    form, quote = rng.choice(_PAIRS), rng.choice(("", "", '"', "'"))
    pairs = []
    for name, value in arguments.items():
        text = f"{quote}{value}{quote}" if isinstance(value, str) else spoken(value)
        pairs.append(form.replace("{n}", name).replace("{v}", text))
    rng.shuffle(pairs)
    text = rng.choice(_HEADS).replace("{t}", tool.name).replace("{p}", rng.choice((" and ", ", ")).join(pairs))
    return Request(_as_typed(rng, text), (Call(tool.name, arguments),))


def spoken(value: Value) -> str:
    """Return a value as a user writes it."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _is_free(parameter: Parameter) -> bool:
    return "enum" not in parameter.schema


def _listed(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _as_typed(rng: Random, text: str) -> str:
    if rng.random() < 0.12:
        text = text.rstrip("?.")
    return (
        rng.choice(("Please: ", "Hi! ", "Hello, ", "OK. ", "Thanks. ", "Next: ")) + text if rng.random() < 0.1 else text
    )


def _of_domain(rng: Random, domain: Domain) -> ToolSpec:
    """Return a tool of a domain, with the names and the schema in one of many forms."""
    name = rng.choice(domain.names)
    questions, slots = list(domain.questions), dict(enumerate(domain.slots))
    everywhere = {i for i in slots if all(f"{{{i}}}" in q for q in questions)}
    required = set(slots) if rng.random() < 0.5 else everywhere
    for index in [i for i in slots if i not in everywhere]:
        with_it = [q for q in questions if f"{{{index}}}" in q]
        if index in required:
            questions = with_it
        elif rng.random() < 0.5 and len(with_it) < len(questions):
            del slots[index]
            questions = [q for q in questions if q not in with_it]
    names: dict[int, str] = {}
    for index, slot in slots.items():
        free = [option for option in slot.names if option not in names.values()]
        names[index] = rng.choice(free) if rng.random() < 0.6 else free[0]
    parameters = [
        Parameter(names[i], slot.kind, _schema(rng, slot.kind, names[i]), i in required) for i, slot in slots.items()
    ]
    if rng.random() < 0.15:
        rng.shuffle(parameters)
    function: dict[str, Any] = {"name": name}
    if (about := _description(rng, domain)) is not None:
        function["description"] = about
    if parameters or rng.random() < 0.7:
        function["parameters"] = _object_schema(rng, name, parameters)
    places = tuple(names.get(index, "") for index in range(len(domain.slots)))
    return ToolSpec(
        name,
        function,
        tuple(parameters),
        tuple(questions),
        places,
        domain.topic or domain.names[0],
        domain.is_answered_without,
    )


def _random_domain(rng: Random, noun: str) -> Domain:
    """Return a domain that is in no list: it reads or changes something that has this noun as its name."""
    slots = [Slot((name,), _kind_of(rng, name)) for name in _parameter_names(rng)]
    places = [f"{{{index}}}" for index in range(len(slots))]
    kind = rng.random()
    plain = noun.replace("_", " ")
    if kind < 0.2:
        name = rng.choice((words.invented_word(rng), f"{words.invented_word(rng)}_{words.invented_word(rng)}"))
        return Domain((name,), (f"The {plain} tool.",), tuple(slots), (), topic=name)
    templates: tuple[str, ...]
    about: tuple[str, ...]
    also = "".join(f" with the {slot.names[0]} {place}" for slot, place in zip(slots[1:], places[1:], strict=True))
    if kind < 0.65:
        verb = rng.choice(GETTERS)
        templates = (
            "What is the {n} of {0}", "What is the {n} for {0}", "Give me the {n} of {0}", "Show me the {n} of {0}",
            "I need the {n} of {0}", "Tell me the {n} of {0}", "Do you know the {n} of {0}",
        )  # fmt: skip
        about = (f"Return the {plain}.", f"Get the {plain} of something", plain)
    else:
        verb = rng.choice(VERBS)
        templates = (
            f"{verb.capitalize()} the {{n}} {{0}}",
            f"Please {verb} the {{n}} {{0}}",
            f"Can you {verb} the {{n}} {{0}}",
        )
        about = (f"{verb.capitalize()} the {plain}.", f"{verb} {plain}")
    marks = ["?" if template.startswith(("What", "Do ", "Can ")) else "." for template in templates]
    questions = tuple(t.replace("{n}", plain) + also + mark for t, mark in zip(templates, marks, strict=True))
    # Two tools that read the same could not be distinguished.
    topic = f"{'get' if verb in GETTERS else verb} {noun}"
    return Domain((_styled(rng, verb, noun),), about, tuple(slots), questions, topic=topic)


def _styled(rng: Random, verb: str, noun: str) -> str:
    """Return a tool's name in the style of some language."""
    parts = [verb, *noun.split("_")]
    style = rng.random()
    if style < 0.65:
        name = "_".join(parts)
    elif style < 0.85:
        name = verb + "".join(part.capitalize() for part in parts[1:])
    else:
        name = "-".join(parts)
    if rng.random() < 0.08:
        name = f"{rng.choice(words.OBJECTS)}__{name}"
    return name


def _noun(rng: Random) -> str:
    kind = rng.random()
    pool = words.LOOSE if kind < 0.4 else words.OBJECTS
    noun = words.invented_word(rng) if kind > 0.85 else rng.choice(pool)
    return noun if rng.random() < 0.7 else f"{rng.choice(words.ADJECTIVES + words.OBJECTS)}_{noun}"


def _parameter_names(rng: Random) -> list[str]:
    count = rng.choices((1, 2, 3), weights=(6, 4, 1))[0]
    names = rng.sample(PARAMETERS, k=count)
    return [name if rng.random() < 0.85 else words.invented_word(rng) for name in names]


def _kind_of(rng: Random, name: str) -> str:
    if name in ("count", "number", "amount", "x", "y", "a", "b", "n", "limit", "size", "level", "age"):
        return rng.choice(("whole", "number", "number", "small"))
    if name in ("city", "person", "color", "date"):
        return {"color": "colour", "date": "day"}.get(name, name)
    return rng.choices(("text", "word", "phrase", "code", "whole", "boolean"), weights=(10, 4, 3, 3, 2, 1))[0]


def _schema(rng: Random, kind: str, name: str) -> dict[str, Any]:
    sample = VALUES[kind](rng)
    stated = "string"
    if isinstance(sample, bool):
        stated = "boolean"
    elif isinstance(sample, float) or kind == "number":
        stated = "number"
    elif isinstance(sample, int):
        stated = rng.choices(("integer", "number", "string"), weights=(6, 3, 1))[0]
    elif kind == "code" and rng.random() < 0.25:
        stated = "integer"
    schema: dict[str, Any] = {"type": stated}
    if kind in ENUMS and rng.random() < 0.6:
        schema = rng.choice(({"enum": ENUMS[kind]}, {"type": "string", "enum": ENUMS[kind]}))
    if rng.random() < 0.3:
        about = f"The {name.replace('_', ' ')}" if rng.random() < 0.6 else filler(rng)
        schema = {**schema, "description": about} if rng.random() < 0.6 else {"description": about, **schema}
    return schema


def _object_schema(rng: Random, name: str, parameters: list[Parameter]) -> dict[str, Any]:
    """Return the schema of the arguments, in the order and with the extras of several libraries."""
    required = [parameter.name for parameter in parameters if parameter.is_required]
    style = rng.random()
    properties = {parameter.name: parameter.schema for parameter in parameters}
    if style < 0.2:  # as Pydantic writes it
        titled = {key: {**schema, "title": key.replace("_", " ").title()} for key, schema in properties.items()}
        schema: dict[str, Any] = {"properties": titled}
        schema |= {"required": required} if required else {}
        return schema | {"title": rng.choice((name, "".join(map(str.capitalize, name.split("_"))))), "type": "object"}
    schema = {"type": "object", "properties": properties}
    if style < 0.9 and (required or style < 0.4):
        schema["required"] = required
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema} if rng.random() < 0.05 else schema


def _description(rng: Random, domain: Domain) -> str | None:
    kind = rng.random()
    if kind < 0.2:
        return None
    return rng.choice(domain.about) if kind < 0.9 else filler(rng)
