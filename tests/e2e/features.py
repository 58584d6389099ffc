"""Every feature of an answer as a request, and what a client ends up with, streamed or not."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.cluster import Api
from tests.tiny_models import IM_START_ID, write_tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MARKS = {mark: 271 + i for i, mark in enumerate(("<think>", "</think>", "<tool_call>", "</tool_call>"))}
"""Tokens of their own, so that a bias makes a model of random weights reason and call tools."""
MESSAGES = [{"role": "user", "content": "the weather and the rest of it, please " * 3}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
PROMPT = [7 + (13 * i) % 200 for i in range(90)]
SEED = {"seed": 11}
LOOSE: dict[str, Any] = {"temperature": 1.2, "top_p": 0.97, **SEED}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "find")]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
NAMED = {"type": "function", "function": {"name": "find"}}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
STOPS = {"stop": ["a", "e", "the"], "include_stop_str_in_output": True}
RULES = {"min_tokens": 8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
REGEX = "[a-z]{3,9}( [a-z]{3,9}){2,4}[.]"
GRAMMAR = 'root ::= ("one " | "two ")+ "end"'
LATIN = [*range(60, 90)]


def bias(**strengths: float) -> dict[str, Any]:
    """`think=4` makes `<think>` likelier, `think_end` its end; the same of `tool_call`."""
    marks = {"think": "<think>", "think_end": "</think>", "call": "<tool_call>", "call_end": "</tool_call>"}
    return {"logit_bias": {str(MARKS[marks[name]]): strength for name, strength in strengths.items()}}


@dataclass(frozen=True)
class Feature:
    """A feature of the API. `check` is called with each choice, to test that the feature had its effect."""

    path: str
    body: dict[str, Any]
    check: "Callable[[Choice], bool]" = lambda choice: bool(choice.text)
    streams: bool = True
    """True if the endpoint can stream it."""

    @property
    def request(self) -> dict[str, Any]:
        prompt: dict[str, Any] = {"messages": MESSAGES} if self.path == CHAT else {"prompt": PROMPT}
        return {"max_tokens": 120 if self.path == CHAT else 40, **prompt, **self.body}


@dataclass
class Choice:
    """The comparable parts of a choice. IDs of calls are random and are left out."""

    text: str = ""
    role: str | None = None
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each chosen token."""
    logprobs: list[float] = field(default_factory=list)
    """Other log-probabilities, of alternatives."""
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def close_to(self, other: "Choice") -> bool:
        """Sums of floats depend on what else was computed with them, in their last bits."""
        mine, its = dict(vars(self)), dict(vars(other))
        numbers = [(mine.pop(name), its.pop(name)) for name in ("token_logprobs", "logprobs", "prompt_logprobs")]
        return mine == its and all(one == pytest.approx(another, abs=1e-3) for one, another in numbers)


@dataclass
class Answer:
    choices: list[Choice]
    usage: dict[str, int]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        pairs = zip(self.choices, other.choices, strict=False)
        is_long = len(self.choices) == len(other.choices)
        return is_long and self.usage == other.usage and all(mine.close_to(its) for mine, its in pairs)


def json_of(choice: Choice) -> bool:
    return set(json.loads(choice.text)) == {"city", "days"}


def one_call(choice: Choice) -> bool:
    ((name, arguments),) = choice.calls
    return name in ("look", "find") and set(json.loads(arguments)) == {"city", "days"}


def calls(choice: Choice) -> bool:
    """Two at least; the last may be cut."""
    *complete, _ = choice.calls
    return bool(complete) and all(set(json.loads(arguments)) == {"city", "days"} for _, arguments in complete)


def says(pattern: str) -> Callable[[Choice], bool]:
    return lambda choice: re.fullmatch(pattern, choice.text, re.DOTALL) is not None


def reasons(choice: Choice) -> bool:
    return bool(choice.reasoning and choice.text) and "think>" not in choice.reasoning


