"""Structural tags: free text in which certain tags, once begun, must be completed in a stated form.

Two spellings: `structures` and `triggers`, as vLLM had them first, and `format`, a tree of parts, as xgrammar has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.text.grammar.lark import Lark, Rule, embedded_rule, json_rule

MAX_DEPTH = 16


def structural_tag(value: object, param: str) -> Rule:
    """Raises `BadRequestError`."""
    if not isinstance(value, Mapping):
        raise BadRequestError(f"{param}: a structural tag is an object", param=param)
    reader = _Reader(param)
    if "format" in value:
        return reader.part(value["format"], 0)
    structures = [reader.mapping(one) for one in reader.sequence(value, "structures")]
    tags = [
        {"begin": one.get("begin"), "end": one.get("end"), "content": {"type": "json_schema", **_schema_of(one)}}
        for one in structures
    ]
    return reader.part({"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}, 0)


class _Reader:
    """Turns parts into rules; every error names the parameter."""

    def __init__(self, param: str) -> None:
        self._param = param

    def part(self, value: object, depth: int) -> Rule:
        part = self.mapping(value)
        if depth > MAX_DEPTH:
            raise self._wrong(f"parts are nested deeper than {MAX_DEPTH}")
        match part.get("type"):
            case "const_string":
                text = self.text(part, "value")
                return lambda lark: lark.literal(text)
            case "json_schema":
                schema = part.get("json_schema")
                return json_rule({} if schema is True else self.mapping(schema))
            case "regex":
                regex = self.text(part, "pattern")
                return lambda lark: lark.regex(regex)
            case "grammar":
                return embedded_rule(self.text(part, "grammar"), self._param)
            case "any_text":
                return lambda lark: lark.free_text()
            case _:
                return self._compound(part, depth + 1)

    def _compound(self, part: Mapping[str, Any], depth: int) -> Rule:
        match part.get("type"):
            case "sequence":
                return _joined([self.part(one, depth) for one in self.sequence(part, "elements")], " ")
            case "or":
                return _joined([self.part(one, depth) for one in self.sequence(part, "elements")], " | ")
            case "tag":
                return self._tag(part, depth)
            case "triggered_tags":
                return self._triggered(part, depth)
            case "tags_with_separator":
                return self._separated(part, depth)
            case other:
                raise self._wrong(f"parts of type {other!r} are not supported")

    def _tag(self, part: Mapping[str, Any], depth: int, *, without: str = "") -> Rule:
        """`without`: what has been written of its beginning."""
        begin, end = self.text(part, "begin"), self.text(part, "end", may_be_empty=True)
        content = self.mapping(part.get("content"))
        is_free = content.get("type") == "any_text" and bool(end)
        inner = self.part(content, depth)

        def rule(lark: Lark) -> str:
            body = lark.text_up_to(end) if is_free else f"{inner(lark)} {lark.literal(end)}"
            return f"({lark.literal(begin.removeprefix(without))} {body})"

        return rule

    def _triggered(self, part: Mapping[str, Any], depth: int) -> Rule:
        triggers = self.sequence(part, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self._wrong("triggers are texts, none of them empty")
        by_trigger: dict[str, list[Rule]] = {}
        for value in self.sequence(part, "tags"):
            tag = self.mapping(value)
            begin = self.text(tag, "begin")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise self._wrong(f"no trigger begins the tag {begin!r}")
            by_trigger.setdefault(trigger, []).append(self._tag(tag, depth, without=trigger))
        is_needed, is_once = bool(part.get("at_least_one")), bool(part.get("stop_after_first"))

        def rule(lark: Lark) -> str:
            ways = [
                f"{lark.text_up_to(trigger)} ({' | '.join(tag(lark) for tag in tags)})"
                for trigger, tags in by_trigger.items()
            ]
            one, free = f"({' | '.join(ways)})", lark.free_text(list(by_trigger))
            if is_once:
                return one if is_needed else f"({one} | {free})"
            return f"({one}{'+' if is_needed else '*'} {free})"

        return rule

    def _separated(self, part: Mapping[str, Any], depth: int) -> Rule:
        tags = [self._tag(self.mapping(one), depth) for one in self.sequence(part, "tags")]
        separator = self.text(part, "separator", may_be_empty=True)
        is_needed, is_once = bool(part.get("at_least_one")), bool(part.get("stop_after_first"))

        def rule(lark: Lark) -> str:
            one = f"({' | '.join(tag(lark) for tag in tags)})"
            more = "" if is_once else f" ({lark.literal(separator)} {one})*"
            return f"({one}{more})" if is_needed else f"({one}{more})?"

        return rule

    def mapping(self, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self._wrong("every part of a structural tag is an object")
        return value

    def sequence(self, part: Mapping[str, Any], name: str) -> Sequence[Any]:
        value = part.get(name)
        if not isinstance(value, list) or not value:
            raise self._wrong(f"{name} must be a list that is not empty")
        return value

    def text(self, part: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
        value = part.get(name)
        if not isinstance(value, str) or not (value or may_be_empty):
            raise self._wrong(f"{name} must be a text")
        return value

    def _wrong(self, what: str) -> BadRequestError:
        return BadRequestError(f"{self._param}: {what}", param=self._param)


def _joined(rules: Sequence[Rule], separator: str) -> Rule:
    return lambda lark: f"({separator.join(rule(lark) for rule in rules)})"


def _schema_of(structure: Mapping[str, Any]) -> dict[str, Any]:
    return {"json_schema": structure.get("schema", {})}
