"""Bounds of a grammar that are checked before anything compiles it, by the router and again by the workers.

llguidance compiles schemas and rules by native recursion: a chain of 2,500 `$ref`s or of 300 rules with nested groups
needs 8 MiB of stack, and a process that has less dies. The bounds here limit how far that recursion can go, and those
parts of a grammar whose compile time grows with the square of their number. Nothing here recurses, and every walk ends
at the first bound that is exceeded, so that a check takes time in proportion to what is allowed, not to what was sent.

What passes needs at most `STACK_BYTES`: tests compile the grammars that need most (docs/adr/0015).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypedDict

MAX_CHARS = 512 * 1024
"""Of a grammar's text, and of all texts in a schema together."""
MAX_NODES = 50_000
"""JSON values in one schema."""
MAX_NESTING = 120
"""Objects and lists within each other; the compiler's parser of JSON stops at 127."""
MAX_OBJECT_PROPERTIES = 2_000
"""Of one object: compile time grows with their square, 0.25 s for so many."""
MAX_PROPERTIES = 5_000
MAX_PATTERN_PROPERTIES = 100
"""Of one object: each is compared with each other one, 0.04 s for so many."""
MAX_ENUM_VALUES = 10_000
MAX_REFERENCES = 1_000
"""Distinct targets of `$ref`."""
MAX_DESCENT = 4_000
"""Sum of the nesting of all targets of `$ref` and of the schema itself. No path through a schema is longer, whatever
refers to what, since the compiler visits a target once."""
MAX_RULES = 1_000
MAX_GROUPS = 4_000
"""Opening brackets in the rules of one grammar: optional groups within each other make a mask slow, 0.3 s for these."""

STACK_BYTES = 64 * 1024 * 1024
"""Enough native stack to compile whatever passes. The router compiles with just this, workers with more."""
WORKER_STACK_BYTES = 4 * STACK_BYTES


class ParserLimits(TypedDict):
    """Those of llguidance's `LLParserLimits` that are set."""

    max_items_in_row: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


PARSER_LIMITS: ParserLimits = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
"""`LLParserLimits` of router and workers: what passes in one must pass in the other. Fuel and items bound the time of
one mask (about 20 ms in most grammars), states bound the memory of one matcher (2 kB each)."""

_Json = Any
_DECODER = json.JSONDecoder()
_PARTS = re.compile(
    r"""
      (?P<skip> // [^\n]* | "(?:[^"\\\n]|\\.)*"? | /(?:[^/\\\n]|\\.)+/? )
    | (?P<json> %json \s* (?=[{[]) )
    | (?P<rule> : )
    | (?P<group> [(\[{] )
    """,
    re.VERBOSE,
)


class GrammarBoundsError(ValueError):
    """A grammar exceeds a bound; one line that names it."""


def check_grammar(grammar: str) -> None:
    """Check a grammar as it travels to workers: one in Lark, or llguidance's JSON list of grammars, each in Lark or a
    schema. Raises `GrammarBoundsError`."""
    _at_most(len(grammar), MAX_CHARS, "the grammar has {} characters")
    if not grammar.startswith("{"):
        check_lark(grammar)
        return
    try:
        listed = json.loads(grammar)["grammars"]
        schemas = [one["json_schema"] for one in listed if "json_schema" in one]
        texts = [str(one["lark_grammar"]) for one in listed if "json_schema" not in one]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise GrammarBoundsError("the grammar is neither Lark nor a list of Lark grammars and schemas") from None
    for schema in schemas:
        check_schema(schema)
    check_lark("\n".join(texts))


def check_lark(text: str) -> None:
    """Check rules in Lark, with the schemas in them. Raises `GrammarBoundsError`.

    Counts colons and opening brackets outside strings, regular expressions, comments and schemas: there are at least
    as many of them as rules and groups. A string that does not end is taken to end with its line, so that the time of a
    check grows with the text and not with its square.
    """
    _at_most(len(text), MAX_CHARS, "the grammar has {} characters")
    num_rules = num_groups = position = 0
    while found := _PARTS.search(text, position):
        position = found.end()
        match found.lastgroup:
            case "rule":
                num_rules += 1
                _at_most(num_rules, MAX_RULES, "the grammar has {} rules or more")
            case "group":
                num_groups += 1
                _at_most(num_groups, MAX_GROUPS, "the grammar has {} groups or more")
            case "json":
                position = _check_embedded(text, position)


