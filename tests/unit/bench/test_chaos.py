"""The pure parts of `baton-bench chaos`: which answers are right, what counts as growth, and what as left behind."""

import json
import random
from pathlib import Path

import pytest

from baton_serve.bench.chaos.adapter import RANK, write_adapter
from baton_serve.bench.chaos.cluster import KEYS
from baton_serve.bench.chaos.hostile import complaint
from baton_serve.bench.chaos.hostile_bodies import HOSTILE_BODIES, MAX_BODY_BYTES
from baton_serve.bench.chaos.hostile_connections import CLOSED, status_of
from baton_serve.bench.chaos.idle import INSTANCE_GAUGES, ROUTER_GAUGES, busy_gauges, excess_descriptors
from baton_serve.bench.chaos.memory import ProcessSample, growth_of
from baton_serve.bench.chaos.requests import GatheredAnswer, honest_requests
from baton_serve.services.local.settings import DEMO_MODEL
from baton_serve.services.router.quota.api_keys import ApiKeys

REFUSED = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": "c"}}).encode()


def gathered(*choices: dict[str, object]) -> GatheredAnswer:
    answer = GatheredAnswer()
    answer.add(choices)
    return answer


def test_a_streamed_answer_equals_the_whole_one() -> None:
    whole = gathered(
        {"index": 0, "message": {"content": "abc"}, "finish_reason": "stop"},
        {
            "index": 1,
            "message": {"content": None, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]},
            "finish_reason": "tool_calls",
        },
    )
    streamed = gathered(
        {"index": 0, "delta": {"role": "assistant", "content": ""}},
        {"index": 1, "delta": {"tool_calls": [{"id": "y", "function": {"name": "f", "arguments": ""}}]}},
        {"index": 0, "delta": {"content": "ab"}},
        {"index": 1, "delta": {"tool_calls": [{"function": {"arguments": "{"}}]}},
        {"index": 1, "delta": {"tool_calls": [{"function": {"arguments": "}"}}]}},
        {"index": 0, "delta": {"content": "c"}, "finish_reason": "stop"},
        {"index": 1, "delta": {}, "finish_reason": "tool_calls"},
    )
    assert streamed == whole
    assert gathered({"index": 0, "text": "abc", "finish_reason": "length"}) != gathered({"index": 0, "text": "abc"})


@pytest.mark.parametrize(
    ("part", "is_beginning"),
    [
        ({"index": 0, "text": "ab"}, True),
        ({"index": 0, "text": "abc", "finish_reason": "stop"}, True),
        ({"index": 0, "text": "b"}, False),
        ({"index": 0, "text": "abcd"}, False),
        ({"index": 0, "text": "ab", "finish_reason": "length"}, False),
        ({"index": 1, "text": "a"}, False),
        ({"index": 0, "delta": {"tool_calls": [{"id": "x", "function": {"name": "f"}}]}}, False),
    ],
)
def test_a_cancelled_answer_must_be_the_beginning_of_the_whole_one(part: dict[str, object], is_beginning: bool) -> None:
    assert gathered(part).begins(gathered({"index": 0, "text": "abc", "finish_reason": "stop"})) == is_beginning


def test_honest_requests_determine_their_answers() -> None:
    for request in honest_requests():
        assert request.body.get("temperature") == 0 or "seed" in request.body, request.name
    assert len({request.name for request in honest_requests()}) == len(honest_requests())


def test_a_refusal_needs_a_reason_and_success_an_answer() -> None:
    allowed = frozenset({200, 400})
    assert not complaint(400, allowed, REFUSED)
    assert not complaint(429, allowed, REFUSED)
    assert not complaint(503, allowed, REFUSED)
    assert not complaint(200, allowed, b'{"choices":[{}]}')
    assert "status 500" in complaint(500, allowed, REFUSED)
    assert "status 404" in complaint(404, allowed, REFUSED)
    assert "without a reason" in complaint(503, allowed, b'{"error":{"message":""}}')
    assert "without JSON" in complaint(400, allowed, b"Bad Request")
    assert "without an answer" in complaint(200, allowed, b"{}")
    assert "bytes" in complaint(400, allowed, REFUSED + b" " * 5000)


def test_a_connection_without_an_answer_counts_as_closed() -> None:
    assert status_of(b"HTTP/1.1 408 Request Timeout\r\n") == 408
    assert status_of(b"") == status_of(b"\xff\x00\x00") == status_of(b"HTTP/1.1") == CLOSED


def test_hostile_bodies_are_within_the_limit_of_bytes_or_refused_for_it() -> None:
    for body in HOSTILE_BODIES:
        size = len(body.make(random.Random(1)))
        assert size <= MAX_BODY_BYTES or body.statuses == {413}, f"{body.name}: {size}"


def test_the_keys_of_the_honest_and_the_hostile_client_have_limits_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    keys = ApiKeys(file=str(tmp_path / "keys"))
    honest, hostile = (keys.caller(f"Bearer {line.split()[0]}") for line in KEYS.splitlines())
    assert honest is not None and hostile is not None
    assert honest.requests_per_minute == 0 < hostile.requests_per_minute
    assert honest.cache_salt != hostile.cache_salt


def samples(*mebibytes: float) -> list[ProcessSample]:
    """One sample in ten seconds."""
    return [ProcessSample(10.0 * i, int(size * 2**20), 10) for i, size in enumerate(mebibytes)]


def test_memory_is_compared_with_that_after_the_baseline() -> None:
    grown = growth_of("a", samples(*[1] * 6, *[100] * 6, *[130] * 12), baseline_s=60)
    assert grown is not None and grown.ratio == pytest.approx(1.3)
    assert growth_of("a", samples(*[1] * 6, *[100] * 6), baseline_s=60) is None


def test_one_high_sample_is_not_growth() -> None:
    steady = growth_of("a", samples(*[100] * 20, 500, 100, 100, 100), baseline_s=60)
    assert steady is not None and steady.ratio == 1.0


def test_every_gauge_of_a_busy_process_is_named() -> None:
    router = dict.fromkeys(ROUTER_GAUGES, 0)
    assert busy_gauges(router, is_router=True) == []
    assert busy_gauges(router | {"baton:router_assigned_requests": 3}, is_router=True) == [
        "baton:router_assigned_requests=3"
    ]
    instance = {**dict.fromkeys(INSTANCE_GAUGES, 0), "baton:free_blocks": 8, "baton:total_blocks": 8}
    assert busy_gauges(instance, is_router=False) == []
    assert busy_gauges(instance | {"baton:free_blocks": 7}, is_router=False) == ["free blocks 7/8"]
    with pytest.raises(KeyError):
        busy_gauges({}, is_router=True)


def test_some_more_descriptors_are_links_and_many_are_a_leak() -> None:
    assert excess_descriptors({"a": 20, "b": 20}, {"a": 28, "b": 29}) == ["b 29 descriptors, 20 before"]


def test_the_adapter_fits_the_demo_model(tmp_path: Path) -> None:
    written = (write_adapter(tmp_path, DEMO_MODEL) / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(written[:8], "little")
    header = json.loads(written[8 : 8 + length])
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert len(header) == 4 * config["num_hidden_layers"]
    query = header["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert query["shape"] == [config["num_attention_heads"] * config["head_dim"], RANK]
    assert max(one["data_offsets"][1] for one in header.values()) == len(written) - 8 - length
