"""Hostile request bodies of `baton-bench chaos`: each once ended, blocked or filled a router, or held load for ever.

Every one has a clear answer: a refusal with status 4xx, or a right answer where the request is valid after all.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 8 * 1024 * 1024
"""Default of the router's `--max-request-bytes`."""
HELLO = [{"role": "user", "content": "hello"}]
HUGE = "1" + 30 * "0"
NUMBERS = [HUGE, f"-{HUGE}", "1" + 4000 * "0", str(2**63), "1e400", "NaN"]
NUMERIC_FIELDS = ["priority", "top_k", "seed", "truncate_prompt_tokens", "max_tokens", "n", "min_tokens"]
DEEP = json.dumps(100_000 * '{"a":' + "1" + 100_000 * "}")
BAD, BAD_OR_RIGHT, RIGHT = frozenset({400}), frozenset({200, 400}), frozenset({200})


@dataclass(frozen=True, slots=True)
class HostileBody:
    """A kind of POST requests: `make` returns a body, `statuses` are the right answers to it.

    Bodies that are compiled differ each time, so that no cached verdict answers them.
    """

    name: str
    path: str
    make: Callable[[random.Random], bytes]
    statuses: frozenset[int] = BAD
    headers: Mapping[str, str] | None = None
    """Headers that replace or add to the usual ones."""
    has_key: bool = True


def chained_references(rng: random.Random) -> dict[str, Any]:
    """Return a chat whose schema has 3,000 definitions that refer to each other, which overflows a recursive stack."""
    chain: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    chain["d3000"] = {"type": "integer", "minimum": rng.randrange(10**6)}
    schema = {"$ref": "#/$defs/d0", "$defs": chain}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": HELLO, "response_format": form}


def chained_rules(rng: random.Random) -> dict[str, Any]:
    """Return a completion with a Lark grammar of 6,000 rules that refer to each other."""
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(6000))
    return {"prompt": "a", "guided_grammar": f'start: r0\n{rules}r6000: "{rng.randrange(10**6)}"\n'}


def many_properties(rng: random.Random) -> dict[str, Any]:
    """Return a chat whose schema has 10,000 properties, which took seconds to compile."""
    salt = rng.randrange(10**6)
    properties = {f"p{salt}x{i}": {"type": "string"} for i in range(10_000)}
    return {"messages": HELLO, "guided_json": {"type": "object", "properties": properties}}


def slow_number(rng: random.Random) -> dict[str, Any]:
    """Return a chat whose small schema takes seconds of processor time to compile."""
    return {"messages": HELLO, "guided_json": {"type": "integer", "multipleOf": 999_001 + 2 * rng.randrange(400)}}


def memory_hungry(rng: random.Random) -> dict[str, Any]:
    """Return a completion whose regular expression needs more than a gigabyte to compile."""
    return {"prompt": "a", "guided_regex": "(a|bc)?" * (20_000 - rng.randrange(1000))}


def strange_number(rng: random.Random) -> str:
    return f'{{"prompt":"a","max_tokens":2,"{rng.choice(NUMERIC_FIELDS)}":{rng.choice(NUMBERS)}}}'


def deep_arguments(rng: random.Random) -> str:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "@"}}
    return json.dumps({"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}).replace('"@"', DEEP)


def unknown_keys(rng: random.Random) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 2} | {f"key {rng.random()} {i}": 1 for i in range(100_000)}


def _filled(begin: str, element: str, end: str) -> str:
    """Return a list of as many elements as fit into the largest body."""
    count = (MAX_BODY_BYTES - len(begin) - len(end)) // (len(element) + 1)
    return begin + ",".join([element] * count) + end


def _json(make: Callable[[random.Random], dict[str, Any]]) -> Callable[[random.Random], bytes]:
    return lambda rng: json.dumps(make(rng)).encode()


def _text(make: Callable[[random.Random], str]) -> Callable[[random.Random], bytes]:
    return lambda rng: make(rng).encode()


def _completion(**body: object) -> Callable[[random.Random], bytes]:
    return lambda rng: json.dumps({"prompt": "a", **body}).encode()


HOSTILE_BODIES = [
    HostileBody("chain of 3,000 $refs", CHAT, _json(chained_references)),
    HostileBody("6,000 rules", COMPLETIONS, _json(chained_rules)),
    HostileBody("10,000 properties", CHAT, _json(many_properties)),
    HostileBody("seconds to compile", CHAT, _json(slow_number)),
    HostileBody("gigabytes to compile", COMPLETIONS, _json(memory_hungry)),
    HostileBody("number out of range", COMPLETIONS, _text(strange_number), BAD_OR_RIGHT),
    HostileBody("logit_bias key of 5,000 digits", COMPLETIONS, _completion(logit_bias={5000 * "9": 1})),
    HostileBody("8 MB of empty prompts", COMPLETIONS, _text(lambda rng: _filled('{"prompt":[', "{}", "]}"))),
    HostileBody("8 MB of empty messages", CHAT, _text(lambda rng: _filled('{"messages":[', "{}", "]}"))),
    HostileBody("8 MB of one text", COMPLETIONS, _completion(prompt="word " * (MAX_BODY_BYTES // 5 - 10))),
    HostileBody("9 MB", COMPLETIONS, _completion(prompt=9_000_000 * "x"), frozenset({413})),
    HostileBody("100,000 unknown keys", CHAT, _json(unknown_keys), BAD_OR_RIGHT),
    HostileBody("100,000 bad words", COMPLETIONS, _completion(bad_words=[f"w{i}" for i in range(100_000)])),
    HostileBody("100,000 stop strings", COMPLETIONS, _completion(stop=[f"w{i}" for i in range(100_000)])),
    HostileBody("tool arguments 100,000 deep", CHAT, _text(deep_arguments)),
    HostileBody("body 1,000,000 deep", COMPLETIONS, _text(lambda rng: '{"prompt":' + 1_000_000 * "[")),
    HostileBody("half a character", COMPLETIONS, _completion(prompt="\ud800", max_tokens=2), BAD_OR_RIGHT),
    HostileBody("priority -1", COMPLETIONS, _completion(priority=-1), frozenset({403})),
    HostileBody("16 sequences", COMPLETIONS, _completion(n=16, max_tokens=64, ignore_eos=True), RIGHT),
    HostileBody("10,000 sequences", COMPLETIONS, _completion(prompt=100 * ["a"], n=100)),
    HostileBody("no key", COMPLETIONS, lambda rng: bytes(4_000_000), frozenset({401}), has_key=False),
    HostileBody("unknown path", "/v1/nothing", lambda rng: bytes(4_000_000), frozenset({404})),
    HostileBody("text/plain", COMPLETIONS, _completion(), frozenset({415}), {"content-type": "text/plain"}),
    HostileBody("foreign host", COMPLETIONS, _completion(), frozenset({403}), {"host": "rebound.example"}),
    HostileBody("no JSON", COMPLETIONS, lambda rng: rng.randbytes(10_000)),
]
