"""The hostile client of `baton-bench chaos`: sends one hostile request after the other with a key of its own.

Each must get a refusal or a right answer in time. Status 500, a refusal without a JSON error, silence and a connection
that stays open are errors, unless the addressed process was killed or frozen at that time.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from baton_serve.bench.chaos.cluster import HOSTILE_KEY, ChaosCluster, ClusterProcess
from baton_serve.bench.chaos.honest import ROUTER_GRACE_S
from baton_serve.bench.chaos.hostile_bodies import HOSTILE_BODIES, HostileBody
from baton_serve.bench.chaos.hostile_connections import HOSTILE_CONNECTIONS, HostileConnection, status_of

ANSWER_TIMEOUT_S = 60.0
"""Longest time for the answer to a hostile body: 10 s of a compiler, frozen processes, and other work on the cores."""
MAX_ERROR_BYTES = 4096
LIMITED = frozenset({429, 503})
"""Statuses with which any request may be refused, if the answer explains it: limits of the key, no instance is up."""


@dataclass
class HostileTally:
    """Counts of hostile requests by class and status; `wrong` has one line for each answer that is an error."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    excused: int = 0
    """Requests without a right answer whose process was killed or frozen at that time."""
    not_connected: int = 0
    """Requests to a process that was starting. One that never listens again fails the test at its end."""
    slowest_s: dict[str, float] = field(default_factory=dict)
    """The longest time until an answer, by class."""


def complaint(status: int, statuses: frozenset[int], content: bytes) -> str:
    """Return what is wrong with the answer to a hostile request, or an empty text."""
    if status not in statuses | LIMITED:
        return f"status {status}: {content[:200]!r}"
    try:
        answer = json.loads(content)
    except ValueError:
        return f"status {status} without JSON: {content[:200]!r}"
    if status == 200:
        return "" if answer.get("choices") else f"status 200 without an answer: {content[:200]!r}"
    error = answer.get("error") or {}
    if len(content) > MAX_ERROR_BYTES:
        return f"status {status} with {len(content)} bytes"
    return "" if error.get("message") and error.get("type") else f"status {status} without a reason: {content[:200]!r}"


class HostileClient:
    """Sends hostile requests to the routers and instances of a cluster, in an order that covers all classes evenly."""

    def __init__(self, client: httpx.AsyncClient, cluster: ChaosCluster, *, seed: int) -> None:
        self._client = client
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.tally = HostileTally()

    async def run(self, until: float, *, per_s: float) -> None:
        """Begin `per_s` requests a second until `until`, then wait for the last ones. Does nothing for a rate of 0."""
        if not per_s:
            return
        next_at, pending = time.monotonic(), list[partial[Coroutine[Any, Any, None]]]()
        while (now := time.monotonic()) < until:
            if now < next_at:
                await asyncio.sleep(next_at - now)
            pending = pending or self._round()
            task = asyncio.create_task(pending.pop()())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            next_at += 1 / per_s
        await asyncio.gather(*self._tasks)

    def _round(self) -> list[partial[Coroutine[Any, Any, None]]]:
        """Return each class once, in random order."""
        calls = [partial(self._send_body, body) for body in HOSTILE_BODIES]
        calls += [partial(self._connect, connection) for connection in HOSTILE_CONNECTIONS]
        self._rng.shuffle(calls)
        return calls

    async def _send_body(self, body: HostileBody) -> None:
        router, began = self._rng.choice(self._cluster.routers), time.monotonic()
        headers = {"content-type": "application/json", **(body.headers or {})}
        if body.has_key:
            headers["authorization"] = f"Bearer {HOSTILE_KEY}"
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._client.post(
                    f"http://127.0.0.1:{router.port}{body.path}", content=body.make(self._rng), headers=headers
                )
        except httpx.ConnectError:
            self.tally.not_connected += 1
        except (httpx.TransportError, TimeoutError) as exc:
            self._count(router, body.name, 0, f"{type(exc).__name__}: {exc}", began)
        else:
            wrong = complaint(answer.status_code, body.statuses, answer.content)
            self._count(router, body.name, answer.status_code, wrong, began)

    async def _connect(self, connection: HostileConnection) -> None:
        process = self._rng.choice(self._cluster.instances if connection.goes_to_instance else self._cluster.routers)
        port = self._rng.choice(process.message_ports) if connection.goes_to_instance else process.port
        began = time.monotonic()
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(connection.within_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                status = status_of(await connection.act(reader, writer))
        except ConnectionRefusedError:
            self.tally.not_connected += 1
        except (OSError, TimeoutError) as exc:
            self._count(process, connection.name, 0, f"{type(exc).__name__}: {exc}", began)
        else:
            wrong = "" if status in connection.statuses else f"status {status}"
            self._count(process, connection.name, status, wrong, began)
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def _count(self, process: ClusterProcess, name: str, status: int, wrong: str, began: float) -> None:
        seconds = time.monotonic() - began
        if wrong and process.disturbed_at > began - ROUTER_GRACE_S:
            self.tally.excused += 1
            return
        self.tally.statuses[name, status] += 1
        self.tally.slowest_s[name] = max(seconds, self.tally.slowest_s.get(name, 0.0))
        if wrong:
            self.tally.wrong.append(f"{process.name}, {name}, after {seconds:.1f} s: {wrong}")
            sys.stderr.write(f"{time.strftime('%X')} hostile: {self.tally.wrong[-1]}\n")
            sys.stderr.flush()
