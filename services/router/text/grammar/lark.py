"""Writes grammars in llguidance's dialect of Lark (docs/syntax.md of its repository). Knows no request.

Markers such as `<tool_call>` are one token in some vocabularies and letters in others: `literal` writes each as it is.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from llguidance import grammar_from, regex_to_lark

from baton_serve.contracts.grammar_bounds import (
    MAX_CHARS,
    MAX_ENUM_VALUES,
    GrammarBoundsError,
    check_gbnf,
    check_lark,
    check_schema,
)
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.text.grammar.closed_objects import Schema, close_objects

WHITESPACE = r"(\r?\n[ \t]{0,48}| {1,2})?"
"""Between the parts of JSON unless a request says otherwise: as people and models write it, but never without end."""


class Markers(Protocol):
    """What must be known of the vocabulary."""

    def pieces(self, text: str) -> Sequence[str | int]:
        """Letters as text, special tokens as ids."""
        ...

    @property
    def ends(self) -> Collection[int]:
        """Tokens that end an answer."""
        ...


class Lark:
    """One grammar under construction. Its methods return expressions, for the right-hand side of a rule.

    What clients wrote is checked before work is done on it; all of them raise `GrammarBoundsError`."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._lines: list[str] = []
        self._embedded: list[dict[str, str]] = []
        self._num_chars = 0

    def grammar(self, start: str) -> str:
        """The whole, as llguidance takes it."""
        lines = "\n".join([f"start: {start}", "TEXT: /(.|\\n)*/", *self._lines]) + "\n"
        if not self._embedded:
            return lines
        return json.dumps({"grammars": [{"lark_grammar": lines}, *self._embedded]}, ensure_ascii=False)

    def literal(self, text: str) -> str:
        self._count(text)
        return " ".join(_quoted(piece) for piece in self._markers.pieces(text))

    def choice(self, texts: Sequence[str]) -> str:
        if len(texts) > MAX_ENUM_VALUES:
            raise GrammarBoundsError(f"there are {len(texts)} choices; at most {MAX_ENUM_VALUES} are allowed")
        return "(" + " | ".join(self.literal(text) or '""' for text in texts) + ")"

    def json(self, schema: Schema, options: Mapping[str, Any] | None = None, *, is_open: bool = False) -> str:
        """`options` are llguidance's for JSON; a schema may bring its own as `x-guidance`. `is_open`: objects may
        have properties that are not named, as JSON Schema has it."""
        check_schema(schema)
        own = schema.get("x-guidance")
        schema = schema if is_open else close_objects(schema)
        stated = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, Mapping) else {}), **(options or {})}
        written = "%json " + json.dumps({**schema, "x-guidance": stated}, ensure_ascii=False)
        self._count(written)
        return written

    def regex(self, regex: str) -> str:
        self._count(regex)
        return f"/{regex_to_lark(regex, 'd')}/"

    def embedded(self, grammar: str) -> str:
        """A client's own grammar: GBNF where rules are written `name ::= …`, Lark otherwise. Raises `ValueError`."""
        self._count(grammar)
        name = f"embedded_{len(self._embedded)}"
        if "::=" in grammar:
            check_gbnf(grammar)
            lark = grammar_from("gbnf", grammar)
        else:
            check_lark(grammar)
            lark = grammar
        self._embedded.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _count(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > MAX_CHARS:
            raise GrammarBoundsError(
                f"the grammar has {self._num_chars} characters or more; at most {MAX_CHARS} are allowed"
            )

    def free_text(self, triggers: Sequence[str] = ()) -> str:
        """Up to the end of the answer. Where every trigger is a token, any token but those."""
        firsts = [self._markers.pieces(trigger)[0] for trigger in triggers]
        tokens = [first for first in firsts if isinstance(first, int)]
        return f"{_other_than(tokens)}*" if tokens and len(tokens) == len(firsts) else "TEXT"

    def text_up_to(self, marker: str) -> str:
        """Anything, then the first `marker`. Where that is a token, other special tokens may come before it,
        but not the end of the answer."""
        first, *rest = self._markers.pieces(marker)
        after = "".join(f" {_quoted(piece)}" for piece in rest)
        if isinstance(first, int):
            return f"{_other_than([first, *sorted(self._markers.ends)])}* {_quoted(first)}{after}"
        name = f"up_to_{len(self._lines)}"
        self._lines.append(f"{name}[lazy]: TEXT {_quoted(first)}")
        return name + after


Rule = Callable[[Lark], str]
"""What an answer must be like: an expression, once the vocabulary is known."""


def json_rule(schema: Schema, options: Mapping[str, Any] | None = None, *, is_open: bool = False) -> Rule:
    return lambda lark: lark.json(schema, options, is_open=is_open)


def embedded_rule(grammar: str, param: str) -> Rule:
    def rule(lark: Lark) -> str:
        try:
            return lark.embedded(grammar)
        except GrammarBoundsError:
            raise
        except (ValueError, RecursionError) as exc:
            raise BadRequestError(f"{param}: {exc}", param=param) from exc

    return rule


def _quoted(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)


def _other_than(tokens: Sequence[int]) -> str:
    return f"<[^{','.join(map(str, tokens))}]>"
