"""Reads `StructuredOutputsParams` of the offline API (JSON schema, regex, choice, grammar) and writes its grammar.

Names are vLLM's. The router writes the same grammar for the same request.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer, grammar_from

from baton_serve.contracts.grammar_bounds import GrammarBoundsError, check_grammar
from baton_serve.contracts.lark import Lark, UnconvertedGbnfError
from baton_serve.engine.errors import ConfigError

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of `json_object`."""


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer must have, as in vLLM. Exactly one of `json`, `regex`, `choice`, `grammar` and
    `json_object` is set.

    `json` is a schema: a dict, its text, or a pydantic model. `grammar` is written in Lark or GBNF. `disable_fallback`
    has no effect: there is only one backend.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Check that exactly one kind of structured output is set. Raises `ConfigError` otherwise."""
        if self.structural_tag is not None:
            raise ConfigError("structural_tag is supported by a server (`baton serve`), not by the offline API")
        forms = {"json": self.json, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [name for name, value in forms.items() if value is not None] + ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            raise ConfigError(
                "structured_outputs: set exactly one of json, regex, choice, grammar and json_object, not"
                f" {', '.join(given) or 'none'}"
            )

    def expression(self, lark: Lark) -> str:
        """Return an expression in the grammar `lark` that matches the allowed answers. Raises `ConfigError` for an
        invalid value."""
        if self.regex is not None:
            return lark.regex(self.regex)
        if self.choice is not None:
            if not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise ConfigError("structured_outputs: choice must be a list of strings, none of them empty")
            return lark.choice(self.choice)
        if self.grammar is not None:
            return lark.embedded(self.grammar)
        # An empty pattern forbids white space, and None leaves the default.
        schema = ANY_OBJECT if self.json is None else _schema(self.json)
        pattern = "" if self.disable_any_whitespace else self.whitespace_pattern
        options = {} if pattern is None else {"whitespace_pattern": pattern}
        return lark.json(schema, options, is_open=self.disable_additional_properties is False)


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """vLLM's older name of `StructuredOutputsParams`. `backend` has no effect, because there is only one backend."""

    backend: str | None = None


class GrammarWriter:
    """Writes the grammars of requests with structured output, for the tokenizer of one model."""

    def __init__(self, tokenizer: Any) -> None:
        self.ends: Collection[int] = frozenset()
        """Tokens that end an answer, for `Lark`."""
        self._tokenizer = tokenizer

    def write(self, params: StructuredOutputsParams) -> str:
        """Return the text of the grammar for a request's structured output, as the engine takes it; it is not compiled
        yet. Raises `ConfigError` if it is not valid or too large."""
        try:
            return self._written(params, {})
        except UnconvertedGbnfError as exc:
            # A router converts in a process of its own, because a grammar may crash the converter. Here the caller
            # crashes only itself.
            try:
                lark = str(grammar_from("gbnf", exc.gbnf))
            except (ValueError, AssertionError) as error:
                raise ConfigError(f"structured_outputs: the grammar is not valid GBNF: {error}") from error
            return self._written(params, {exc.gbnf: lark})

    def pieces(self, text: str) -> Sequence[str | int]:
        """Divide a text into its special tokens, as ids, and the text between them."""
        found: list[str | int] = []
        start = 0
        encoding = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._tokens.is_special_token(token_id):
                found += [*([text[start:begin]] if text[start:begin] else []), token_id]
                start = end
        return [*found, text[start:]] if text[start:] else found

    def _written(self, params: StructuredOutputsParams, converted: Mapping[str, str]) -> str:
        lark = Lark(self, converted)
        try:
            grammar = lark.grammar(params.expression(lark))
            check_grammar(grammar)
        except (GrammarBoundsError, ValueError) as exc:
            raise ConfigError(f"structured_outputs: {exc}") from exc
        return grammar

    @cached_property
    def _tokens(self) -> LLTokenizer:
        try:
            return LLTokenizer(self._tokenizer.backend_tokenizer.to_str())
        except (AttributeError, ValueError) as exc:
            raise ConfigError(f"structured output is not supported with this model's tokenizer: {exc}") from exc


def _schema(value: str | dict[str, Any] | type) -> Mapping[str, Any]:
    """Return a JSON schema that is given as a dict, as its text, or as a pydantic model. Raises `ConfigError` for
    anything else."""
    if isinstance(value, type):
        if not hasattr(value, "model_json_schema"):
            raise ConfigError(f"structured_outputs: json is the class {value.__name__}, which is no pydantic model")
        value = value.model_json_schema()
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except ValueError as exc:
        raise ConfigError(f"structured_outputs: json is not valid JSON: {exc}") from exc
    if not isinstance(schema, Mapping):
        raise ConfigError("structured_outputs: json must be a schema, that is, an object")
    return schema
