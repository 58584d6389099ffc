"""Send one load from several processes together, so that the client's own CPU time does not distort the measurement."""

import asyncio
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from baton_serve.bench.router.http_load import HttpError, LoadConnection, post
from baton_serve.bench.serving.load_client import RequestOutcome
from baton_serve.bench.serving.workload import BenchRequest

START_DELAY_S = 3.0
"""Seconds from the call to the first request, in which the processes start."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The server and the SLOs of every request: `itl_ms` between tokens, `ttft_ms` until the first one; 0 for none."""

    url: str
    model: str
    timeout_s: float
    itl_ms: float = 0.0
    ttft_ms: float = 0.0


def send_all(requests: list[BenchRequest], target: LoadTarget, *, processes: int) -> list[RequestOutcome]:
    """Send all requests at their times and return the outcomes in the order of `requests`. A request that takes longer
    than `target.timeout_s` counts as failed."""
    # Wall-clock time, because the monotonic clocks of processes need not agree.
    start = time.time() + START_DELAY_S
    parts = [list(range(first, len(requests), processes)) for first in range(min(processes, len(requests)))]
    outcomes: dict[int, RequestOutcome] = {}
    with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_send, [requests[n] for n in part], target, start) for part in parts]
        for part, future in zip(parts, futures, strict=True):
            outcomes |= dict(zip(part, future.result(), strict=True))
    return [outcomes[number] for number in range(len(requests))]


def _send(requests: list[BenchRequest], target: LoadTarget, start: float) -> list[RequestOutcome]:
    """Run in a sending process: encode the requests, wait for the common start, send."""
    bodies = [request_bytes(request, target) for request in requests]
    time.sleep(max(0.0, start - time.time()))
    seen = asyncio.run(_drive(requests, bodies, target))
    return [read_stream(each) for each in seen]


@dataclass(slots=True)
class StreamRecord:
    """Raw pieces of one answer with their arrival times. They are parsed after all requests have ended, so that
    parsing one answer never delays the time stamps of another."""

    started: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


async def _drive(requests: list[BenchRequest], bodies: list[bytes], target: LoadTarget) -> list[StreamRecord]:
    port = urlsplit(target.url).port or 80
    idle: list[LoadConnection] = []
    begun = time.perf_counter()

    async def one(request: BenchRequest, body: bytes) -> StreamRecord:
        await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - begun)))
        seen = StreamRecord(time.perf_counter())
        try:
            async with asyncio.timeout(target.timeout_s):
                connection = idle.pop() if idle else await LoadConnection.open(port)
                await connection.ask(body, lambda data, at: seen.pieces.append((at, data)))
            idle.append(connection)
        except (HttpError, OSError, TimeoutError) as exc:
            seen.error = repr(exc)
        return seen

    found = await asyncio.gather(*map(one, requests, bodies))
    for connection in idle:
        connection.close()
    return found


def request_bytes(request: BenchRequest, target: LoadTarget) -> bytes:
    """Return head and body of a request."""
    body = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    headers = "x-baton-explain: 1\r\n" + (f"x-baton-itl-ms: {target.itl_ms:g}\r\n" if target.itl_ms else "")
    headers += f"x-baton-ttft-ms: {target.ttft_ms:g}\r\n" if target.ttft_ms else ""
    return post("/v1/completions", json.dumps(body).encode(), headers=headers)


def read_stream(seen: StreamRecord) -> RequestOutcome:
    """Parse a recorded stream. Each event with text counts as the arrival of one token, at the time of its last byte.
    A stream that contains an error or has no end counts as failed."""
    outcome = RequestOutcome(error=seen.error)
    last, rest, has_ended = seen.started, b"", False
    for at, data in seen.pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                has_ended = True
                continue
            event = json.loads(line[6:])
            _read_metadata(event, outcome)
            if not event.get("choices"):
                continue
            if outcome.ttft_s == 0.0:
                outcome.ttft_s = at - seen.started
            else:
                outcome.itls_s.append(at - last)
            last = at
    outcome.latency_s = last - seen.started
    if outcome.error is None and not has_ended:
        outcome.error = "the stream broke off"
    return outcome


def _read_metadata(event: dict[str, Any], outcome: RequestOutcome) -> None:
    """Copy usage, Baton's explanation and errors of an event to the outcome."""
    if usage := event.get("usage"):
        outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if isinstance(baton := event.get("baton"), dict):
        outcome.to_step_s, outcome.held_s = baton.get("handoff_to_step_s"), baton.get("held_s", 0.0)
        outcome.decision = baton.get("decision", "")
    if "error" in event:
        outcome.error = str(event["error"])
