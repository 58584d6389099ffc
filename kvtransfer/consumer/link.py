"""Connects to one producer: handshake, answers, throughput and liveness."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.wire import WireError
from baton_serve.kvtransfer.consumer.attachment import TransportAttachment
from baton_serve.kvtransfer.consumer.channel import ProducerChannel
from baton_serve.kvtransfer.consumer.copy_jobs import BufferedParcel
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import (
    PROTOCOL,
    Attached,
    Detached,
    Hello,
    Probe,
    Probing,
    Refuse,
    ToConsumer,
    ToProducer,
    Welcome,
    consumer_decoder,
    peer_of,
)
from baton_serve.kvtransfer.errors import PeerLost, Refused
from baton_serve.kvtransfer.ladder import Ladder, Rung
from baton_serve.kvtransfer.liveness import ProcessWatch, watch_process
from baton_serve.kvtransfer.monitored_socket import LINGER_MS
from baton_serve.kvtransfer.transports.port import Receiver, Stream, Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

EMA_WEIGHT = 0.3
"""Weight of a new sample in the moving average."""
MIN_SAMPLE_BYTES = 1 << 20
"""Bytes from which a sample measures throughput rather than latency. A smaller sample counts only until one of this
size exists.
"""


class ThroughputMeter:
    """Measures the throughput of one connection from a producer. `bytes_per_second` is a moving average; 0 until the
    first measurement has ended. A measurement begins with the first announced byte and ends when all announced bytes
    have arrived or were given up.
    """

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._outstanding = 0
        self._delivered = 0
        self._busy_since = 0.0
        self._best_sample = 0

    def announced(self, num_bytes: int, now: float) -> None:
        """Count `num_bytes` that the producer has announced and that this node will receive. `now` is in seconds."""
        # Time in which nothing was outstanding is not transfer time: a new sample starts.
        if self._outstanding == 0:
            self._busy_since, self._delivered = now, 0
        self._outstanding += num_bytes

    def delivered(self, num_bytes: int, now: float) -> None:
        """Count `num_bytes` of the announced bytes that have arrived or were given up. `now` is in seconds."""
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


class ConsumerLink:
    """One connection from this node to a producer. Call `open` once; then blocks arrive by the best transport that
    works, or by the transport `only` if it is set. It owns the sockets, the attached transport and the watch on the
    producer's process; `Connections` owns it. Use it only on the event loop.
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
        self.ladder: Ladder | None = None
        """The ladder of this pair of processes; None until the producer has answered."""
        self.receipts: dict[int, BufferedParcel] = {}
        """Parcels whose bytes are arriving in `Bytes` messages, by number."""
        self.meter = ThroughputMeter()
        self._context = context
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._only = only
        self._probing: asyncio.Future[Probing] | None = None
        self._welcome: asyncio.Future[Welcome] = context.loop.create_future()
        self._attachment: TransportAttachment | None = None
        self._watch: ProcessWatch | None = None
        self._channel = ProducerChannel(context, address, on_frames=self._receive, on_lost=self.lose)

    async def open(self, timeout_s: float) -> None:
        """Connect to the producer, exchange `Hello` and `Welcome`, and attach a transport. Raises `PeerLost` if the
        producer does not answer within `timeout_s` seconds, `Refused` if it rejects this node, and
        `TransportUnavailable` if no transport works.
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
        self._attachment = TransportAttachment(
            context, self._channel, welcome, self.ladder, parts=self.parts, only=self._only
        )
        # A pidfd reports the death of a process on this host immediately, long before a heartbeat is missed.
        self._watch = watch_process(welcome.host, context.host, lambda: self.lose("its process ended", dead=True))
        await self.attach()

    @property
    def name(self) -> InstanceId:
        """Return the instance id of the producer; until the producer has answered, return its address."""
        return self.peer[0] if self.peer is not None else InstanceId(self.address)

    @property
    def is_up(self) -> bool:
        """Return whether the connection to the producer is not lost or closed."""
        return self._channel.is_up

    @property
    def transport(self) -> Transport | None:
        """Return the transport by which blocks arrive on this connection now, or None while none is attached."""
        return None if self._attachment is None else self._attachment.transport

    @property
    def receiver(self) -> Receiver | None:
        """Return the consumer's end of the transport in use, or None while none is attached."""
        return None if self._attachment is None else self._attachment.receiver

    @property
    def block_bytes(self) -> int:
        """Return the size of one whole block in bytes, as the transport in use sends it (before any conversion to this
        node's layout).
        """
        return 0 if self._attachment is None else self._attachment.block_bytes

    @property
    def is_attaching(self) -> bool:
        """Return whether an attempt to attach a transport to this connection is running."""
        return self._attachment is not None and self._attachment.is_attaching

    def is_ready(self) -> bool:
        """Return whether a fetch can start now: the connection works and a transport is attached."""
        return self.is_up and self._attachment is not None and self._attachment.is_ready()

    async def ask_probe(self, number: int, rungs: Sequence[Rung], timeout_s: float) -> Probing:
        """Ask the producer to start a process that serves known bytes by the transports `rungs`, and return its answer:
        the address of the process, or the reason why there is none. `number` identifies the probe. Raises `PeerLost` if
        the connection breaks, or TimeoutError after twice `timeout_s`.
        """
        self._probing = self._context.loop.create_future()
        self.send(Probe(number, list(rungs)))
        async with asyncio.timeout(2 * timeout_s):
            # An answer to an earlier probe may come late: ignore it.
            while (answer := await self._channel.unless_lost(_result_of(self._probing))).number != number:
                self._probing = self._context.loop.create_future()
            return answer

    async def attach(self) -> None:
        """Attach the best transport of the ladder that works; if an attempt is running, wait for it. Do nothing if a
        transport is attached. Raises `TransportUnavailable` if none works, and `PeerLost` if the connection breaks.
        """
        assert self._attachment is not None, "`open` has not returned"
        await self._attachment.attach()

    def demote(self, name: str, reason: str) -> bool:
        """Stop using the transport `name` for this producer until a probe has proved that it works again; `reason` is
        logged. If this transport is not in use, do nothing and return False.
        """
        return self._attachment is not None and self._attachment.demote(name, reason)

    def stream(self, epoch: int) -> Stream | None:
        """Return the channel of the transport that the attempt number `epoch` attached. Return None if that transport
        is not in use any more, or has no channel of its own (its bytes come in messages or are copied from memory).
        """
        return None if self._attachment is None else self._attachment.stream(epoch)

    def is_same_host(self) -> bool:
        """Return whether the producer runs on this machine, under the same kernel."""
        return self._welcome.done() and self._welcome.result().host.boot_id == self._context.host.boot_id

    def is_dead(self) -> bool:
        """Return whether the producer's process is known to have ended."""
        return self._watch is not None and self._watch.is_dead()

    def send(self, message: ToProducer) -> None:
        """Send a control message to the producer, without blocking. If that fails, `on_lost` is called on the next turn
        of the event loop. After the connection is lost nothing is sent.
        """
        self._channel.send(message)

    def credit(self, num_bytes: int) -> None:
        """Report to the producer that `num_bytes` were received, so that it may send more. The calls of one turn of the
        event loop are sent as one message.
        """
        self._channel.credit(num_bytes)

    def lose(self, reason: str, *, dead: bool = False, linger_ms: int = 0) -> None:
        """Close the connection because of `reason`, usually a failure: calls that wait for an answer raise `PeerLost`,
        then `on_lost` is called. `dead` says that the producer's process has ended. Messages already queued may still
        be sent for `linger_ms`. Calls after the first one do nothing.
        """
        if not self.is_up:
            return
        self._channel.close(linger_ms)
        dead = dead or self.is_dead()
        if self._watch is not None:
            self._watch.close()
        error = PeerLost(f"{self.address}: {reason}")
        if self._attachment is not None:
            self._attachment.lose(error)
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()  # marks it as read: asyncio logs exceptions that nobody has read
        self._on_lost(self, reason, dead)

    async def close(self) -> None:
        """Close the connection to the producer, and cancel a running attempt to attach a transport."""
        self.lose("closed", linger_ms=LINGER_MS)
        if self._attachment is not None:
            await self._attachment.close()

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
            attached = None if self._attachment is None else self._attachment.attached_with(message.epoch)
            if attached is not None:
                self._on_broken(self, attached.name, message.reason)
        else:
            self._on_message(self, message, frames[1:])

    def _answered(self, message: Welcome | Attached | Probing) -> None:
        match message:
            case Welcome():
                _resolve(self._welcome, message)
            case Attached():
                if self._attachment is not None:
                    self._attachment.answered(message)
            case Probing():
                _resolve(self._probing, message)


def _resolve(future: "asyncio.Future[T] | None", value: T) -> None:
    """Set `value`, an answer of the producer, as the result of the future that waits for it. Ignore the answer if no
    future waits (None), or if the future has a result already.
    """
    if future is not None and not future.done():
        future.set_result(value)


async def _result_of(future: "asyncio.Future[T]") -> T:
    return await future
