"""Starts probes of transports that are due (`ladder.py` says when), from the consumer's end.

A node runs one probe at a time. Handoffs never wait for it.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence

from baton_serve.kvtransfer.block_memory import BlockMemory
from baton_serve.kvtransfer.consumer.link import ConsumerLink
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import Probed
from baton_serve.kvtransfer.errors import PeerLost
from baton_serve.kvtransfer.ladder import Rung, Verdict
from baton_serve.kvtransfer.probing.memory import KNOWN_EXTENSIONS
from baton_serve.kvtransfer.probing.plan import ProbePlan
from baton_serve.kvtransfer.probing.running import ProbeRunner

logger = logging.getLogger(__name__)

CHECK_S = 0.5
"""Interval in seconds at which ladders are checked for due probes."""


class Prober:
    """Starts probes when they are due, for all connections of one node to producers. If a probe proves that another
    transport is better, it calls `promote`, which opens a connection by it. Use it only on the event loop.
    """

    def __init__(self, context: NodeContext, promote: Callable[[ConsumerLink, Rung], Awaitable[bool]]) -> None:
        self._context = context
        self._promote = promote
        self._runner = ProbeRunner(context.probe_command)
        self._task: asyncio.Task[None] | None = None
        self._next_look = 0.0
        self._number = 0

    def tick(self, now: float, links: Iterable[ConsumerLink]) -> None:
        """Start a probe for the first of `links` whose ladder has one due at the time `now`. Do nothing while another
        probe runs or the process of an earlier one cannot be killed.
        """
        if not self._context.settings.probe or self._task is not None or now < self._next_look:
            return
        self._next_look = now + CHECK_S
        # A driver still holds the process of an earlier probe, and would hold the next one too.
        if self._runner.is_blocked:
            return
        for link in links:
            if link.is_up and link.ladder is not None and not link.is_attaching and (rungs := link.ladder.due(now)):
                self._task = self._context.loop.create_task(self._probe(link, rungs))
                self._task.add_done_callback(self._ended)
                return

    async def close(self) -> None:
        """Cancel a running probe and wait until its process has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._runner.close()

    async def _probe(self, link: ConsumerLink, rungs: Sequence[Rung]) -> None:
        context, ladder = self._context, link.ladder
        assert ladder is not None
        self._number += 1
        number, timeout_s = self._number, context.settings.probe_timeout_s
        try:
            serving = await link.ask_probe(number, rungs, timeout_s)
        except (PeerLost, TimeoutError) as exc:
            logger.info("peer=%s transports were not probed: %s", link.name, exc or "the peer did not answer")
            ladder.postponed(context.clock())
            return
        # The producer is busy with another probe: this says nothing about the transports.
        if serving.reason and serving.outcome == "skipped":
            ladder.postponed(context.clock())
            return
        if serving.reason:
            verdicts = [Verdict(rung, serving.outcome, reason=serving.reason) for rung in rungs]
        else:
            verdicts = await self._fetch(link, number, rungs, (serving.address, serving.seed))
        await self._conclude(link, verdicts)

    async def _fetch(
        self, link: ConsumerLink, number: int, rungs: Sequence[Rung], source: tuple[str, int]
    ) -> list[Verdict]:
        context = self._context
        # The probe process reports the address that it has bound, which may be 0.0.0.0. Use the host by which this node
        # reaches the producer, with the port of the process.
        host, _, _ = link.address.rpartition(":")
        plan = ProbePlan(
            rungs=list(rungs),
            settings=context.settings,
            seed=source[1],
            timeout_s=context.settings.probe_timeout_s,
            device=device_of(context.memory),
            preload=extensions(),
            address=f"{host}:{source[0].rpartition(':')[2]}",
        )
        try:
            return await self._runner.fetch(plan)
        finally:
            link.send(Probed(number))

    async def _conclude(self, link: ConsumerLink, verdicts: Sequence[Verdict]) -> None:
        context, ladder = self._context, link.ladder
        assert ladder is not None
        for verdict in verdicts:
            context.observer.probed(peer=link.name, transport=verdict.rung.transport, outcome=verdict.outcome)
        # Log only what has changed: a barred rung is probed again and again, mostly with the same result.
        before = ladder.why()
        better = ladder.probed(verdicts, context.clock())
        if ladder.why() != before or better is not None:
            results = "; ".join(_described(verdict) for verdict in verdicts)
            logger.info("peer=%s probe: %s; %s", link.name, results, f"moving to {better}" if better else "no change")
        if better is not None and await self._promote(link, better):
            context.observer.switched(peer=link.name, transport=better.transport, change="promoted")

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("probing transports failed", exc_info=error)


def device_of(memory: BlockMemory) -> str:
    """Return torch's name of the device that holds `memory`, such as `cuda:0`, or an empty string for host memory."""
    if memory.host_view is not None:
        return ""
    return str(getattr(memory, "device_tensor").device)  # noqa: B009 - only `DeviceMemory` has this attribute


def extensions() -> list[str]:
    """Return the modules that this process has imported because they make its device known to torch. The process of a
    probe must import them too.
    """
    return [name for name in KNOWN_EXTENSIONS if name in sys.modules]


def _described(verdict: Verdict) -> str:
    if verdict.outcome == "proved":
        return f"{verdict.rung} {verdict.bytes_per_second / 1e9:.1f} GB/s"
    return f"{verdict.rung} {verdict.outcome}{verdict.reason and f' ({verdict.reason})'}"
