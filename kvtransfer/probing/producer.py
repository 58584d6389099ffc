"""Runs the producer's end of a probe: one throw-away process at a time, for the consumer that asked first."""

import asyncio
import logging
import secrets

from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import Hello, Probe, Probed, Probing
from baton_serve.kvtransfer.ladder import Rung
from baton_serve.kvtransfer.probing.consumer import device_of, extensions
from baton_serve.kvtransfer.probing.plan import ProbePlan
from baton_serve.kvtransfer.probing.running import REAP_S, ProbeFailedError, ProbeRunner
from baton_serve.kvtransfer.producer.link import ProducerLink

logger = logging.getLogger(__name__)


class ProbeHost:
    """Runs, for one node, the processes that serve known bytes to the probes of consumers. Use it only on the event
    loop.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._runner = ProbeRunner(context.probe_command)
        self._task: asyncio.Task[None] | None = None
        self._for: tuple[int, int] = (0, 0)
        """Link and number of the probe that is being served."""

    def handle(self, link: ProducerLink, message: Probe | Probed) -> None:
        """Start a process that serves bytes when the consumer of `link` sends `Probe`, or end it when it sends
        `Probed`. If a probe runs already, answer that this node is busy.
        """
        if isinstance(message, Probe):
            self._begin(link, message)
        elif self._task is not None and self._for == (link.number, message.number):
            self._task.cancel()

    def lost(self, link: ProducerLink) -> None:
        """End the process that serves the probe of the consumer of `link`, whose connection broke."""
        if self._task is not None and self._for[0] == link.number:
            self._task.cancel()

    async def close(self) -> None:
        """End the process that serves a running probe and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._runner.close()

    def _begin(self, link: ProducerLink, message: Probe) -> None:
        # One probe at a time: two at the same time would measure each other's load.
        if self._task is not None or self._runner.is_blocked:
            link.send(Probing(number=message.number, outcome="skipped", reason="busy with another probe"))
            return
        self._for = (link.number, message.number)
        self._task = self._context.loop.create_task(self._serve(link, message))
        self._task.add_done_callback(self._ended)

    async def _serve(self, link: ProducerLink, message: Probe) -> None:
        context = self._context
        rungs = [rung for rung in message.rungs if can_serve(context, link.hello, rung)]
        if not rungs:
            link.send(
                Probing(
                    number=message.number, outcome="unavailable", reason="the producer has none of these transports"
                )
            )
            return
        seed = secrets.randbits(48)
        plan = ProbePlan(
            rungs=rungs,
            settings=context.settings,
            seed=seed,
            timeout_s=context.settings.probe_timeout_s,
            device=device_of(context.memory),
            preload=extensions(),
        )
        try:
            process, address = await self._runner.serve(plan)
        except ProbeFailedError as exc:
            link.send(Probing(number=message.number, outcome=exc.outcome, reason=f"at the producer: {exc}"))
            return
        try:
            link.send(Probing(number=message.number, address=address, seed=seed))
            await asyncio.sleep(plan.timeout_s + REAP_S)  # `handle` cancels this when the consumer has finished
        finally:
            await self._runner.end(process)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("serving a probe failed", exc_info=error)


def can_serve(context: NodeContext, hello: Hello, rung: Rung) -> bool:
    """Return whether this node has the transport and dialect `rung` and can reach by it the consumer
    that sent `hello`.
    """
    transport = context.transports.get(rung.transport)
    if transport is None or not transport.serves(hello):
        return False
    return not rung.dialect or rung.dialect in transport.dialects
