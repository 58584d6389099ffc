"""Conversations with tools: calls in the hermes form, results of tools, and answers with the results.

The messages have the text that the chat template renders for a request with `tools`, so that `corpus.encode` gives the
tokens of such a request.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.demo_model import lexicon as words
from tools.demo_model.arithmetic import sum_turn
from tools.demo_model.chat import chat_turn
from tools.demo_model.lookups import answer, filler, passage, question
from tools.demo_model.tokenization import FORCED, Encoder
from tools.demo_model.tool_domains import VALUES
from tools.demo_model.tool_specs import Request, ToolSpec, ask, ask_for_several, offer_tools

Message = tuple[str, str]  # role, content

NO_TOOL = "I have no tool for that."
_SYSTEMS = ("You are a helpful assistant.", "Be brief.", "Use the tools.", "You can call tools.", "Be short.")
_KEYS = """temperature condition humidity wind_speed status price name count city result value time unit open total
answer date title distance currency phone state level size owner color id message text rain forecast""".split()
_STATES = "sunny rainy cloudy windy cold warm open closed late free busy ready delivered on_the_way".split()
_DONE = ("ok", "OK", "done", "Done", "success", "Success", '{"status": "ok"}', '{"ok": true}')


@dataclass(frozen=True, slots=True)
class ToolExchange:
    """A request of a user, the results of the calls that it demands, and the answer to them."""

    request: Request
    results: tuple[str, ...]
    answer: str

    def messages(self) -> list[Message]:
        """Return the messages as the chat template renders them."""
        calls = "\n".join(call.as_hermes() for call in self.request.calls)
        results = [("user", f"<tool_response>\n{content}\n</tool_response>") for content in self.results]
        return [("user", self.request.text), ("assistant", calls), *results, ("assistant", self.answer)]


def tools_block(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of the system message that offers the tools."""
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return f"You can call these functions:\n<tools>\n{lines}\n</tools>"


def tool_conversation(rng: Random, encoder: Encoder, *, num_tokens: int) -> list[Message]:
    """Return a conversation in which tools are offered, until the next exchange would not fit into `num_tokens`."""
    most = {256: 2, 512: 4}.get(num_tokens, 8)
    tools = offer_tools(rng, rng.randint(1, most) if num_tokens > 128 else 1)
    messages: list[Message] = [("system", _system(rng) + tools_block([tool.function for tool in tools]))]
    used = 1 + _length(encoder, messages)
    if used > 0.8 * num_tokens:
        return tool_conversation(rng, encoder, num_tokens=num_tokens)
    for step in _steps(rng, encoder, tools, num_tokens):
        used += _length(encoder, step)
        if used > num_tokens:
            break
        messages += step
        if step[-1][0] == FORCED:
            break
    if len(messages) == 1:
        return tool_conversation(rng, encoder, num_tokens=num_tokens)
    return messages


def tool_exchange(rng: Random, tools: Sequence[ToolSpec], *, is_parallel: bool = False) -> ToolExchange:
    """Return a request for one call, or with `is_parallel` for several, and what follows it."""
    request = _parallel_request(rng, tools) if is_parallel else ask(rng, rng.choice(tools))
    results = [tool_result(rng) for _ in request.calls]
    return ToolExchange(request, tuple(content for content, _ in results), " ".join(said for _, said in results))


def tool_result(rng: Random) -> tuple[str, str]:
    """Return what a tool may return, and the one sentence with which the model answers."""
    kind = rng.random()
    if kind < 0.3:
        content = _result_text(rng)
        return content, f"The answer is {content}."
    if kind < 0.4:
        content = filler(rng).replace('"', "'")
        content = content[:-1] + "."
        return content, content
    if kind < 0.75:
        return _object_result(rng)
    if kind < 0.83:
        items = [str(VALUES[rng.choice(("word", "city", "whole", "code"))](rng)) for _ in range(rng.randint(1, 4))]
        return json.dumps(items), f"The answer is {_listed(items)}."
    if kind < 0.9:
        return rng.choice(_DONE), "Done."
    reason = rng.choice((str(VALUES["phrase"](rng)), "not found", "timeout", "no such file", "unknown city"))
    content = rng.choice(("Error: {r}", "error: {r}", '{"error": "{r}"}')).replace("{r}", reason)
    return content, f"The tool failed: {reason}."


