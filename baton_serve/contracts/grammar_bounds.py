"""Decides how large and deep a grammar or JSON schema may be, before anything compiles it.

llguidance compiles schemas and rules by native recursion: a chain of 2,500 `$ref`s or of 300 rules with nested groups
needs 8 MiB of stack, and a process with less crashes. The bounds limit the depth of that recursion, and the parts of a
grammar whose compile time grows with the square of their number. The checks do not recurse and stop at the first
exceeded bound, so that their duration depends on the bounds and not on the size of the input.

A grammar within the bounds needs at most `STACK_BYTES`; tests compile the grammars that need most
(docs/adr/0015-grammar-compilation.md).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypedDict

MAX_CHARS = 512 * 1024
"""Maximum characters of a grammar's text, and of all texts in a schema together."""
MAX_NODES = 50_000
"""Maximum number of JSON values in one schema."""
MAX_NESTING = 120
"""Maximum nesting of objects and lists in a schema; the compiler's JSON parser fails at 127."""
MAX_OBJECT_PROPERTIES = 2_000
"""Maximum properties of one object. Compile time grows with their square: 0.25 s for this number."""
MAX_OPTIONAL_PROPERTIES = 480
"""Maximum properties of one object in a row that `required` does not name. After `{` the parser has four items for each
of them, and `max_items_in_row` allows 2,000: more of them would fail in an instance, in the middle of an answer."""
MAX_PROPERTIES = 5_000
"""Maximum properties of all objects of a schema together."""
MAX_PATTERN_PROPERTIES = 100
"""Maximum `patternProperties` of one object. Each pair of them is compared: 0.04 s for this number."""
MAX_ENUM_VALUES = 10_000
"""Maximum number of `enum` values in a schema."""
MAX_REFERENCES = 1_000
"""Maximum number of distinct `$ref` targets in a schema."""
MAX_DESCENT = 4_000
"""Maximum of the nesting of all distinct `$ref` targets and of the schema itself, added up. The compiler visits a
target once, so no recursion is deeper than this sum, however the targets refer to each other."""
MAX_RULES = 1_000
"""Maximum number of rules in a grammar."""
MAX_GROUPS = 4_000
"""Maximum number of opening brackets in the rules of a grammar. Nested optional groups make masks slow: 0.3 s for this
number."""

STACK_BYTES = 64 * 1024 * 1024
"""Native stack that suffices to compile any grammar within the bounds. The router's compilers have exactly this much.
"""
WORKER_STACK_BYTES = 4 * STACK_BYTES
"""Stack of a worker's compiler thread. Workers have more, so that they can compile whatever a router has accepted."""


class ParserLimits(TypedDict):
    """The limits of llguidance's parser that Baton sets; `LLParserLimits` has more."""

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
"""`LLParserLimits` of routers and workers. They must be equal, or a worker could refuse what the router has accepted.
Fuel and items bound the time of one mask (about 20 ms in most grammars), states the memory of one matcher (2 kB each).
"""

_Json = Any
_DECODER = json.JSONDecoder()
_PARTS = re.compile(
    r"""
      # Comments, strings and regular expressions come first, so that brackets and colons in them are not counted.
      (?P<skip> // [^\n]* | "(?:[^"\\\n]|\\.)*"? | /(?:[^/\\\n]|\\.)+/? )
    | (?P<json> %json \s* (?=[{[]) )
    | (?P<rule> : )
    | (?P<group> [(\[{] )
    """,
    re.VERBOSE,
)


class GrammarBoundsError(ValueError):
    """Reports that a grammar or JSON schema is too large. The message is one line that names the exceeded limit."""


