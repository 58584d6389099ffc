"""The honest clients of `baton-bench chaos`: they stream, get whole answers, and cancel. All answers are compared."""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import httpx

from baton_serve.bench.chaos.cluster import HONEST_KEY, ChaosCluster, ClusterProcess
from baton_serve.bench.chaos.requests import GatheredAnswer, HonestRequest

STREAM_TIMEOUT_S = 120.0
NO_INSTANCE = '"code":"no_instance"'
"""Error code of a request that was refused before it began, by a router that has seen no instance yet. It is not a
failure: all instances may be starting."""
ROUTER_GRACE_S = 10.0
"""Seconds after a router was killed or resumed in which a broken request is attributed to that router."""
RETRY_DELAY_S = 0.5
MAX_CANCEL_CHUNKS, MAX_CANCEL_S = 60, 3.0
"""A stream is cancelled after at most so many chunks, a whole answer after at most so many seconds."""

Way = Literal["streamed", "whole", "stream cancelled", "whole cancelled"]
WAYS: tuple[Way, ...] = ("streamed",) * 5 + ("whole",) * 2 + ("stream cancelled",) * 2 + ("whole cancelled",)
"""How a request is sent, as often as it stands here."""


@dataclass
class HonestTally:
    """Counts of what happened to honest requests; `differ` and `failed` have one line for each that is an error."""

    ended: Counter[str] = field(default_factory=Counter)
    """Requests that ended as they should, by their way."""
    differ: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    excused: int = 0
    """Requests that ended together with their router."""
    refused: int = 0
    """Requests that a router refused because no instance was up."""
    not_connected: int = 0


class HonestClients:
    """Sends the honest requests to the routers of a cluster, and compares the answers with the undisturbed ones."""

    def __init__(self, client: httpx.AsyncClient, cluster: ChaosCluster, requests: list[HonestRequest]) -> None:
        self._client = client
        self._routers = cluster.routers
        self._requests = requests
        self._expected: list[GatheredAnswer] = []
        self.tally = HonestTally()

    async def learn(self) -> None:
        """Get the undisturbed answers, whole and one at a time, then all of them at once as streams from each router.

        Raises `SystemExit` if a stream differs from the whole answer: then no later comparison would mean anything.
        """
        first = self._routers[0]
        self._expected = [await self._whole(first, request) for request in self._requests]
        for router in self._routers:
            streams = await asyncio.gather(*(self._streamed(router, request) for request in self._requests))
            for request, expected, answer in zip(self._requests, self._expected, streams, strict=True):
                if answer != expected:
                    raise SystemExit(f"baton-bench chaos: {request.name} differs without any disturbance")

    async def run(self, until: float, *, seed: int) -> None:
        """Send random requests in random ways to random routers, one at a time, until `until`."""
        rng = random.Random(seed)
        while time.monotonic() < until:
            router, number, way = rng.choice(self._routers), rng.randrange(len(self._requests)), rng.choice(WAYS)
            began = time.monotonic()
            try:
                answer = await self._ask(router, self._requests[number], way, rng)
            except Exception as exc:  # noqa: BLE001 - httpx raises many types for a dying peer
                self._count_failure(router, f"{self._requests[number].name}, {way}", exc, began)
                await asyncio.sleep(RETRY_DELAY_S)
            else:
                self._compare(router, number, way, answer)

    async def _ask(
        self, router: ClusterProcess, request: HonestRequest, way: Way, rng: random.Random
    ) -> GatheredAnswer | None:
        """Return the answer, a part of it for a cancelled stream, or None for a cancelled whole answer."""
        match way:
            case "streamed":
                return await self._streamed(router, request)
            case "stream cancelled":
                return await self._streamed(router, request, max_chunks=rng.randint(1, MAX_CANCEL_CHUNKS))
            case "whole":
                return await self._whole(router, request)
            case "whole cancelled":
                try:
                    async with asyncio.timeout(rng.uniform(0.0, MAX_CANCEL_S)):
                        return await self._whole(router, request)
                except TimeoutError:
                    return None

    async def _whole(self, router: ClusterProcess, request: HonestRequest) -> GatheredAnswer:
        async with asyncio.timeout(STREAM_TIMEOUT_S):
            answer = await self._client.post(_url(router, request), json=request.body, headers=HEADERS)
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {answer.text[:200]}")
        gathered = GatheredAnswer()
        gathered.add(answer.json()["choices"])
        return gathered

    async def _streamed(
        self, router: ClusterProcess, request: HonestRequest, *, max_chunks: int | None = None
    ) -> GatheredAnswer:
        """Return the answer after at most `max_chunks` chunks. Raises `RuntimeError` for a stream that broke."""
        gathered, num_chunks = GatheredAnswer(), 0
        body = {**request.body, "stream": True}
        async with (
            asyncio.timeout(STREAM_TIMEOUT_S),
            self._client.stream("POST", _url(router, request), json=body, headers=HEADERS) as answer,
        ):
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {(await answer.aread()).decode()[:200]}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]" or num_chunks == max_chunks:
                    return gathered
                if line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise RuntimeError(chunk["error"]["message"])
                    gathered.add(chunk["choices"])
                    num_chunks += 1
        raise RuntimeError("the stream ended without [DONE]")

    def _compare(self, router: ClusterProcess, number: int, way: Way, answer: GatheredAnswer | None) -> None:
        """Count an answer: a cancelled one must be the beginning of the expected one, others must equal it."""
        expected = self._expected[number]
        is_right = answer is None or (answer.begins(expected) if way == "stream cancelled" else answer == expected)
        if is_right:
            self.tally.ended[way] += 1
            return
        assert answer is not None
        line = f"{router.name}, {self._requests[number].name}, {way}: {answer.describe()} of {expected.describe()}"
        self.tally.differ.append(line)
        _log(f"differs: {line}")

    def _count_failure(self, router: ClusterProcess, what: str, exc: Exception, began: float) -> None:
        if isinstance(exc, httpx.ConnectError):
            self.tally.not_connected += 1
        elif NO_INSTANCE in str(exc):
            self.tally.refused += 1
        elif router.disturbed_at > began - ROUTER_GRACE_S:
            self.tally.excused += 1
        else:
            self.tally.failed.append(f"{router.name}, {what}: {type(exc).__name__}: {exc}")
            _log(f"failed: {self.tally.failed[-1]}")


HEADERS = {"authorization": f"Bearer {HONEST_KEY}"}


def _url(router: ClusterProcess, request: HonestRequest) -> str:
    return f"http://127.0.0.1:{router.port}{request.path}"


def _log(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%X')} {line}\n")
    sys.stderr.flush()
