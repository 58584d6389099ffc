"""Query the other processes of one router (`--workers`) for /health, /metrics, /recent and key limits, over Unix
sockets.

With them each process can answer for the whole router: /health, /metrics, /recent and the limits of API keys add up
the numbers of all processes. Only requests for these three endpoints wait for a query. A process that does not answer
in time is left out of the sum.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from baton_serve.contracts.same_user import stranger
from baton_serve.services.common.logs import LimitedLog
from baton_serve.services.router.quota.usage_limits import UsageWindow, WindowUsage
from baton_serve.services.router.requests.handoff_counts import HandoffStats


class ProcessStats(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the counters and the recent requests of one router process."""

    requests_in_flight: int
    generated_tokens: int
    handoffs: dict[str, HandoffStats] = {}
    """The KV handoffs of the last minute by name of the model."""
    recent: list[tuple[float, str, msgspec.Raw]]
    """The last requests as JSON, each with the time of its end in seconds and the name of its caller. The monotonic
    clock is the machine's, so that times of different processes can be compared."""


def newest_requests(stats: Iterable[ProcessStats], caller: str) -> list[msgspec.Raw]:
    """Return the recent requests of one caller in all router processes, each as JSON, the one that ended last first."""
    # Ids and times of a request would show the owner of another key when and how much its owner computes.
    ended = [(at, request) for found in stats for at, name, request in found.recent if name == caller]
    return [request for _, request in sorted(ended, key=lambda one: -one[0])]


def join_metrics(texts: Mapping[int, str]) -> str:
    """Join the metrics of all router processes to one text. `texts` holds each process's metrics in Prometheus' text
    format, by the index of the process.

    Every sample gets the label `worker`. Sums over processes are left to Prometheus: if one process restarts, a sum
    would drop, and Prometheus would take that for a reset of the counters of all processes.
    """
    # Prometheus wants all samples of a metric in one group under a single HELP and TYPE line, so texts cannot simply be
    # appended to each other.
    families: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], [])
            if not line.startswith("#"):
                family.append(_labelled(line, worker))
            elif line not in family:
                family.append(line)
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _labelled(sample: str, worker: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{worker="{worker}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'


logger = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 0.5
"""Longest time to wait for the answer of a process to any other query."""
METRICS_TIMEOUT_S = 2.0
"""Longest time to wait for the metrics of a process. It is longer than for other queries: if the samples of a process
were missing in one scrape, sums over all processes would drop, and Prometheus would take that for a restart."""

SiblingQuery = Literal["stats", "metrics", "usage"]


class RouterProcess(msgspec.Struct, frozen=True):
    """Identifies one process of a router that has several, and names the Unix sockets by which they communicate."""

    index: int
    """Number of this process, from 0."""
    count: int
    """Number of router processes."""
    folder: str
    """Folder of their sockets. Only the user who runs the router can open it; the supervisor removes it."""

    def socket(self, index: int) -> str:
        """Return the path of the Unix socket at which the process `index` answers queries of the others."""
        return str(Path(self.folder) / f"worker-{index}")

    def registry(self) -> str:
        """Return the URL of the registry that this process hosts for itself. `RegistryRelay` sends the instances'
        records to it.
        """
        return f"memory://{self.folder}/registry-{self.index}"

    def siblings(self) -> list[int]:
        """Return the indexes of all other processes of the router."""
        return [index for index in range(self.count) if index != self.index]


class SiblingRpc:
    """Connects the processes of one router by Unix sockets.

    Between `start` and `close` it answers queries for this process's counters, metrics and key usage, and it queries
    those of the other processes. Implements `UsageStore`. Runs on the event loop.
    """

    def __init__(
        self,
        worker: RouterProcess,
        *,
        stats: Callable[[], ProcessStats],
        metrics: Callable[[], str],
        usage: Callable[[], list[WindowUsage]],
    ) -> None:
        """Create the connection of the process `worker` without starting it. `stats`, `metrics` and `usage` return the
        values of this process; each is called for every query.
        """
        self._worker = worker
        self._log = LimitedLog(logger)
        self._answers: dict[str, Callable[[], object]] = {"stats": stats, "metrics": metrics, "usage": usage}
        self._metrics = metrics
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Start to answer the queries of the router's other processes."""
        self._server = await asyncio.start_unix_server(self._answer, self._worker.socket(self._worker.index))

    async def close(self) -> None:
        """Stop answering queries. This process can still query the others."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def siblings(self) -> list[ProcessStats]:
        """Return the counters and recent requests of all other processes that answer in time."""
        answers = await self._query("stats")
        return [msgspec.json.decode(answer, type=ProcessStats) for answer in answers.values()]

    async def metrics(self) -> dict[int, str]:
        """Return the metrics of this process and of all others that answer in time, as Prometheus' text by index of the
        process.
        """
        answers = await self._query("metrics", METRICS_TIMEOUT_S)
        found = {index: msgspec.json.decode(answer, type=str) for index, answer in answers.items()}
        return dict(sorted((found | {self._worker.index: self._metrics()}).items()))

    async def exchange(self, own: Sequence[WindowUsage]) -> list[WindowUsage]:
        """Return how much the callers have used in all other processes together, for each window of `own` and in the
        same order.
        """
        requests: dict[UsageWindow, int] = {}
        tokens: dict[UsageWindow, int] = {}
        for answer in (await self._query("usage")).values():
            for used in msgspec.json.decode(answer, type=list[WindowUsage]):
                requests[used.window] = requests.get(used.window, 0) + used.requests
                tokens[used.window] = tokens.get(used.window, 0) + used.tokens
        return [WindowUsage(one.window, requests.get(one.window, 0), tokens.get(one.window, 0)) for one in own]

    async def _query(self, query: SiblingQuery, timeout_s: float = QUERY_TIMEOUT_S) -> dict[int, bytes]:
        siblings = self._worker.siblings()
        answers = await asyncio.gather(*(_query(self._worker.socket(index), query, timeout_s) for index in siblings))
        return {index: answer for index, answer in zip(siblings, answers, strict=True) if answer}

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (uid := stranger(writer.get_extra_info("socket"))) is not None:
            self._log.warning("query of another process refused: it runs as another user (uid %d)", uid)
            writer.close()
            return
        # The query is one line with a name; the answer is JSON up to the end of the connection. An unknown name gets an
        # empty answer, which the other end takes for none.
        with contextlib.suppress(OSError):
            query = (await reader.readline()).decode().strip()
            if query in self._answers:
                writer.write(msgspec.json.encode(self._answers[query]()))
                await writer.drain()
        writer.close()


async def is_hung(path: str, timeout_s: float) -> bool:
    """Return whether the process at the socket `path` accepts a query but does not answer it within `timeout_s`
    seconds.

    A process that has closed its socket, because it ends, is not hung.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"stats\n")
                await reader.read()
            finally:
                writer.close()
    # The queue of connections is full: nobody accepts them.
    except (TimeoutError, BlockingIOError):
        return True
    except OSError:
        return False
    return False


async def _query(path: str, query: SiblingQuery, timeout_s: float) -> bytes:
    """Send a query to the process at the socket `path` and return its answer as JSON, or empty bytes if it does not
    answer within `timeout_s` seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(f"{query}\n".encode())
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