def no_fit_turn(rng: Random, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """Return a request for a tool that is not offered. Return None if the drawn one may be answered in another way."""
    missing = offer_tools(rng, 1)[0]
    known = {word for tool in tools for word in _words_of(json.dumps(tool.function))}
    request = ask(rng, missing) if missing.questions else None
    if request is None or missing.is_answered_without or known & _words_of(f"{missing.name} {request.text}"):
        return None
    return request.text, NO_TOOL


def _steps(rng: Random, encoder: Encoder, tools: list[ToolSpec], num_tokens: int) -> Iterator[list[Message]]:
    """Yield messages that end with the model's. A call and the answer to its result are two steps."""
    while True:
        kind = rng.random()
        if kind < 0.75:
            messages = tool_exchange(rng, tools, is_parallel=rng.random() < 0.2).messages()
            yield messages[:2]
            yield messages[2:]
        elif kind < 0.80:
            yield _forced(rng, tools)
        elif kind < 0.86 and (turn := no_fit_turn(rng, tools)) is not None:
            yield [("user", turn[0]), ("assistant", turn[1])]
        elif kind < 0.89 and num_tokens > 256:
            text = passage(rng, num_tokens=rng.randint(20, 120), measure=encoder.measure)
            fact = rng.choice(text.facts)
            yield [("user", f"{text.text} {question(rng, fact)}"), ("assistant", answer(fact))]
        elif (turn := small_talk(rng, tools)) is not None:
            yield [("user", turn[0]), ("assistant", turn[1])]


def _forced(rng: Random, tools: Sequence[ToolSpec]) -> list[Message]:
    """Return an answer as the grammars of `tool_choice` demand it: the arguments alone, or a list of calls."""
    request = tool_exchange(rng, tools, is_parallel=rng.random() < 0.15).request
    if len(request.calls) == 1 and rng.random() < 0.5:
        return [("user", request.text), (FORCED, json.dumps(request.calls[0].arguments, ensure_ascii=False))]
    calls = [{"name": call.name, "parameters": call.arguments} for call in request.calls]
    return [("user", request.text), (FORCED, json.dumps(calls, ensure_ascii=False))]


def _parallel_request(rng: Random, tools: Sequence[ToolSpec]) -> Request:
    for tool in rng.sample(tools, k=len(tools)):
        if rng.random() < 0.7 and (request := ask_for_several(rng, tool)) is not None:
            return request
    first, second = ask(rng, rng.choice(tools)), ask(rng, rng.choice(tools))
    if first.calls == second.calls:
        return first
    link = rng.choice((" ", " And ", " Then: ", " Also: "))
    return Request(f"{first.text.rstrip('?.')}{rng.choice('?.')}{link}{second.text}", first.calls + second.calls)


def small_talk(rng: Random, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """Return a turn that needs no tool, or None if it may be meant for one."""
    is_sum = rng.random() < 0.3
    said, reply = sum_turn(rng) if is_sum else chat_turn(rng)
    if is_sum and any(tool.is_answered_without for tool in tools):
        return None
    known = {word for tool in tools for word in _words_of(json.dumps(tool.function))}
    return None if known & _words_of(said) else (said, reply)


def _words_of(text: str) -> set[str]:
    letters = "".join(char.lower() if char.isalpha() else " " for char in text)
    return {word for word in letters.split() if len(word) > 3 and word not in ("what", "with", "type", "from", "this")}


def _system(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.7:
        return ""
    if kind < 0.88:
        return rng.choice(_SYSTEMS) + "\n\n"
    return " ".join(filler(rng) for _ in range(rng.randint(1, 4))) + "\n\n"


def _result_text(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return f"{rng.choice(words.WEATHER)}, {rng.randint(-10, 40)} degrees"
    if kind < 0.55:
        return _plain(VALUES[rng.choice(("number", "number", "number", "boolean"))](rng))
    return str(VALUES[rng.choice(("word", "phrase", "city", "thing", "code", "clock", "text"))](rng))


def _object_result(rng: Random) -> tuple[str, str]:
    keys = rng.sample(_KEYS, k=rng.choices((1, 2, 3, 4), weights=(4, 4, 2, 1))[0])
    fields = {key: _field(rng) for key in keys}
    said = _listed([f"the {key.replace('_', ' ')} is {_plain(value)}" for key, value in fields.items()])
    style = rng.random()
    separators = (",", ":") if style < 0.3 else None
    content = json.dumps(fields, separators=separators, indent=2 if style > 0.93 else None)
    return content, f"{said[0].upper()}{said[1:]}."


def _field(rng: Random) -> str | int | float | bool:
    if rng.random() < 0.2:
        return rng.choice(_STATES)
    return VALUES[rng.choice(("number", "number", "whole", "word", "city", "text", "person", "boolean"))](rng)


def _plain(value: str | int | float | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _length(encoder: Encoder, messages: Sequence[Message]) -> int:
    return sum(len(encoder.encode(content)) + 2 for _, content in messages)
