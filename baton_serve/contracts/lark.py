"""Writes grammars in llguidance's dialect of Lark: JSON with its white space, regular expressions, choices, special
tokens.

A marker such as `<tool_call>` is one special token in some vocabularies and ordinary text in others. `Lark.literal`
writes it as the model's vocabulary has it.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from llguidance import regex_to_lark

from baton_serve.contracts.closed_objects import Schema, close_objects
from baton_serve.contracts.grammar_bounds import (
    MAX_CHARS,
    MAX_ENUM_VALUES,
    GrammarBoundsError,
    check_gbnf,
    check_lark,
    check_schema,
)

WHITESPACE = r"(\r?\n[ \t]{0,48}| {1,2})?"
"""Regular expression of the white space between the parts of JSON, unless the request sets another one. It is bounded:
a small model may otherwise generate white space without end."""


MAX_LITERAL_CHARS = 64 * 1024
"""Largest size of one choice or constant text. It is tokenized to find special tokens in it, and the conversion of the
result holds the interpreter's lock."""


class Markers(Protocol):
    """The part of a model's vocabulary that `Lark` needs: its special tokens."""

    def pieces(self, text: str) -> Sequence[str | int]:
        """Divide a text into its special tokens, as ids, and the text between them."""
        ...

    @property
    def ends(self) -> Collection[int]:
        """Ids of the tokens that end an answer."""
        ...


class UnconvertedGbnfError(Exception):
    """Reports that a client's grammar is written in GBNF and must first be converted to Lark, which another process
    does."""

    def __init__(self, gbnf: str) -> None:
        super().__init__("a grammar in GBNF is not converted yet")
        self.gbnf = gbnf


class Lark:
    """Builds the text of one grammar in Lark, the language that llguidance reads. Its methods return expressions for
    the right-hand side of a rule. Each method that takes a client's value checks its size first, and raises
    `GrammarBoundsError` if it is too big."""

    def __init__(self, markers: Markers, converted: Mapping[str, str] | None = None) -> None:
        """Start an empty grammar. `markers` are the model's special tokens. `converted` has the Lark text of each GBNF
        grammar that was converted, by its GBNF text."""
        self._markers = markers
        self._converted = converted or {}
        self._lines: list[str] = []
        self._embedded: list[dict[str, str]] = []
        self._num_chars = 0

    def grammar(self, start: str) -> str:
        """Return the text of the finished grammar for llguidance. An answer must match the expression `start`."""
        lines = "\n".join([f"start: {start}", "TEXT: /(.|\\n)*/", *self._lines]) + "\n"
        if not self._embedded:
            return lines
        return json.dumps({"grammars": [{"lark_grammar": lines}, *self._embedded]}, ensure_ascii=False)

    def literal(self, text: str) -> str:
        """Return an expression that matches exactly this text. Special tokens in the text are matched as tokens."""
        self._count(text)
        if len(text) > MAX_LITERAL_CHARS:
            raise GrammarBoundsError(
                f"a choice or constant has {len(text)} characters; at most {MAX_LITERAL_CHARS} are allowed"
            )
        return " ".join(_quoted(piece) for piece in self._markers.pieces(text))

    def choice(self, texts: Sequence[str]) -> str:
        """Return an expression that matches any one of these texts."""
        if len(texts) > MAX_ENUM_VALUES:
            raise GrammarBoundsError(f"there are {len(texts)} choices; at most {MAX_ENUM_VALUES} are allowed")
        return "(" + " | ".join(self.literal(text) or '""' for text in texts) + ")"

    def json(self, schema: Schema, options: Mapping[str, Any] | None = None, *, is_open: bool = False) -> str:
        """Return an expression that matches all JSON values which a schema allows.

        `options` are llguidance's options for JSON. They have precedence over options in the schema (`x-guidance`).
        With `is_open`, objects may have properties that the schema does not name, as JSON Schema defines it.
        """
        check_schema(schema)
        own = schema.get("x-guidance")
        schema = schema if is_open else close_objects(schema)
        stated = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, Mapping) else {}), **(options or {})}
        written = "%json " + json.dumps({**schema, "x-guidance": stated}, ensure_ascii=False)
        self._count(written)
        return written

    def regex(self, regex: str) -> str:
        r"""Return an expression that matches the texts of a regular expression. In it `\d` matches ASCII digits
        only."""
        self._count(regex)
        return f"/{regex_to_lark(regex, 'd')}/"

    def embedded(self, grammar: str) -> str:
        """Return an expression that matches what a client's grammar matches.

        The grammar is read as GBNF if its rules are written `name ::= ...`, and as Lark otherwise. Raises
        `UnconvertedGbnfError` for a GBNF grammar that is not in `converted`.
        """
        self._count(grammar)
        name = f"embedded_{len(self._embedded)}"
        if "::=" in grammar:
            check_gbnf(grammar)
            if grammar not in self._converted:
                raise UnconvertedGbnfError(grammar)
            lark = self._converted[grammar]
        else:
            check_lark(grammar)
            lark = grammar
        self._embedded.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def named(self, expression: str) -> str:
        """Define a rule for an expression that is used several times, and return the rule's name, which is an
        expression too."""
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def _count(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > MAX_CHARS:
            raise GrammarBoundsError(
                f"the grammar has {self._num_chars} characters or more; at most {MAX_CHARS} are allowed"
            )

    def free_text(self, triggers: Sequence[str] = ()) -> str:
        """Return an expression for free text up to the end of the answer. If each of `triggers` begins with a special
        token, the text cannot contain these tokens; otherwise any text is allowed."""
        # Triggers that are ordinary text cannot be excluded in this way: then the text may also contain them.
        firsts = [self._markers.pieces(trigger)[0] for trigger in triggers]
        tokens = [first for first in firsts if isinstance(first, int)]
        return f"{_other_than(tokens)}*" if tokens and len(tokens) == len(firsts) else "TEXT"

    def text_up_to(self, marker: str) -> str:
        """Return an expression for any text up to and including the first `marker`.

        If the marker is a token, other special tokens may precede it, but not the end of the answer.
        """
        first, *rest = self._markers.pieces(marker)
        after = "".join(f" {_quoted(piece)}" for piece in rest)
        if isinstance(first, int):
            return f"{_other_than([first, *sorted(self._markers.ends)])}* {_quoted(first)}{after}"
        # A lazy rule ends at the first match. It must be a named rule, because expressions cannot be lazy.
        name = f"up_to_{len(self._lines)}"
        self._lines.append(f"{name}[lazy]: TEXT {_quoted(first)}")
        return name + after


Rule = Callable[[Lark], str]
"""A function that returns the expression an answer must match. It gets the `Lark` of the model's vocabulary, which is
not known yet when the request is read."""


def json_rule(schema: Schema, options: Mapping[str, Any] | None = None, *, is_open: bool = False) -> Rule:
    """Return a function that writes the expression for JSON values of a schema into a `Lark` grammar. The arguments are
    those of `Lark.json`."""
    return lambda lark: lark.json(schema, options, is_open=is_open)


def embedded_rule(grammar: str) -> Rule:
    """Return a function that writes the expression for a client's grammar into a `Lark` grammar; see
    `Lark.embedded`."""
    return lambda lark: lark.embedded(grammar)


def _quoted(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)


def _other_than(tokens: Sequence[int]) -> str:
    return f"<[^{','.join(map(str, tokens))}]>"