def check_grammar(grammar: str) -> None:
    """Check that a grammar is not too large to be compiled. It has the form in which engines get it: Lark text, or
    llguidance's JSON list of Lark grammars and schemas.

    Raises `GrammarBoundsError` if a limit is exceeded or the grammar has neither form.
    """
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
    """Check that a Lark grammar, with the schemas embedded in it, is not too large. Raises `GrammarBoundsError` if a
    limit is exceeded.

    Counts colons and opening brackets outside of strings, regular expressions, comments and schemas: these are at least
    as many as rules and groups. An unterminated string is assumed to end with its line, so that the duration of the
    check grows linearly with the text.
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
    """Check that a GBNF grammar is not too large, before it is converted to Lark. Raises `GrammarBoundsError` if a
    limit is exceeded."""
    _at_most(len(text), MAX_CHARS, "the grammar has {} characters")
    _at_most(text.count("::="), MAX_RULES, "the grammar has {} rules")


def check_schema(schema: _Json) -> None:
    """Check that a JSON schema is not too large or too deeply nested to be compiled. Raises `GrammarBoundsError` if a
    limit is exceeded."""
    size = _Size()
    # Breadth first, one level per iteration, and without recursion: `values` lists every JSON value, and `owners` the
    # index of the value that contains it.
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
    # Contained values come after their owners in the list: going backwards, each height is final before its owner needs
    # it.
    heights = [1] * len(values)
    for place in range(len(values) - 1, 0, -1):
        heights[owners[place]] = max(heights[owners[place]], heights[place] + 1)
    # By identity: a value may occur several times, and comparing large values would be slow.
    by_value = {id(value): height for value, height in zip(values, heights, strict=True)}
    descent = heights[0]
    for reference in size.references:
        descent += by_value[id(_target(schema, reference))]
        _at_most(descent, MAX_DESCENT, "the schema's $ref targets are nested {} levels or more together")
    _check_circles(schema, size.references)


def _check_circles(schema: _Json, references: Iterable[str]) -> None:
    """Raise `GrammarBoundsError` if a `$ref` of the schema names nothing but further `$ref`s that lead back to it.

    Such a schema describes no text. The compiler accepts it below a property, and the answer fails when it gets there.
    """
    ended: set[str] = set()
    for first in references:
        reference: _Json = first
        chain: set[str] = set()
        while isinstance(reference, str) and reference not in ended:
            if reference in chain:
                raise GrammarBoundsError(
                    f"the schema's $ref {reference[:200]!r} leads back to itself, so that it describes no text; let it"
                    " name a definition that has a type"
                )
            chain.add(reference)
            target = _target(schema, reference)
            # `_target` returns the whole schema also for what is not found; the compiler reports that.
            is_found = target is not schema or reference == "#"
            reference = target.get("$ref") if is_found and isinstance(target, Mapping) else None
        ended |= chain


@dataclass(slots=True)
class _Size:
    """Counts the values, texts, properties and references of one JSON schema, and compares them with the limits."""

    nodes: int = 0
    chars: int = 0
    properties: int = 0
    enum_values: int = 0
    references: set[str] = field(default_factory=set)

    def add(self, value: _Json, key: str) -> Iterable[tuple[_Json, str]]:
        """Count one JSON value of a schema, which is stored under `key`. Return the values directly within it, each
        with its key.

        Raises `GrammarBoundsError` if a limit is exceeded.
        """
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
        _at_most(
            _optional_run(value),
            MAX_OPTIONAL_PROPERTIES,
            "an object of the schema has {} optional properties in a row, not separated by one that is required",
        )
        reference = value.get("$ref")
        if isinstance(reference, str):
            self.references.add(reference)
            _at_most(len(self.references), MAX_REFERENCES, "the schema has {} distinct $ref targets or more")

    def _text(self, text: str) -> None:
        self.chars += len(text)
        _at_most(self.chars, MAX_CHARS, "the schema has {} characters of text or more")


def _optional_run(schema: Mapping[str, _Json]) -> int:
    """Return the largest number of properties of this object schema that follow each other without one that `required`
    names."""
    properties, names = schema.get("properties"), schema.get("required")
    # An object with too many properties of any kind is reported as such.
    if not isinstance(properties, Mapping) or len(properties) > MAX_OBJECT_PROPERTIES:
        return 0
    required = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
    longest = run = 0
    for name in properties:
        run = 0 if name in required else run + 1
        longest = max(longest, run)
    return longest


def _target(schema: _Json, reference: str) -> _Json:
    """Return the value in `schema` to which the `$ref` text `reference` points.

    Return the whole schema for a reference outside of it, since a target cannot be nested deeper than that.
    """
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
    """Check the JSON schema that begins at `position` of a Lark text, and return the position after it.

    A schema that is not valid JSON is treated as empty: its text is then counted as rules, and the compiler reports the
    error.
    """
    try:
        schema, end = _DECODER.raw_decode(text, position)
    except RecursionError:
        raise GrammarBoundsError(f"the schema is nested more than {MAX_NESTING} levels deep") from None
    except ValueError:
        return position
    check_schema(schema)
    return end


def _at_most(number: int, limit: int, what: str) -> None:
    """Raise `GrammarBoundsError` if `number` exceeds `limit`; `what` describes the number in the message."""
    if number > limit:
        raise GrammarBoundsError(f"{what.format(number)}; at most {limit} are allowed")
