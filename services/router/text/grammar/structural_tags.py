"""Converts structural tags to a grammar: free text in which tags, once begun, must continue in a given form.

There are two formats: vLLM's older one with `structures` and `triggers`, and xgrammar's `format`, a tree of parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from baton_serve.contracts.lark import Lark, Rule, embedded_rule, json_rule
from baton_serve.services.router.protocol.errors import BadRequestError

MAX_DEPTH = 16
"""Largest nesting of parts. The reader is recursive, and the grammar grows with each level."""

MAX_TAGS = 1_000
"""Largest number of tags in one part."""
MAX_TRIGGERS = 100
"""Largest number of triggers in one part. Each tag is compared with each trigger, on the event loop."""


def structural_tag(value: object, param: str) -> Rule:
    """Convert the value of a `structural_tag` response format to a grammar rule. Raises `BadRequestError`, which names
    `param`, if it is invalid.
    """
    if not isinstance(value, Mapping):
        raise BadRequestError(f"{param}: a structural tag must be an object", param=param)
    reader = _Reader(param)
    if "format" in value:
        return reader.part(value["format"], 0)
    # The older format is converted to a part of the newer one.
    structures = [reader.mapping(one) for one in reader.sequence(value, "structures", at_most=MAX_TAGS)]
    tags = [
        {"begin": one.get("begin"), "end": one.get("end"), "content": {"type": "json_schema", **_schema_of(one)}}
        for one in structures
    ]
    return reader.part({"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}, 0)


class _Reader:
    """Converts the nested parts of a structural tag to grammar rules. Every error names the request's parameter."""

    def __init__(self, param: str) -> None:
        self._param = param

    def part(self, value: object, depth: int) -> Rule:
        """Return the grammar rule for one part of a structural tag, such as a constant text or a JSON schema. `depth`
        is the number of parts around it. Raises `BadRequestError` for an invalid part.
        """
        part = self.mapping(value)
        if depth > MAX_DEPTH:
            raise self._error(f"parts are nested more than {MAX_DEPTH} levels deep")
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
                return embedded_rule(self.text(part, "grammar"))
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
                raise self._error(f"parts of type {other!r} are not supported")

    def _tag(self, part: Mapping[str, Any], depth: int, *, without: str = "") -> Rule:
        """Return the grammar rule for a tag: its beginning, content and end. `without` is a trigger, the first part of
        the beginning; the model has already generated it, so the rule leaves it out.
        """
        begin, end = self.text(part, "begin"), self.text(part, "end", may_be_empty=True)
        content = self.mapping(part.get("content"))
        # Free text must stop at the end of the tag. Other content has its own end, and the end of the tag follows it.
        is_free = content.get("type") == "any_text" and bool(end)
        inner = self.part(content, depth)

        def rule(lark: Lark) -> str:
            body = lark.text_up_to(end) if is_free else f"{inner(lark)} {lark.literal(end)}"
            return f"({lark.literal(begin.removeprefix(without))} {body})"

        return rule

    def _triggered(self, part: Mapping[str, Any], depth: int) -> Rule:
        triggers = self.sequence(part, "triggers", at_most=MAX_TRIGGERS)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self._error("triggers must be strings, none of them empty")
        # Tags are grouped by trigger: after a trigger the model may continue with any tag that begins with it.
        by_trigger: dict[str, list[Rule]] = {}
        for value in self.sequence(part, "tags", at_most=MAX_TAGS):
            tag = self.mapping(value)
            begin = self.text(tag, "begin")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise self._error(f"no trigger is a beginning of the tag {begin!r}")
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
        tags = [self._tag(self.mapping(one), depth) for one in self.sequence(part, "tags", at_most=MAX_TAGS)]
        separator = self.text(part, "separator", may_be_empty=True)
        is_needed, is_once = bool(part.get("at_least_one")), bool(part.get("stop_after_first"))

        def rule(lark: Lark) -> str:
            # A rule of its own: a copy of its text would double the grammar with each level of nesting.
            one = lark.named(" | ".join(tag(lark) for tag in tags))
            more = "" if is_once else f" ({lark.literal(separator)} {one})*"
            return f"({one}{more})" if is_needed else f"({one}{more})?"

        return rule

    def mapping(self, value: object) -> Mapping[str, Any]:
        """Return `value` if it is a JSON object. Raises `BadRequestError` if it is not."""
        if not isinstance(value, Mapping):
            raise self._error("every part of a structural tag must be an object")
        return value

    def sequence(self, part: Mapping[str, Any], name: str, *, at_most: int | None = None) -> Sequence[Any]:
        """Return the field `name` of a part, a list with 1 to `at_most` elements (None: any number). Raises
        `BadRequestError` if it is not such a list.
        """
        value = part.get(name)
        if not isinstance(value, list) or not value:
            raise self._error(f"{name} must be a list that is not empty")
        if at_most is not None and len(value) > at_most:
            raise self._error(f"{name} has {len(value)} elements; at most {at_most} are allowed")
        return value

    def text(self, part: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
        """Return the field `name` of a part, a string. Raises `BadRequestError` if it is not a string, or if it is
        empty unless `may_be_empty` is set.
        """
        value = part.get(name)
        if not isinstance(value, str) or not (value or may_be_empty):
            raise self._error(f"{name} must be a string{'' if may_be_empty else ' that is not empty'}")
        return value

    def _error(self, what: str) -> BadRequestError:
        return BadRequestError(f"{self._param}: {what}", param=self._param)


def _joined(rules: Sequence[Rule], separator: str) -> Rule:
    return lambda lark: f"({separator.join(rule(lark) for rule in rules)})"


def _schema_of(structure: Mapping[str, Any]) -> dict[str, Any]:
    return {"json_schema": structure.get("schema", {})}