FEATURES: Mapping[str, Feature] = {
    "greedy": Feature(COMPLETIONS, {"temperature": 0, "logprobs": 3}),
    "sequences and logprobs": Feature(COMPLETIONS, {"n": 3, "logprobs": 2, **LOOSE}, lambda c: len(c.tokens) > 3),
    "several prompts": Feature(COMPLETIONS, {"prompt": [PROMPT, PROMPT[:50]], "n": 2, **LOOSE}),
    "nucleus": Feature(COMPLETIONS, {**LOOSE, "top_k": 20, "min_p": 0.02, "top_p": 0.8}),
    "echo": Feature(COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 5, "temperature": 0}),
    "echo alone": Feature(COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 0}),
    "prompt logprobs": Feature(
        COMPLETIONS, {"prompt_logprobs": 2, **LOOSE}, lambda c: len(c.prompt_logprobs) > len(PROMPT), streams=False
    ),
    "stop strings": Feature(
        COMPLETIONS,
        {"n": 2, "max_tokens": 60, **STOPS, **LOOSE},
        lambda c: c.stop_reason in STOPS["stop"],  # type: ignore[operator]
    ),
    "stop tokens": Feature(
        COMPLETIONS,
        {"stop_token_ids": LATIN, "min_tokens": 6, "ignore_eos": True, **LOOSE},
        lambda c: c.stop_reason in LATIN,
    ),
    "penalties": Feature(COMPLETIONS, {"n": 2, **RULES, **LOOSE}),
    "bias": Feature(COMPLETIONS, {"logit_bias": {"70": 100, "71": 99}, **LOOSE}, lambda c: len(set(c.text)) == 2),
    "bad words and allowed tokens": Feature(
        COMPLETIONS, {"bad_words": ["a"], "allowed_token_ids": LATIN, **LOOSE}, lambda c: "a" not in c.text
    ),
    "ids for tokens": Feature(
        COMPLETIONS,
        {"return_tokens_as_token_ids": True, "logprobs": 1, **LOOSE},
        lambda c: all(token.startswith("token_id:") for token in c.tokens),
    ),
    "truncated prompt": Feature(COMPLETIONS, {"truncate_prompt_tokens": 40, **LOOSE}),
    "special tokens": Feature(
        COMPLETIONS,
        {"skip_special_tokens": False, "logit_bias": {str(IM_START_ID): 6}, **LOOSE},
        lambda c: "<|im_start|>" in c.text,
    ),
    "regex": Feature(COMPLETIONS, {"guided_regex": REGEX, "n": 2, "logprobs": 1, **LOOSE}, says(REGEX)),
    "choice": Feature(
        COMPLETIONS, {"guided_choice": ["red", "green", "blue"], "n": 3, **LOOSE}, says("red|green|blue")
    ),
    "grammar": Feature(COMPLETIONS, {"guided_grammar": GRAMMAR, **LOOSE}, says("((one|two) )+(end)?")),
    "best of": Feature(COMPLETIONS, {"n": 2, "best_of": 4, **LOOSE}),
    "beams": Feature(COMPLETIONS, {"n": 2, "use_beam_search": True, "max_tokens": 8, "logprobs": 1}),
    "chat": Feature(CHAT, {"logprobs": True, "top_logprobs": 3, "n": 2, **LOOSE}, lambda c: c.role == "assistant"),
    "schema": Feature(
        CHAT, {"response_format": FORM, "n": 2, "logprobs": True, **RULES, **LOOSE, **bias(think=-100)}, json_of
    ),
    "required call": Feature(
        CHAT,
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **LOOSE, **bias(think=-100)},
        one_call,
    ),
    "named call": Feature(CHAT, {"tools": TOOLS, "tool_choice": NAMED, **LOOSE, **bias(think=-100)}, one_call),
    "calls amid text": Feature(CHAT, {"tools": STRICT, "max_tokens": 200, **LOOSE, "seed": 14, **bias(call=3)}, calls),
    "broken calls": Feature(CHAT, {"tools": TOOLS, "n": 2, **LOOSE, **bias(call=5, call_end=5)}, lambda c: not c.calls),
    "reasoning": Feature(
        CHAT, {"messages": BEGUN, **CONTINUED, "n": 2, **LOOSE, "seed": 14, **bias(think_end=5)}, reasons
    ),
    "reasoning before a form": Feature(
        CHAT,
        {"messages": BEGUN, **CONTINUED, "response_format": FORM, **LOOSE, **bias(think_end=5)},
        lambda c: reasons(c) and json_of(c),
    ),
    "continued message": Feature(
        CHAT,
        {"messages": [*MESSAGES, {"role": "assistant", "content": "the and"}], **CONTINUED, "echo": True, **LOOSE},
        lambda c: c.text.startswith("the and"),
    ),
}


def write_model(folder: Path) -> Path:
    """A tiny Llama that knows the marks."""
    write_tiny_model(folder, max_position_embeddings=4096)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(list(MARKS))
    assert {mark: tokenizer.token_to_id(mark) for mark in MARKS} == MARKS
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def whole(api: Api, path: str, request: dict[str, Any]) -> Answer:
    answer = api.client.post(path, json=request)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return Answer([gathered([choice], found) for choice in found["choices"]], usage_of(found))


def streamed(api: Api, path: str, request: dict[str, Any], chunks: list[Any] | None = None) -> Answer:
    """`chunks` gets each choice of each chunk as it comes. Usage is asked for with each chunk, and counts up."""
    chunks = [] if chunks is None else chunks
    usages: list[dict[str, int]] = []
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in api.stream(path, {**request, "stream_options": options}):
        chunks += chunk["choices"]
        usages.append(usage_of(chunk))
    counted = [usage["completion_tokens"] for usage in usages]
    assert counted == sorted(counted)
    indexes = sorted({choice["index"] for choice in chunks})
    return Answer([gathered([c for c in chunks if c["index"] == i], {}) for i in indexes], usages[-1])


def usage_of(found: Mapping[str, Any]) -> dict[str, int]:
    """Return the comparable counts. The number of cached tokens is left out, because it depends on earlier requests."""
    return {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def gathered(pieces: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> Choice:
    last = pieces[-1]
    found = Choice(finish_reason=last["finish_reason"], stop_reason=last.get("stop_reason"))
    for piece in pieces:
        message = piece.get("message") or piece.get("delta") or {}
        found.role = message.get("role") or found.role
        found.text += piece.get("text") or message.get("content") or ""
        found.reasoning += message.get("reasoning_content") or ""
        for call in message.get("tool_calls") or []:
            if "id" in call:
                found.calls.append(["", ""])
            found.calls[-1][0] += call["function"].get("name") or ""
            found.calls[-1][1] += call["function"].get("arguments") or ""
        _add_logprobs(found, piece.get("logprobs") or {})
        for step in piece.get("prompt_logprobs") or answer.get("prompt_logprobs") or []:
            found.prompt_logprobs += [one["logprob"] for one in (step or {}).values()]
    return found


def _add_logprobs(found: Choice, logprobs: Mapping[str, Any]) -> None:
    found.tokens += logprobs.get("tokens") or []
    found.token_logprobs += [value for value in logprobs.get("token_logprobs") or [] if value is not None]
    found.offsets += logprobs.get("text_offset") or []
    for step in logprobs.get("top_logprobs") or []:
        found.logprobs += sorted((step or {}).values())
    for entry in logprobs.get("content") or []:
        found.tokens.append(entry["token"])
        found.token_logprobs.append(entry["logprob"])
        found.logprobs += [top["logprob"] for top in entry["top_logprobs"]]
