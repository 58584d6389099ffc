"""Outcomes that load senders parse from the pieces of a streamed answer."""

import json

from baton_serve.bench.router.senders import LoadTarget, StreamRecord, read_stream, request_bytes
from baton_serve.bench.serving.workload import BenchRequest


def event(**values: object) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


TOKEN = event(choices=[{"text": "a"}])
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


def test_gaps_between_tokens_are_those_of_their_last_bytes() -> None:
    half = len(TOKEN) // 2
    pieces = [
        (1.5, chunked(TOKEN)),
        (2.0, chunked(TOKEN + TOKEN[:half])[: -2 - half]),
        (2.5, TOKEN[:half]),
        (3.0, TOKEN[half:] + b"\r\n"),
        (3.5, chunked(USAGE) + chunked(DONE)),
    ]
    found = read_stream(StreamRecord(1.0, pieces))
    assert (found.ttft_s, found.itls_s, found.latency_s) == (0.5, [0.5, 1.0], 2.0)
    assert (found.prompt_tokens, found.output_tokens, found.error) == (7, 3, None)


def test_the_slo_is_sent_with_each_request() -> None:
    request = BenchRequest(0.0, [1, 2], 3)
    plain, with_slo = LoadTarget("http://localhost:1", "m", 1.0), LoadTarget("http://localhost:1", "m", 1.0, 12.5)
    assert b"x-baton-itl-ms: 12.5\r\n" in request_bytes(request, with_slo).split(b"\r\n\r\n")[0] + b"\r\n"
    assert b"x-baton-itl-ms" not in request_bytes(request, plain)
    assert b"x-baton-ttft-ms: 900\r\n" in request_bytes(
        request, LoadTarget("http://localhost:1", "m", 1.0, 12.0, 900.0)
    )


def test_a_stream_without_its_end_has_failed() -> None:
    assert read_stream(StreamRecord(1.0, [(1.5, chunked(TOKEN))])).error == "the stream broke off"
    assert read_stream(StreamRecord(1.0, [(1.5, event(error="no")), (2.0, DONE)])).error == "no"
    assert read_stream(StreamRecord(1.0, [], "refused")).error == "refused"
