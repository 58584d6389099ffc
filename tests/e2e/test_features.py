"""Every feature gives one answer: streamed or whole, handed off or not, without any decode instance, and after the loss
of an instance."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.breaking import Breaking
from tests.e2e.cluster import Api, Cluster, wait_until
from tests.e2e.features import (
    CHAT,
    COMPLETIONS,
    FEATURES,
    LOOSE,
    MESSAGES,
    PROMPT,
    RULES,
    SCHEMA,
    Answer,
    streamed,
    whole,
    write_model,
)
from tests.e2e.in_process import in_background

pytestmark = pytest.mark.slow

PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
FLAGS = ("--dtype", "float32", "--disaggregation-min-tokens", "0")
READERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
MANY = {"type": "array", "items": SCHEMA, "minItems": 500}
LIST = {"name": "list", "parameters": {"type": "object", "properties": {"all": MANY}, "required": ["all"]}}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "free": (COMPLETIONS, {"prompt": PROMPT, "ignore_eos": True, **RULES, **LOOSE}),
    "regex": (COMPLETIONS, {"prompt": PROMPT, "guided_regex": "[a-z]{3,9}( [a-z]{3,9}){400,}", "logprobs": 1, **LOOSE}),
    "array": (CHAT, {"messages": MESSAGES, "guided_json": MANY, "include_reasoning": False, **LOOSE}),
    "call": (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": LIST}], "tool_choice": "required", **LOOSE},
    ),
}
LONG_TOKENS = 800


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "marked")


@pytest.fixture(scope="module")
def handed_off(model: Path) -> Iterator[Cluster]:
    with Cluster(model, prefill=1, decode=2, args=(*FLAGS, *READERS)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def aggregated(model: Path) -> Iterator[Api]:
    with in_background(model, roles=("unified",), **PARSERS) as api:
        yield api


@pytest.fixture(scope="module")
def on_prefill(model: Path) -> Iterator[Api]:
    """A cluster with an empty decode pool."""
    with in_background(model, roles=("prefill",), instance_wait_s=0.5, **PARSERS) as api:
        yield api


@pytest.fixture(scope="module")
def replayed(model: Path) -> Iterator[Api]:
    """Every request breaks once in prefill, and once in decode after three tokens."""
    with in_background(model, wrap=Breaking, retry_budget=1000.0, **PARSERS) as api:
        yield api


@pytest.mark.parametrize("name", FEATURES)
def test_one_answer_streamed_and_whole_handed_off_and_not_and_replayed(
    handed_off: Cluster, aggregated: Api, on_prefill: Api, replayed: Api, name: str
) -> None:
    feature = FEATURES[name]
    answer = whole(handed_off, feature.path, feature.request)
    assert all(feature.check(choice) for choice in answer.choices), answer
    replays = replayed.metrics()["baton:replays_total"]
    for other in (handed_off, aggregated, on_prefill, replayed):
        assert whole(other, feature.path, feature.request) == answer
        if feature.streams:
            assert streamed(other, feature.path, feature.request) == answer
    assert replayed.metrics()["baton:replays_total"] > replays


def test_what_was_drawn_without_a_seed_goes_on_after_a_replay(replayed: Api) -> None:
    """Each token's log-probability is the one it has after all that was sent before it."""
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "temperature": 1.2, "logprobs": 0}
    answers = [streamed(replayed, COMPLETIONS, {**body, "return_tokens_as_token_ids": True}) for _ in range(2)]
    assert answers[0].choices[0].tokens != answers[1].choices[0].tokens
    written = [int(token.removeprefix("token_id:")) for token in answers[0].choices[0].tokens]
    judged = whole(replayed, COMPLETIONS, {"prompt": [*PROMPT, *written], "echo": True, "logprobs": 0, "max_tokens": 0})
    assert judged.choices[0].token_logprobs[-30:] == pytest.approx(answers[0].choices[0].token_logprobs, abs=1e-3)


def test_beams_are_those_of_transformers(handed_off: Cluster, model: Path) -> None:
    """Without ends all are equally long, and only then do the two rank alike."""
    body = {"prompt": PROMPT, "n": 3, "use_beam_search": True, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    answer = handed_off.client.post(COMPLETIONS, json={**body, "return_tokens_as_token_ids": True}).json()
    torch.set_num_threads(1)
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    limits = {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 3, "do_sample": False, "pad_token_id": 0}
    ids = torch.tensor([PROMPT])
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **limits)[:, len(PROMPT) :].tolist()
    served = [
        [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]] for choice in answer["choices"]
    ]
    assert served == expected


class Streams:
    """Streams of all requests in LONG at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.chunks: dict[str, list[Any]] = {name: [] for name in LONG}
        self.answers: dict[str, Answer] = {}
        self._cluster = cluster
        self._threads = [threading.Thread(target=self._read, args=(name,)) for name in LONG]
        for thread in self._threads:
            thread.start()

    def wait(self) -> dict[str, Answer]:
        for thread in self._threads:
            thread.join(100)
        return self.answers

    def _read(self, name: str) -> None:
        path, body = LONG[name]
        request = {**body, "max_tokens": LONG_TOKENS}
        self.answers[name] = streamed(self._cluster, path, request, self.chunks[name])


def test_streams_under_a_form_survive_the_loss_of_their_decode_instance(handed_off: Cluster) -> None:
    """Last in this file: it kills one of two decode instances, the one with more of four long streams."""
    undisturbed = Streams(handed_off).wait()
    assert {answer.choices[0].finish_reason for answer in undisturbed.values()} == {"length"}
    pids = [handed_off.pid("decode", number) for number in range(2)]
    addresses = [instance["http_address"] for instance in handed_off.instances("decode")]
    streams = Streams(handed_off)
    running: list[float] = []

    def one_writes() -> bool:
        """A first token comes from prefill, before decode has anything to write."""
        running[:] = [handed_off.metrics(address)["vllm:num_requests_running"] for address in addresses]
        return any(running) or len(streams.answers) == len(LONG)

    wait_until(one_writes, timeout_s=30, what="a decode that writes")
    assert any(running), "the streams ended before an instance could be killed"
    os.kill(pids[running.index(max(running))], signal.SIGKILL)
    assert streams.wait() == undisturbed
    assert handed_off.metrics()["baton:replays_total"] >= 1
    handed_off.wait_idle()
