"""The consumer's connection to one producer: handshake, choice of a transport, and liveness. A broken connection is
replaced, never repaired.
"""

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import zmq

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.wire import WireError, encode
from baton_serve.kvtransfer.consumer.copying import BufferedParcel
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.conversion.plan import wire_layout
from baton_serve.kvtransfer.errors import PeerLost, Refused, TransportUnavailable
from baton_serve.kvtransfer.frames import (
    PROTOCOL,
    Attach,
    Attached,
    Detach,
    Detached,
    Got,
    Hello,
    Join,
    Offer,
    Probe,
    Probing,
    Refuse,
    ToConsumer,
    ToProducer,
    Welcome,
    consumer_decoder,
    peer_of,
)
from baton_serve.kvtransfer.ladder import Ladder, Rung
from baton_serve.kvtransfer.liveness import ProcessWatch, watch_process
from baton_serve.kvtransfer.sockets import LINGER_MS, MonitoredSocket, configure, encrypt
from baton_serve.kvtransfer.transports.port import Converter, Receiver, ReceiveTarget, Stream, Transport

EMA_WEIGHT = 0.3
"""Weight of a new sample in the moving average."""
MIN_SAMPLE_BYTES = 1 << 20
"""Bytes from which a sample measures throughput rather than latency. A smaller sample counts only until one of this
size exists.
"""


class ThroughputMeter:
    """Measures the throughput of one consumer connection, `bytes_per_second`; 0 until the first sample.

    A sample runs from the first announced byte until no byte is outstanding.
    """

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._outstanding = 0
        self._delivered = 0
        self._busy_since = 0.0
        self._best_sample = 0

    def announced(self, num_bytes: int, now: float) -> None:
        """Count bytes that the producer has announced and that are wanted here."""
        # Time in which nothing was outstanding is not transfer time: a new sample starts.
        if self._outstanding == 0:
            self._busy_since, self._delivered = now, 0
        self._outstanding += num_bytes

    def delivered(self, num_bytes: int, now: float) -> None:
        """Count announced bytes as arrived or given up: they are not outstanding any more."""
        self._delivered += num_bytes
        self._outstanding -= num_bytes
        seconds = now - self._busy_since
        if self._outstanding > 0 or seconds <= 0 or self._delivered < min(self._best_sample, MIN_SAMPLE_BYTES):
            return
        # The first large sample replaces the average of small ones, which measured latency.
        rate = self._delivered / seconds
        is_first_of_size = self._best_sample < MIN_SAMPLE_BYTES
        self.bytes_per_second += (rate - self.bytes_per_second) * (1.0 if is_first_of_size else EMA_WEIGHT)
        self._best_sample = max(self._best_sample, self._delivered)


logger = logging.getLogger(__name__)

T = TypeVar("T")
DEATH_DETECTION_S = 0.25
"""Seconds to wait for news of the peer's death before no transport counts as working: a dying peer's sockets may break
before the system reports its death.
"""