def check_gbnf(text: str) -> None:
    """Check rules in GBNF before they are converted. Raises `GrammarBoundsError`."""
    _at_most(len(text), MAX_CHARS, "the grammar has {} characters")
    _at_most(text.count("::="), MAX_RULES, "the grammar has {} rules")


def check_schema(schema: _Json) -> None:
    """Check a JSON schema. Raises `GrammarBoundsError`."""
    size = _Size()
    values: list[_Json] = [schema]
    owners = [0]
    level = [(0, "")]
    for depth in count(1):
        if not level:
            break
        _at_most(depth, MAX_NESTING, "the schema is nested {} levels deep or more")
        below: list[tuple[int, str]] = []
        for place, key in level:
            for inner, name in size.add(values[place], key):
                below.append((len(values), name))
                values.append(inner)
                owners.append(place)
        level = below
    heights = [1] * len(values)
    for place in range(len(values) - 1, 0, -1):
        heights[owners[place]] = max(heights[owners[place]], heights[place] + 1)
    by_value = {id(value): height for value, height in zip(values, heights, strict=True)}
    descent = heights[0]
    for reference in size.references:
        descent += by_value[id(_target(schema, reference))]
        _at_most(descent, MAX_DESCENT, "the schema's $ref targets are nested {} levels or more together")


@dataclass(slots=True)
class _Size:
    """What has been counted of a schema."""

    nodes: int = 0
    chars: int = 0
    properties: int = 0
    enum_values: int = 0
    references: set[str] = field(default_factory=set)

    def add(self, value: _Json, key: str) -> Iterable[tuple[_Json, str]]:
        """Count one value, which stands under `key`; return what is right within it. Raises `GrammarBoundsError`."""
        self.nodes += 1
        _at_most(self.nodes, MAX_NODES, "the schema has {} values or more")
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, Mapping):
            self._object(value, key)
            return [(inner, str(name)) for name, inner in value.items()]
        elif isinstance(value, list):
            _at_most(len(value), MAX_NODES, "the schema has {} values or more")
            if key == "enum":
                self.enum_values += len(value)
                _at_most(self.enum_values, MAX_ENUM_VALUES, "the schema has {} enum values or more")
            return [(inner, "") for inner in value]
        return ()

    def _object(self, value: Mapping[str, _Json], key: str) -> None:
        _at_most(len(value), MAX_NODES, "the schema has {} values or more")
        if key == "properties":
            self.properties += len(value)
            _at_most(len(value), MAX_OBJECT_PROPERTIES, "an object of the schema has {} properties")
            _at_most(self.properties, MAX_PROPERTIES, "the schema has {} properties or more")
        if key == "patternProperties":
            _at_most(len(value), MAX_PATTERN_PROPERTIES, "an object of the schema has {} patternProperties")
        for name in value:
            self._text(str(name))
        reference = value.get("$ref")
        if isinstance(reference, str):
            self.references.add(reference)
            _at_most(len(self.references), MAX_REFERENCES, "the schema has {} distinct $ref targets or more")

    def _text(self, text: str) -> None:
        self.chars += len(text)
        _at_most(self.chars, MAX_CHARS, "the schema has {} characters of text or more")


def _target(schema: _Json, reference: str) -> _Json:
    """The value that a reference within the document names. Of any other, all of the schema, which is the most that it
    can be."""
    if not reference.startswith("#/"):
        return schema
    value = schema
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and len(name) < 9 and int(name) < len(value):
            value = value[int(name)]
        else:
            return schema
    return value


def _check_embedded(text: str, position: int) -> int:
    """Check the schema that begins at `position`; return where it ends. One that cannot be read ends at once: what is
    in it is then counted as rules, and the compiler says what is wrong."""
    try:
        schema, end = _DECODER.raw_decode(text, position)
    except RecursionError:
        raise GrammarBoundsError(f"the schema is nested more than {MAX_NESTING} levels deep") from None
    except ValueError:
        return position
    check_schema(schema)
    return end


def _at_most(number: int, limit: int, what: str) -> None:
    if number > limit:
        raise GrammarBoundsError(f"{what.format(number)}; at most {limit} are allowed")
