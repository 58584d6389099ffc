"""One request through real processes: one trace from router to decode, and its id in every log line about it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.collector import Collector, ReceivedSpan

pytestmark = pytest.mark.slow

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SECRET_WORDS = "zebra quagga okapi"
NEW_TOKENS = 100
"""So many that the first, which comes from prefill, is never the last to reach the router."""


class Traced:
    """The results of a cluster that has ended: spans, log lines, and the answer with its explanation."""

    def __init__(self, spans: list[ReceivedSpan], log: str, answer: dict[str, Any], seconds: float) -> None:
        self.spans = spans
        self.log = log
        self.answer = answer
        self.seconds = seconds
        """The client's own measure of the call."""

    def span(self, name: str) -> ReceivedSpan:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def traced(llama: Path) -> Iterator[Traced]:
    flags = ("--disaggregation-min-tokens", "0", "--log-format", "json", "--log-level", "debug")
    with Collector() as collector:
        with Cluster(llama, args=(*flags, "--otlp-traces-endpoint", collector.url)) as cluster:
            headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "x-request-id": "r-17", "x-baton-explain": "1"}
            body = {"prompt": SECRET_WORDS * 20, "max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
            began = time.monotonic()
            answer = cluster.client.post("/v1/completions", json=body, headers=headers)
            seconds = time.monotonic() - began
            assert answer.status_code == 200, answer.text
            cluster.wait_idle()
            assert cluster.stop() == 0  # what was recorded is sent before a process ends
            log = cluster.log()
        yield Traced(collector.spans, log, answer.json(), seconds)


def test_one_trace_leads_from_the_caller_to_decode(traced: Traced) -> None:
    assert {span.trace_id for span in traced.spans} == {TRACE_ID}
    parents = {span.name: span.parent_id for span in traced.spans}
    top, prefill, decode = traced.span("llm_request"), traced.span("prefill"), traced.span("decode")
    assert parents == {
        "llm_request": CALLER,
        "tokenize": top.span_id,
        "admit": top.span_id,
        "prefill": top.span_id,
        "queue": prefill.span_id,
        "compute": prefill.span_id,
        "lease": prefill.span_id,
        "decode": top.span_id,
        "reserve": decode.span_id,
        "transfer": decode.span_id,
        "write": decode.span_id,
    }
    services = {name: (traced.span(name).service, traced.span(name).instance) for name in ("prefill", "transfer")}
    assert services == {"prefill": ("baton-prefill", "prefill-0"), "transfer": ("baton-decode", "decode-0")}
    assert top.service == "baton-router"
    assert not [span.name for span in traced.spans if span.is_error]


def test_durations_are_those_that_client_and_metrics_see(traced: Traced) -> None:
    top, explained = traced.span("llm_request"), traced.answer["baton"]
    assert 0 < top.seconds <= traced.seconds
    assert top.seconds == pytest.approx(explained["e2e_s"], abs=0.05)
    assert traced.span("tokenize").seconds == pytest.approx(explained["tokenize_s"], abs=1e-4)
    assert traced.span("compute").seconds == pytest.approx(explained["prefill_s"], abs=1e-4)
    assert traced.span("transfer").seconds == pytest.approx(explained["handoff_s"], abs=0.05)
    slack = 0.01  # between the clocks of processes
    for span in traced.spans:
        assert span.seconds >= 0
        assert top.started_at - slack <= span.started_at
        if span.name not in ("lease", "prefill", "decode"):
            assert span.ended_at <= top.ended_at + slack
    assert traced.span("transfer").ended_at <= traced.span("write").started_at + slack


def test_spans_say_what_was_done(traced: Traced) -> None:
    top, transfer = traced.span("llm_request").attributes, traced.span("transfer").attributes
    usage, explained = traced.answer["usage"], traced.answer["baton"]
    assert top["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert top["gen_ai.usage.completion_tokens"] == NEW_TOKENS
    assert top["gen_ai.latency.time_to_first_token"] == explained["ttft_s"]
    times = [float(top[f"gen_ai.latency.time_in_model_{part}"]) for part in ("prefill", "decode", "inference")]
    assert min(times) > 0 and times[2] == pytest.approx(times[0] + times[1])
    assert transfer["baton.transport"] == explained["transport"]
    assert transfer["baton.transferred_bytes"] == explained["transferred_bytes"] > 0


def test_every_log_line_about_a_request_carries_its_id(traced: Traced) -> None:
    about = [event for event in traced.events() if "r-17" in str(event)]
    ended = {(event["logger"], event.get("kind")) for event in about if event["event"] == "request ended"}
    assert ended == {
        ("baton_serve.services.router.requests.request_log", None),
        ("baton_serve.services.instance.traced_role", "prefill"),
        ("baton_serve.services.instance.traced_role", "decode"),
    }
    assert all("r-17" in event["request_id"] for event in about)


def test_no_log_line_and_no_span_holds_the_prompt(traced: Traced) -> None:
    assert len(traced.events()) > 3
    for word in SECRET_WORDS.split():
        assert word not in traced.log
        assert word not in str(traced.spans)
    assert traced.answer["choices"][0]["text"] not in traced.log
