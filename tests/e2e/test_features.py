"""Every feature gives one answer: streamed or whole, handed off or not, and after the loss of an instance."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.cluster import Cluster, wait_until

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FLAGS = ("--dtype", "float32", "--disaggregation-min-tokens", "0")
MESSAGES = [{"role": "user", "content": "the weather and the rest of it, please " * 3}]
PROMPT = [7 + (13 * i) % 200 for i in range(90)]
LOOSE: dict[str, Any] = {"temperature": 1.2, "seed": 11, "top_p": 0.97}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "find")]
NAMED = {"type": "function", "function": {"name": "find"}}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
MANY = {"type": "array", "items": SCHEMA, "minItems": 500}
LIST = {"name": "list", "parameters": {"type": "object", "properties": {"all": MANY}, "required": ["all"]}}
STOPS = {"stop": ["a", "e", "the"], "include_stop_str_in_output": True}
RULES = {"min_tokens": 8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "sequences and logprobs": (COMPLETIONS, {"n": 3, "logprobs": 2, **LOOSE}),
    "echo": (COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 5, "temperature": 0}),
    "stop strings": (COMPLETIONS, {"n": 2, "max_tokens": 60, **STOPS, **LOOSE}),
    "penalties": (COMPLETIONS, {"n": 2, **RULES, **LOOSE}),
    "bad words and allowed tokens": (COMPLETIONS, {"bad_words": ["a"], "allowed_token_ids": [*range(60, 90)], **LOOSE}),
    "regex": (COMPLETIONS, {"guided_regex": "[a-z]{3,9}( [a-z]{3,9}){2,4}[.]", "n": 2, "logprobs": 1, **LOOSE}),
    "choice": (COMPLETIONS, {"guided_choice": ["red", "green", "blue"], "n": 3, **LOOSE}),
    "best of": (COMPLETIONS, {"n": 2, "best_of": 4, **LOOSE}),
    "beams": (COMPLETIONS, {"n": 2, "use_beam_search": True, "max_tokens": 8, "logprobs": 1}),
    "schema": (CHAT, {"response_format": FORM, "n": 2, "logprobs": True, "top_logprobs": 1, **RULES, **LOOSE}),
    "required call": (CHAT, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **LOOSE}),
    "named call": (CHAT, {"tools": TOOLS, "tool_choice": NAMED, **LOOSE}),
}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "free": (COMPLETIONS, {"ignore_eos": True, **RULES, **LOOSE}),
    "regex": (COMPLETIONS, {"guided_regex": "[a-z]{3,9}( [a-z]{3,9}){400,}", "logprobs": 1, **LOOSE}),
    "array": (CHAT, {"guided_json": MANY, **LOOSE}),
    "call": (CHAT, {"tools": [{"type": "function", "function": LIST}], "tool_choice": "required", **LOOSE}),
}

Choice = dict[str, Any]


@pytest.fixture(scope="module")
def handed_off(llama: Path) -> Iterator[Cluster]:
    with Cluster(llama, prefill=1, decode=2, args=FLAGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def aggregated(llama: Path) -> Iterator[Cluster]:
    with Cluster(llama, prefill=0, decode=0, unified=1, args=FLAGS) as cluster:
        yield cluster


def body_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
    return {"max_tokens": 250 if path == CHAT else 40, **prompt, **body}


def whole(cluster: Cluster, path: str, body: dict[str, Any]) -> list[Choice]:
    answer = cluster.client.post(path, json=body_of(path, body))
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    return [gathered([choice], "message") for choice in choices]


def streamed(cluster: Cluster, path: str, body: dict[str, Any], chunks: list[Choice] | None = None) -> list[Choice]:
    chunks = [] if chunks is None else chunks
    for chunk in cluster.stream(path, body_of(path, body)):
        chunks += chunk["choices"]
    indexes = sorted({choice["index"] for choice in chunks})
    return [gathered([choice for choice in chunks if choice["index"] == i], "delta") for i in indexes]


def gathered(pieces: list[Choice], part: str) -> Choice:
    """What a client ends up with. Ids of calls are drawn."""
    found: Choice = {"text": "", "calls": [], "logprobs": [], "finish_reason": pieces[-1]["finish_reason"]}
    for piece in pieces:
        message = piece.get(part, {})
        found["text"] += piece.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or []:
            if "id" in call:
                found["calls"].append(["", ""])
            found["calls"][-1][0] += call["function"].get("name") or ""
            found["calls"][-1][1] += call["function"].get("arguments") or ""
        logprobs = piece.get("logprobs") or {}
        found["logprobs"] += [value for value in logprobs.get("token_logprobs") or [] if value is not None]
        for entry in logprobs.get("content") or []:
            found["logprobs"] += [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
    return found


def close_to(choices: list[Choice]) -> list[Choice]:
    """Sums of floats depend on what else was computed with them, in their last bits."""
    return [{**one, "logprobs": pytest.approx(one["logprobs"], abs=1e-3)} for one in choices]


@pytest.mark.parametrize("feature", FEATURES)
def test_one_answer_streamed_and_whole_handed_off_and_not(
    handed_off: Cluster, aggregated: Cluster, feature: str
) -> None:
    path, body = FEATURES[feature]
    answer = whole(handed_off, path, body)
    expected = close_to(answer)
    assert streamed(handed_off, path, body) == expected
    assert whole(aggregated, path, body) == expected
    assert streamed(aggregated, path, body) == expected
    assert len(answer) == body.get("n", 1)
    check(feature, answer)


def check(feature: str, answer: list[Choice]) -> None:
    """That the feature did what it is for."""
    for choice in answer:
        if feature == "regex":
            assert re.fullmatch(body_of(*FEATURES[feature])["guided_regex"], choice["text"])
        elif feature == "choice":
            assert choice["text"] in ("red", "green", "blue")
        elif feature == "schema":
            assert set(json.loads(choice["text"])) == {"city", "days"}
        elif feature.endswith("call"):
            ((name, arguments),) = choice["calls"]
            assert name in ("look", "find")
            assert set(json.loads(arguments)) == {"city", "days"}


def test_beams_are_those_of_transformers(handed_off: Cluster, llama: Path) -> None:
    """Without ends all are equally long, and only then do the two rank alike."""
    body = {"prompt": PROMPT, "n": 3, "use_beam_search": True, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    answer = handed_off.client.post(COMPLETIONS, json={**body, "return_tokens_as_token_ids": True}).json()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    limits = {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(torch.tensor([PROMPT]), **limits)[:, len(PROMPT) :].tolist()
    served = [
        [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]] for choice in answer["choices"]
    ]
    assert served == expected


class Streams:
    """All of LONG at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.chunks: dict[str, list[Choice]] = {name: [] for name in LONG}
        self.answers: dict[str, list[Choice]] = {}
        self._cluster = cluster
        self._threads = [threading.Thread(target=self._read, args=(name,)) for name in LONG]
        for thread in self._threads:
            thread.start()

    def wait(self) -> dict[str, list[Choice]]:
        for thread in self._threads:
            thread.join(100)
        return self.answers

    def _read(self, name: str) -> None:
        path, body = LONG[name]
        self.answers[name] = streamed(self._cluster, path, {**body, "max_tokens": 2000}, self.chunks[name])


def test_streams_under_a_form_survive_the_loss_of_their_decode_instance(handed_off: Cluster) -> None:
    """Last in this file: it kills one of two decode instances, the one with more of four long streams."""
    undisturbed = Streams(handed_off).wait()
    assert {choice["finish_reason"] for (choice,) in undisturbed.values()} == {"length"}
    pids = [handed_off.pid("decode", number) for number in range(2)]
    addresses = [instance["http_address"] for instance in handed_off.instances("decode")]
    streams = Streams(handed_off)
    wait_until(lambda: any(streams.chunks.values()), timeout_s=30, what="a stream that has begun")
    running = [handed_off.metrics(address)["vllm:num_requests_running"] for address in addresses]
    assert any(running), "the streams ended before an instance could be killed"
    os.kill(pids[running.index(max(running))], signal.SIGKILL)
    assert streams.wait() == {name: close_to(choices) for name, choices in undisturbed.items()}
    assert handed_off.metrics()["baton:replays_total"] >= 1
    handed_off.wait_idle()
