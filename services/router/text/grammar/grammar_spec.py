"""Decides which grammar a request asks for: `response_format`, `guided_*`, `structured_outputs`, and SGLang's and
llama.cpp's names.

A request may use several of them only if they ask for the same form. This module checks types and sizes; the compiler
checks schemas and grammars.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton_serve.contracts.closed_objects import Schema
from baton_serve.contracts.lark import Rule, embedded_rule, json_rule
from baton_serve.services.router.protocol.body_scan import check_counts, parsed
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import GenerationRequest
from baton_serve.services.router.protocol.request_bounds import MAX_FORM_CHARS
from baton_serve.services.router.text.grammar.structural_tags import structural_tag

ANY_OBJECT = {"type": "object"}
"""The schema of `json_object`."""

BACKENDS = ("auto", "guidance", "llguidance", "lm-format-enforcer", "outlines", "xgrammar")
"""Values of `guided_decoding_backend` that clients of vLLM may send. They have no effect: there is only one backend."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of `structured_outputs` that describe a form."""

OPTIONS = (
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
)
"""Fields of `structured_outputs` that change how a form is read. `disable_fallback` has no effect here."""


_OTHER_ENGINES = {"regex": "regex", "ebnf": "grammar", "grammar": "grammar", "json_schema": "json"}
"""Parameters of SGLang and llama.cpp by their kind of form. Both write grammars in GBNF."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The grammar that an answer must follow, as a rule that can still be combined with others. `param` is the
    request's parameter that asks for it, which errors name.
    """

    rule: Rule
    param: str


@dataclass(frozen=True, slots=True)
class _Given:
    """One parameter by which a request asks for structured output: the parameter's name, its kind (one of `KINDS`), its
    value and its options.
    """

    param: str
    kind: str
    value: Any
    options: Mapping[str, Any]

    def form(self) -> tuple[object, ...]:
        """Return a value that is equal for two parameters that ask for the same output. Raises `BadRequestError` if a
        schema is not JSON.
        """
        # Two spellings of one form must be equal: a schema as JSON text or as an object, `json_object` or its schema.
        kind, value = self.kind, self.value
        if kind == "json_object":
            kind, value = "json", ANY_OBJECT
        elif kind == "json":
            value = _schema(value, self.param)
        return kind, value, _json_options(self.options), self.options.get("disable_additional_properties") is False


FORM_PARAMETERS = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"}
    | {"guided_whitespace_pattern", "structured_outputs", "response_format", *_OTHER_ENGINES}
)
"""Parameters for structured output. Without any of them the text of an answer is free."""


def read_grammar_spec(request: GenerationRequest) -> GrammarSpec | None:
    """Return the grammar that a request wants for its answer (`response_format`, `guided_json` and others), or None for
    free text.

    Raises `BadRequestError` if a parameter is invalid or if two parameters ask for different grammars.
    """
    # Most requests have none of the parameters.
    if FORM_PARAMETERS.isdisjoint(request.model_fields_set):
        return None
    backend = request.guided_decoding_backend
    # vLLM appends options to the name, as in "xgrammar:no-fallback".
    if backend is not None and backend.partition(":")[0] not in BACKENDS:
        raise BadRequestError(
            f"guided_decoding_backend must be one of {', '.join(BACKENDS)}, not {backend!r}",
            param="guided_decoding_backend",
        )
    given = [*_guided(request), *_structured_outputs(request), *_response_format(request)]
    # Clients that know several versions of vLLM send one form under an old and a new name.
    if len(given) > 1 and any(one.form() != given[0].form() for one in given[1:]):
        names = " and ".join(one.param for one in given)
        raise BadRequestError(f"{names} exclude each other: set only one of them", param=given[-1].param)
    if not given and request.guided_whitespace_pattern is not None:
        raise BadRequestError(
            "guided_whitespace_pattern has no effect without guided_json or a response_format of JSON",
            param="guided_whitespace_pattern",
        )
    return GrammarSpec(_RULES[given[0].kind](given[0]), given[0].param) if given else None


def _guided(request: GenerationRequest) -> list[_Given]:
    values = {
        "json": request.guided_json,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }
    options = _whitespace(request)
    given = [_Given(f"guided_{kind}", kind, value, options) for kind, value in values.items()]
    others = [_Given(name, kind, getattr(request, name), options) for name, kind in _OTHER_ENGINES.items()]
    # Clients of llama.cpp send an empty text for no grammar.
    given += [one for one in others if one.value != ""]
    return [one for one in given if one.value is not None]


