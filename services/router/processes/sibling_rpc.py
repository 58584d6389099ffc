"""A worker's way to its siblings: it answers what they ask and asks them, over sockets in a folder of their own.

Never on a request's path. A sibling that does not answer in time is left out.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from baton_serve.contracts.same_user import stranger
from baton_serve.services.common.limited_log import LimitedLog
from baton_serve.services.router.quota.usage import UsageWindow, WindowUsage


class ProcessStats(msgspec.Struct, frozen=True, kw_only=True):
    requests_in_flight: int
    generated_tokens: int
    recent: list[tuple[float, msgspec.Raw]]
    """The last requests as JSON, each with the moment of its end on the machine's monotonic clock."""


def newest_requests(stats: Iterable[ProcessStats]) -> list[msgspec.Raw]:
    ended = [one for found in stats for one in found.recent]
    return [request for _, request in sorted(ended, key=lambda one: -one[0])]


def join_metrics(texts: Mapping[int, str]) -> str:
    """`texts` of each worker are as Prometheus reads them. Every sample gets the label `worker`: the counters of a
    process that was started again begin again by themselves, and no sum steps back."""
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
METRICS_TIMEOUT_S = 2.0
"""Without a worker the sums of all shrink, and whoever scrapes them takes that for a restart."""

SiblingQuery = Literal["figures", "metrics", "usage"]


class RouterProcess(msgspec.Struct, frozen=True):
    """`index` of `count`. Only this user can open `folder`."""

    index: int
    count: int
    folder: str

    def socket(self, index: int) -> str:
        return str(Path(self.folder) / f"worker-{index}")

    def registry(self) -> str:
        """Where this worker hosts a registry of its own, which is told all that the common one is."""
        return f"memory://{self.folder}/registry-{self.index}"

    def siblings(self) -> list[int]:
        return [index for index in range(self.count) if index != self.index]


class SiblingRpc:
    """Answers from `start` to `close` with what the functions give. Also a `UsageStore`."""

    def __init__(
        self,
        worker: RouterProcess,
        *,
        stats: Callable[[], ProcessStats],
        metrics: Callable[[], str],
        usage: Callable[[], list[WindowUsage]],
    ) -> None:
        self._worker = worker
        self._log = LimitedLog(logger)
        self._answers: dict[str, Callable[[], object]] = {"figures": stats, "metrics": metrics, "usage": usage}
        self._metrics = metrics
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, self._worker.socket(self._worker.index))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def siblings(self) -> list[ProcessStats]:
        """Of all other workers that answer."""
        answers = await self._query("figures")
        return [msgspec.json.decode(answer, type=ProcessStats) for answer in answers.values()]

    async def metrics(self) -> dict[int, str]:
        """By worker, this one included."""
        answers = await self._query("metrics", METRICS_TIMEOUT_S)
        found = {index: msgspec.json.decode(answer, type=str) for index, answer in answers.items()}
        return dict(sorted((found | {self._worker.index: self._metrics()}).items()))

    async def exchange(self, own: Sequence[WindowUsage]) -> list[WindowUsage]:
        """What the others used in the windows of `own`."""
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
            self._log.warning("a question is refused: the other end is a process of another user (uid %d)", uid)
            writer.close()
            return
        with contextlib.suppress(OSError):
            query = (await reader.readline()).decode().strip()
            if query in self._answers:
                writer.write(msgspec.json.encode(self._answers[query]()))
                await writer.drain()
        writer.close()


async def _query(path: str, query: SiblingQuery, timeout_s: float) -> bytes:
    """Empty: no answer."""
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
