"""Attaches a transport to one connection: tries them in the order that `ladder.py` decides, until one works."""

import asyncio
import contextlib
import importlib
import logging

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.kvtransfer.consumer.channel import ProducerChannel
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import Attach, Attached, Detach, Offer, Welcome
from baton_serve.kvtransfer.conversion.plan import wire_layout
from baton_serve.kvtransfer.errors import PeerLost, TransportUnavailable
from baton_serve.kvtransfer.ladder import Ladder, Rung
from baton_serve.kvtransfer.transports.port import Converter, Receiver, ReceiveTarget, Stream, Transport

logger = logging.getLogger(__name__)

DEATH_DETECTION_S = 0.25
"""Seconds to wait for a report of the peer's death if no transport could be attached: a dying peer's sockets may break
before the system reports its death.
"""


class TransportAttachment:
    """Chooses and owns the transport that carries the blocks of one connection to a producer: the best one of `ladder`
    that works, or only the transport `only` if it is set. Each attempt to attach a transport gets the next number, its
    epoch, so that late messages of earlier attempts are recognized. The connection (`ConsumerLink`) owns this object.
    Use it only on the event loop.
    """

    def __init__(
        self,
        context: NodeContext,
        channel: ProducerChannel,
        welcome: Welcome,
        ladder: Ladder,
        *,
        parts: int,
        only: Rung | None,
    ) -> None:
        """Attach nothing yet. `channel` carries the messages to the producer, and `welcome` is its answer to `Hello`.
        `parts` is the number of parts in which each block travels. `only` names the single transport to try; None
        allows all of `ladder`.
        """
        self.transport: Transport | None = None
        self.receiver: Receiver | None = None
        self.block_bytes = 0
        """Size of one whole block in bytes, in the layout in which `transport` sends it."""
        self._context = context
        self._channel = channel
        self._welcome = welcome
        self._ladder = ladder
        self._parts = parts
        self._only = only
        self._rung: Rung | None = None
        self._epoch = 0
        self._answers: dict[int, asyncio.Future[Attached]] = {}
        self._attaching: asyncio.Task[None] | None = None

    @property
    def is_attaching(self) -> bool:
        """Return whether an attempt to attach a transport is running."""
        return self._attaching is not None

    def is_ready(self) -> bool:
        """Return whether a transport is attached, so that blocks can be received."""
        return self.receiver is not None and self._attaching is None

    def attached_with(self, epoch: int) -> Transport | None:
        """Return the transport in use if the attempt with the number `epoch` attached it, otherwise None."""
        return self.transport if epoch == self._epoch else None

    def stream(self, epoch: int) -> Stream | None:
        """Return the channel of the transport that the attempt number `epoch` attached. Return None if that transport
        is not in use any more, or has no channel of its own (its bytes come in messages or are copied from memory).
        """
        return self.receiver.stream if self.receiver is not None and epoch == self._epoch else None

    async def attach(self) -> None:
        """Attach the best transport of the ladder that works; if an attempt is running, wait for it. Do nothing if a
        transport is attached. Raises `TransportUnavailable` if none works, and `PeerLost` if the connection breaks.
        """
        if self.receiver is None and self._attaching is None:
            self._attaching = self._context.loop.create_task(self._climb())
        if self._attaching is not None:
            await asyncio.shield(self._attaching)

    def answered(self, message: Attached) -> None:
        """Pass `Attached`, the producer's answer to `Attach`, to the attempt that waits for it. Ignore the answer if
        none does.
        """
        answer = self._answers.get(message.epoch)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def demote(self, name: str, reason: str) -> bool:
        """Stop using the transport `name` for this producer until a probe has proved that it works again; `reason` is
        logged. If this transport is not in use, do nothing and return False.
        """
        if self.transport is None or self.transport.name != name:
            return False
        peer = self._welcome.instance
        logger.warning("peer=%s transport %s demoted: %s", peer, name, reason)
        if self._rung is not None:
            self._ladder.demoted(self._rung, reason, self._context.clock())
        self._context.observer.switched(peer=peer, transport=name, change="demoted")
        # A link that was opened for one rung may use any other one after that rung has failed.
        self._only = None
        receiver, self.receiver, self.transport = self.receiver, None, None
        if receiver is not None:
            receiver.close()
        self._channel.send(Detach(name, self._epoch))
        return True

    def lose(self, error: PeerLost) -> None:
        """Close the receiver because the connection to the producer is lost. Attempts that wait for an answer fail with
        `error`.
        """
        if self.receiver is not None:
            self.receiver.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # marks it as read: asyncio logs exceptions that nobody has read

    async def close(self) -> None:
        """Cancel a running attempt to attach a transport, and wait for its end. Call `lose` before, which closes the
        receiver.
        """
        if self._attaching is not None:
            self._attaching.cancel()
            with contextlib.suppress(asyncio.CancelledError, PeerLost, TransportUnavailable):
                await self._attaching

    async def _climb(self) -> None:
        context, channel, welcome, ladder = self._context, self._channel, self._welcome, self._ladder
        try:
            for rung in ladder.order(context.clock()) if self._only is None else [self._only]:
                try:
                    receiver = await channel.unless_lost(self._attach_by(rung))
                except TransportUnavailable as exc:
                    # Bar this rung and try the next one; the producer may already hold resources for it, so `Detach`
                    # follows.
                    ladder.missing(rung, str(exc), context.clock())
                    channel.send(Detach(rung.transport, self._epoch))
                    continue
                self.receiver, self.transport, self._rung = receiver, context.transports[rung.transport], rung
                if self.transport.buffers:
                    channel.widen(min(welcome.connections, context.settings.zeromq_connections), welcome.secret)
                ladder.attached(rung, context.clock(), self._difference())
                why = "; ".join(ladder.why())
                logger.info("peer=%s transport=%s chosen by %s (%s)", welcome.instance, rung, ladder.choice(), why)
                return
            # If the peer is dying, this raises `PeerLost`, which names the cause better than "no transport".
            await channel.unless_lost(asyncio.sleep(DEATH_DETECTION_S))
            raise TransportUnavailable(f"no transport to {welcome.instance}: {'; '.join(ladder.why())}")
        finally:
            self._attaching = None

    async def _attach_by(self, rung: Rung) -> Receiver:
        context, transport = self._context, self._context.transports[rung.transport]
        wire = wire_layout(self._welcome.layout, context.layout, narrows=transport.narrows)
        offer = await self._ask_for(rung)
        try:
            receiver = await transport.attach(self._welcome, offer, self._target(wire))
        except TransportUnavailable:
            raise
        except Exception as exc:
            logger.exception("transport %s cannot be attached", transport.name)
            raise TransportUnavailable(f"{type(exc).__name__}: {exc}") from exc
        if not self._channel.is_up:  # lost during `attach`: `lose` could not close a receiver that did not exist yet
            receiver.close()
            raise PeerLost(f"the connection to {self._welcome.instance} was lost")
        self.block_bytes = wire.block_bytes
        return receiver

    async def _ask_for(self, rung: Rung) -> Offer:
        """Ask the producer to prepare the transport and dialect of `rung`, and return its offer (address and secret).
        Raises `TransportUnavailable` if the producer refuses or does not answer in time, and `PeerLost` if the
        connection breaks.
        """
        self._epoch += 1
        epoch, timeout_s = self._epoch, self._context.settings.attach_timeout_s
        answer: asyncio.Future[Attached] = self._context.loop.create_future()
        self._answers[epoch] = answer
        dialects = [rung.dialect] if rung.dialect else []
        self._channel.send(Attach(transport=rung.transport, epoch=epoch, dialects=dialects))
        try:
            async with asyncio.timeout(timeout_s):
                attached = await answer
        except TimeoutError as exc:
            raise TransportUnavailable(f"the producer was not ready within {timeout_s:g} s") from exc
        finally:
            del self._answers[epoch]
        if attached.offer is None:
            raise TransportUnavailable(attached.reason)
        return attached.offer

    def _target(self, wire: KVLayout) -> ReceiveTarget:
        context = self._context
        if self._welcome.layout != context.layout:
            return ReceiveTarget(context.memory, _converter(context, wire))
        return ReceiveTarget(context.memory)

    def _difference(self) -> str:
        source, sink = self._welcome.layout, self._context.layout
        if source == sink:
            connections = self._channel.num_connections
            by = f", by {connections} connections" if connections > 1 else ""
            return f"{by}, tails in {self._parts} parts" if self._parts > 1 else by
        ends = [f"{layout.dtype} in blocks of {layout.block_tokens}" for layout in (source, sink)]
        return f", converting {ends[0]} to {ends[1]}"


def _converter(context: NodeContext, wire: KVLayout) -> Converter:
    """Return a converter from `wire`, the layout in which the producer's blocks arrive, to this node's layout. It
    imports torch, which every process with a model has loaded already.
    """
    module = importlib.import_module("baton_serve.kvtransfer.conversion.receivers")
    converter: Converter = module.LayoutConverter(context.staging_buffers, wire, context.layout, context.memory)
    return converter