def _structured_outputs(request: GenerationRequest) -> list[_Given]:
    stated = {name: value for name, value in (request.structured_outputs or {}).items() if value is not None}
    if unknown := set(stated) - {*KINDS, *OPTIONS}:
        raise BadRequestError(f"structured_outputs: unknown field {sorted(unknown)[0]!r}", param="structured_outputs")
    # Clients send `"json_object": false` for the default.
    kinds = {kind: stated[kind] for kind in KINDS if kind in stated and stated[kind] is not False}
    if stated and len(kinds) != 1:
        raise BadRequestError(
            f"structured_outputs must have exactly one of {', '.join(KINDS)}, got {len(kinds)}",
            param="structured_outputs",
        )
    return [_Given("structured_outputs", kind, value, stated) for kind, value in kinds.items()]


def _response_format(request: GenerationRequest) -> list[_Given]:
    form = request.response_format
    if form is None or form.get("type") == "text":
        return []
    options = _whitespace(request)
    match form.get("type"):
        case "json_object" if form.get("schema") is None:
            return [_Given("response_format", "json_object", True, options)]
        case "json_object" | "json_schema":
            # llama.cpp's clients put the schema beside the type.
            stated = form.get("json_schema") or form
            if not isinstance(stated, Mapping) or "schema" not in stated:
                raise BadRequestError("response_format: json_schema.schema is missing", param="response_format")
            return [_Given("response_format", "json", stated["schema"], options)]
        case "structural_tag":
            return [_Given("response_format", "structural_tag", form, options)]
        case other:
            raise BadRequestError(
                f"response_format: type must be text, json_object, json_schema or structural_tag, not {other!r}",
                param="response_format",
            )


def _whitespace(request: GenerationRequest) -> dict[str, Any]:
    pattern = request.guided_whitespace_pattern
    return {} if pattern is None else {"whitespace_pattern": pattern}


def _json(given: _Given) -> Rule:
    is_open = given.options.get("disable_additional_properties") is False
    return json_rule(_schema(given.value, given.param), _json_options(given.options), is_open=is_open)


def _json_object(given: _Given) -> Rule:
    return json_rule(ANY_OBJECT, _json_options(given.options))


def _regex(given: _Given) -> Rule:
    regex = _text(given)
    return lambda lark: lark.regex(regex)


def _choice(given: _Given) -> Rule:
    texts = given.value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise BadRequestError(f"{given.param} must be a list of strings, none of them empty", param=given.param)
    _check_size(sum(map(len, texts)), given.param)
    return lambda lark: lark.choice(texts)


def _grammar(given: _Given) -> Rule:
    return embedded_rule(_text(given))


def _structural_tag(given: _Given) -> Rule:
    value = given.value
    if isinstance(value, str):
        value = _parsed(value, given.param)
    return structural_tag(value, given.param)


_RULES: dict[str, Callable[[_Given], Rule]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
"""Functions that convert a form of each kind to a grammar rule. They raise `BadRequestError` for an invalid value."""


def _json_options(options: Mapping[str, Any]) -> dict[str, Any]:
    if options.get("disable_any_whitespace"):
        return {"whitespace_pattern": ""}
    pattern = options.get("whitespace_pattern")
    return {} if pattern is None else {"whitespace_pattern": pattern}


def _schema(value: object, param: str) -> Schema:
    if isinstance(value, str):
        value = _parsed(value, param)
    # In JSON Schema, `true` allows any value.
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise BadRequestError(f"{param}: a JSON schema must be an object", param=param)
    return value


def _parsed(text: str, param: str) -> object:
    _check_size(len(text), param)
    check_counts(text.encode(), param)
    try:
        value: object = parsed(text)
    except ValueError as exc:
        raise BadRequestError(f"{param}: not valid JSON: {exc}", param=param) from exc
    return value


def _text(given: _Given) -> str:
    if not isinstance(given.value, str) or not given.value:
        raise BadRequestError(f"{given.param}: {given.kind} must be a string that is not empty", param=given.param)
    _check_size(len(given.value), given.param)
    return given.value


def _check_size(num_chars: int, param: str) -> None:
    """Raise `BadRequestError` if a value of `num_chars` characters would become a grammar that is too long. It is
    called before the grammar is written.
    """
    if num_chars > MAX_FORM_CHARS:
        raise BadRequestError(
            f"{param} has {num_chars} characters, the limit is {MAX_FORM_CHARS}: simplify it", param=param
        )