class ConsumerLink:
    """One connection to a producer. Call `open` once; then `receiver` belongs to the best transport that works, or to
    `only`.

    It owns its sockets, its receiver and the watch on the peer's process. `Connections` owns it. Event loop only.
    """

    def __init__(
        self,
        context: NodeContext,
        address: str,
        *,
        on_message: Callable[["ConsumerLink", ToConsumer, list[zmq.Frame]], None],
        on_lost: Callable[["ConsumerLink", str, bool], None],
        on_broken: Callable[["ConsumerLink", str, str], None],
        only: Rung | None = None,
    ) -> None:
        self.address = address
        self.peer: tuple[InstanceId, Generation] | None = None
        self.layout = context.layout
        """The producer's layout; this node's until `Welcome` has arrived."""
        self.parts = 1
        self.block_bytes = 0
        """Bytes of a whole block as it travels by `transport`."""
        self.transport: Transport | None = None
        self.receiver: Receiver | None = None
        self.ladder: Ladder | None = None
        """The ladder of this pair of processes; None until the producer has answered."""
        self.is_up = True
        self.receipts: dict[int, BufferedParcel] = {}
        """Parcels whose bytes are arriving in `Bytes` messages, by number."""
        self.meter = ThroughputMeter()
        self._context = context
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._only = only
        self._rung: Rung | None = None
        self._epoch = 0
        self._credit = 0
        self._probing: asyncio.Future[Probing] | None = None
        self._answers: dict[int, asyncio.Future[Attached]] = {}
        self._welcome: asyncio.Future[Welcome] = context.loop.create_future()
        self._attaching: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[None] = context.loop.create_future()
        self._watch: ProcessWatch | None = None
        self._socket = self._connected()
        self._joined: list[MonitoredSocket] = []
        """Further connections, which carry bytes of blocks only. If one of them breaks, the whole link is lost."""

    async def open(self, timeout_s: float) -> None:
        """Connect, greet the producer and attach a transport. Raises `PeerLost`, `Refused` or
        `TransportUnavailable`.
        """
        context = self._context
        self.send(
            Hello(
                protocol=PROTOCOL,
                instance=context.instance,
                generation=context.generation,
                layout=context.layout,
                host=context.host,
                transports=list(context.transports),
                connections=context.settings.zeromq_connections,
            )
        )
        try:
            # Not `asyncio.wait_for`, which may swallow a cancellation that comes at the same time as the result.
            async with asyncio.timeout(timeout_s):
                welcome = await asyncio.shield(self._welcome)
        except TimeoutError as exc:
            self.lose("no answer to hello")
            raise PeerLost(f"{self.address} did not answer within {timeout_s:g} s") from exc
        self.peer, self.layout, self.parts = peer_of(welcome), welcome.layout, welcome.parts
        if self.layout != context.layout or context.memory.block_bytes % self.parts:
            self.parts = 1  # parts of a converted block would mean nothing here
        self.ladder = context.ladders.of(self.address, welcome)
        # A pidfd reports the death of a process on this host at once, long before a heartbeat is missed.
        self._watch = watch_process(welcome.host, context.host, lambda: self.lose("its process ended", dead=True))
        await self.attach()

    @property
    def name(self) -> InstanceId:
        """Return the id of the producer's instance, or its address until the id is known."""
        return self.peer[0] if self.peer is not None else InstanceId(self.address)

    @property
    def is_attaching(self) -> bool:
        """Return whether a transport is being attached."""
        return self._attaching is not None

    def is_ready(self) -> bool:
        """Return whether a fetch can start now."""
        return self.is_up and self.receiver is not None and self._attaching is None

    async def ask_probe(self, number: int, rungs: Sequence[Rung], timeout_s: float) -> Probing:
        """Ask the producer to start a probe process, and return its answer. Raises `PeerLost`, or TimeoutError after
        twice `timeout_s`.
        """
        self._probing = self._context.loop.create_future()
        self.send(Probe(number, list(rungs)))
        async with asyncio.timeout(2 * timeout_s):
            # An answer to an earlier probe may come late: ignore it.
            while (answer := await self._unless_lost(_result_of(self._probing))).number != number:
                self._probing = self._context.loop.create_future()
            return answer

    async def attach(self) -> None:
        """Attach the best transport that is left, or wait for a running attempt. Raises `TransportUnavailable` or
        `PeerLost`.
        """
        if self.receiver is None and self._attaching is None:
            self._attaching = self._context.loop.create_task(self._climb())
        if self._attaching is not None:
            await asyncio.shield(self._attaching)

    def demote(self, name: str, reason: str) -> bool:
        """Stop using this transport until a probe has proved it again. Return False if it is not the one in use."""
        if self.transport is None or self.transport.name != name:
            return False
        logger.warning("peer=%s transport %s demoted: %s", self.name, name, reason)
        if self.ladder is not None and self._rung is not None:
            self.ladder.demoted(self._rung, reason, self._context.clock())
        self._context.observer.switched(peer=self.name, transport=name, change="demoted")
        # A link that was opened for one rung may use any other one after that rung has failed.
        self._only = None
        receiver, self.receiver, self.transport = self.receiver, None, None
        if receiver is not None:
            receiver.close()
        self.send(Detach(name, self._epoch))
        return True

    def stream(self, epoch: int) -> Stream | None:
        """Return the channel that carries the bytes of this epoch's announcements, or None if that attachment was given
        up.
        """
        return self.receiver.stream if self.receiver is not None and epoch == self._epoch else None

    def is_same_host(self) -> bool:
        """Return whether the producer runs under the same kernel."""
        return self._welcome.done() and self._welcome.result().host.boot_id == self._context.host.boot_id

    def is_dead(self) -> bool:
        """Return whether the producer's process is known to have ended."""
        return self._watch is not None and self._watch.is_dead()

    def send(self, message: ToProducer) -> None:
        """Send a message to the producer. If that fails, the connection is lost on the next turn of the loop."""
        if not self.is_up:
            return
        try:
            self._socket.send([encode(message)])
        except zmq.ZMQError as exc:
            logger.info("%s connection lost on send: %s", self.address, exc)
            # The caller may be in the middle of a step of a session: `lose` would enter the session again.
            self._context.loop.call_soon(self.lose, "connection lost")

    def credit(self, num_bytes: int) -> None:
        """Return credit to the producer, once for all bytes that this turn of the loop takes out of the connection."""
        if num_bytes and not self._credit:
            self._context.loop.call_soon(self._give_credit)
        self._credit += num_bytes

    def lose(self, reason: str, *, dead: bool = False, linger_ms: int = 0) -> None:
        """Close the connection after a failure: fail all pending answers with `PeerLost`, then call `on_lost`. Further
        calls do nothing.
        """
        if not self.is_up:
            return
        self.is_up = False
        self._gone.set_result(None)
        for joined in self._joined:
            joined.close()
        self._socket.close(linger_ms=linger_ms)
        dead = dead or self.is_dead()
        if self._watch is not None:
            self._watch.close()
        if self.receiver is not None:
            self.receiver.close()
        waiting: list[asyncio.Future[Any]] = [self._welcome, *self._answers.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(PeerLost(f"{self.address}: {reason}"))
                answer.exception()  # marks it as read: asyncio logs exceptions that nobody has read
        self._on_lost(self, reason, dead)

    async def close(self) -> None:
        """Close the connection and cancel an attachment that runs."""
        self.lose("closed", linger_ms=LINGER_MS)
        if self._attaching is not None:
            self._attaching.cancel()
            with contextlib.suppress(asyncio.CancelledError, PeerLost, TransportUnavailable):
                await self._attaching

    async def _climb(self) -> None:
        context, welcome, ladder = self._context, self._welcome.result(), self.ladder
        assert ladder is not None
        try:
            for rung in ladder.order(context.clock()) if self._only is None else [self._only]:
                try:
                    receiver = await self._unless_lost(self._attach_by(rung, welcome))
                except TransportUnavailable as exc:
                    # Bar this rung and try the next one; the producer may already hold resources for it, so `Detach`
                    # follows.
                    ladder.missing(rung, str(exc), context.clock())
                    self.send(Detach(rung.transport, self._epoch))
                    continue
                self.receiver, self.transport, self._rung = receiver, context.transports[rung.transport], rung
                if self.transport.buffers:
                    self._widen(welcome)
                ladder.attached(rung, context.clock(), self._difference())
                why = "; ".join(ladder.why())
                logger.info("peer=%s transport=%s chosen by %s (%s)", self.name, rung, ladder.choice(), why)
                return
            # If the peer is dying, this raises `PeerLost`, which names the cause better than "no transport".
            await self._unless_lost(asyncio.sleep(DEATH_DETECTION_S))
            raise TransportUnavailable(f"no transport to {welcome.instance}: {'; '.join(ladder.why())}")
        finally:
            self._attaching = None

    def _connected(self) -> MonitoredSocket:
        socket, settings = self._context.zmq.socket(zmq.DEALER), self._context.settings
        configure(socket, settings)
        encrypt(socket, settings, listens=False)
        socket.connect(self.address)
        return MonitoredSocket(socket, on_message=self._receive, on_down=self._on_down)

    def _widen(self, welcome: Welcome) -> None:
        """Open the further connections that both ends allow. The producer uses each of them once it has joined."""
        allowed = min(welcome.connections, self._context.settings.zeromq_connections)
        for _ in range(allowed - 1 - len(self._joined)):
            joined = self._connected()
            self._joined.append(joined)
            joined.send([encode(Join(welcome.secret))])

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, or raise `PeerLost` as soon as the connection is lost. `work` is
        cancelled then.
        """
        task = self._context.loop.create_task(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                # Wait until it has been cancelled: it must not touch the link after `lose`.
                await asyncio.wait({task})
        if task.cancelled():
            raise PeerLost(f"{self.address}: connection lost")
        return task.result()

    async def _attach_by(self, rung: Rung, welcome: Welcome) -> Receiver:
        context, transport = self._context, self._context.transports[rung.transport]
        wire = wire_layout(self.layout, context.layout, narrows=transport.narrows)
        offer = await self._ask_for(rung)
        try:
            receiver = await transport.attach(welcome, offer, self._target(wire))
        except TransportUnavailable:
            raise
        except Exception as exc:
            logger.exception("transport %s cannot be attached", transport.name)
            raise TransportUnavailable(f"{type(exc).__name__}: {exc}") from exc
        if not self.is_up:  # lost during `attach`: `lose` could not close a receiver that did not exist yet
            receiver.close()
            raise PeerLost(f"{self.address}: connection lost")
        self.block_bytes = wire.block_bytes
        return receiver

    def _target(self, wire: KVLayout) -> ReceiveTarget:
        context = self._context
        if self.layout != context.layout:
            return ReceiveTarget(context.memory, _converter(context, wire))
        return ReceiveTarget(context.memory)

    def _give_credit(self) -> None:
        num_bytes, self._credit = self._credit, 0
        self.send(Got(num_bytes))

    def _difference(self) -> str:
        source, sink = self.layout, self._context.layout
        if source == sink:
            by = f", by {len(self._joined) + 1} connections" if self._joined else ""
            return f"{by}, tails in {self.parts} parts" if self.parts > 1 else by
        ends = [f"{layout.dtype} in blocks of {layout.block_tokens}" for layout in (source, sink)]
        return f", converting {ends[0]} to {ends[1]}"

    async def _ask_for(self, rung: Rung) -> Offer:
        """Ask the producer to prepare a transport, and return its offer. Each attachment has an epoch of its own.
        Raises `TransportUnavailable` or `PeerLost`.
        """
        self._epoch += 1
        epoch, timeout_s = self._epoch, self._context.settings.attach_timeout_s
        answer: asyncio.Future[Attached] = self._context.loop.create_future()
        self._answers[epoch] = answer
        dialects = [rung.dialect] if rung.dialect else []
        self.send(Attach(transport=rung.transport, epoch=epoch, dialects=dialects))
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

    def _on_down(self, _: int) -> None:
        # Messages that arrived before the end may complete fetches: handle them first.
        for socket in (self._socket, *self._joined):
            socket.drain()
        self.lose("connection lost")

    def _receive(self, frames: list[zmq.Frame]) -> None:
        try:
            message = consumer_decoder.decode(frames[0].buffer)
        except WireError as exc:
            logger.warning("undecodable message of %s: %s", self.address, exc)
            self.lose("it sent an undecodable message")
            return
        if isinstance(message, Refuse):
            if not self._welcome.done():
                self._welcome.set_exception(Refused(message.reason))
                self._welcome.exception()
            self.lose(message.reason)
        elif isinstance(message, Welcome | Attached | Probing):
            self._answered(message)
        elif isinstance(message, Detached):
            # A late `Detached` of an earlier attachment must not end this one.
            if message.epoch == self._epoch and self.transport is not None:
                self._on_broken(self, self.transport.name, message.reason)
        else:
            self._on_message(self, message, frames[1:])

    def _answered(self, message: Welcome | Attached | Probing) -> None:
        match message:
            case Welcome():
                _resolve(self._welcome, message)
            case Attached():
                _resolve(self._answers.get(message.epoch), message)
            case Probing():
                _resolve(self._probing, message)


def _converter(context: NodeContext, wire: KVLayout) -> Converter:
    """Return a converter from the producer's layout. It imports torch, which every process with a model has loaded
    already.
    """
    module = importlib.import_module("baton_serve.kvtransfer.conversion.receivers")
    converter: Converter = module.LayoutConverter(context.staging_buffers, wire, context.layout, context.memory)
    return converter


def _resolve(future: "asyncio.Future[T] | None", value: T) -> None:
    """Set the result of a future. Answers that nothing waits for, or that come twice, are ignored."""
    if future is not None and not future.done():
        future.set_result(value)


async def _result_of(future: "asyncio.Future[T]") -> T:
    return await future
