"""The honest requests of `baton-bench chaos`, and the parts of their answers that must equal the undisturbed ones.

Every answer is determined by its request: sampled requests have a seed, and a replay must draw the same tokens.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton_serve.bench.chaos.cluster import ADAPTER

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_COMPLETIONS, NUM_ADAPTED, NUM_FORMED = 12, 4, 3
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 24},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "find")]


@dataclass(frozen=True, slots=True)
class HonestRequest:
    """A request with one right answer. `body` lacks `stream`."""

    name: str
    path: str
    body: Mapping[str, object]


@dataclass(slots=True)
class GatheredAnswer:
    """The comparable parts of an answer, by index of the choice. Random ids of tool calls are left out."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    calls: dict[int, list[list[str]]] = field(default_factory=lambda: defaultdict(list))
    """Name and arguments of each tool call."""
    finish_reasons: dict[int, str] = field(default_factory=dict)

    def add(self, choices: Iterable[Mapping[str, Any]]) -> None:
        """Take over the choices of a whole answer or of one chunk of a stream."""
        for choice in choices:
            index, message = choice["index"], choice.get("message") or choice.get("delta") or {}
            # A missing text is added too, so that streamed and whole answers have the same keys.
            self.texts[index] += choice.get("text") or message.get("content") or ""
            for call in message.get("tool_calls") or []:
                if "id" in call:
                    self.calls[index].append(["", ""])
                self.calls[index][-1][0] += call["function"].get("name") or ""
                self.calls[index][-1][1] += call["function"].get("arguments") or ""
            if choice.get("finish_reason"):
                self.finish_reasons[index] = choice["finish_reason"]

    def begins(self, whole: "GatheredAnswer") -> bool:
        """Return whether `whole` could be the continuation of this answer, as it must after a cancellation."""
        return (
            all(whole.texts.get(index, "").startswith(text) for index, text in self.texts.items())
            and all(_calls_begin(mine, whole.calls.get(index, [])) for index, mine in self.calls.items())
            and all(whole.finish_reasons.get(index) == reason for index, reason in self.finish_reasons.items())
        )

    def describe(self) -> str:
        """Return a short description for a line about an answer that differs."""
        lengths = [len(text) for text in self.texts.values()]
        return f"{lengths} characters, {sum(map(len, self.calls.values()))} calls, {list(self.finish_reasons.values())}"


def _calls_begin(some: list[list[str]], whole: list[list[str]]) -> bool:
    return len(some) <= len(whole) and all(
        its[0].startswith(name) and its[1].startswith(arguments)
        for (name, arguments), its in zip(some, whole, strict=False)
    )


def honest_requests() -> list[HonestRequest]:
    """Return all kinds of requests: completions, chats, structured output, tool calls and a LoRA adapter."""
    found = [HonestRequest(f"completion {i}", COMPLETIONS, _completion(i)) for i in range(NUM_COMPLETIONS)]
    for number in range(NUM_ADAPTED):
        found.append(HonestRequest(f"adapter {number}", COMPLETIONS, {**_completion(3 * number), "model": ADAPTER}))
    for number in range(NUM_FORMED):
        loose = {"temperature": 0.9, "seed": number, "max_tokens": 160 + 40 * number}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
        found += [
            HonestRequest(f"schema {number}", CHAT, {**_chat(number), **loose, "response_format": form}),
            HonestRequest(
                f"call {number}", CHAT, {**_chat(number), **loose, "tools": TOOLS, "tool_choice": "required"}
            ),
        ]
    loose = {"temperature": 1.1, "top_p": 0.95, "seed": 5, "max_tokens": 120}
    pattern = "[a-z]{3,9}( [a-z]{3,9}){20,40}[.]"
    return [
        *found,
        HonestRequest("chat of two choices", CHAT, {**_chat(7), **loose, "n": 2, "ignore_eos": True}),
        HonestRequest("regular expression", COMPLETIONS, {"prompt": _prompt(60, 8), "guided_regex": pattern, **loose}),
        HonestRequest("stop strings", COMPLETIONS, {"prompt": _prompt(80, 9), "stop": ["the ", "."], **loose}),
        HonestRequest("penalties", COMPLETIONS, {"prompt": _prompt(90, 10), **loose, "presence_penalty": 0.5}),
    ]


def _completion(number: int) -> dict[str, object]:
    """Half of the completions are sampled."""
    heat = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
    return {"prompt": _prompt(40 + 25 * number, number), "max_tokens": 120 + 30 * number, "ignore_eos": True, **heat}


def _prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [5 + rng.randrange(200) for _ in range(length)]


def _chat(number: int) -> dict[str, object]:
    text = f"My name is Anna, and I have {number} days for the city. " * (2 + number) + "Where do I go?"
    return {"messages": [{"role": "user", "content": text}]}
