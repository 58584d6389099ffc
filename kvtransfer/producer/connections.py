"""Accepts the connections of consumers to this node, and finds the `ProducerLink` of each message."""

import logging
from collections.abc import Callable, Collection, Iterator

import zmq

from baton_serve.contracts.identity import Generation, InstanceId, TicketId
from baton_serve.contracts.wire import WireError, encode
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import Hello, Join, Refuse, ToProducer, producer_decoder
from baton_serve.kvtransfer.monitored_socket import LINGER_MS, MonitoredSocket, configure, encrypt
from baton_serve.kvtransfer.producer.link import ProducerLink, refusal, welcome

logger = logging.getLogger(__name__)


class ConsumerConnections:
    """Accepts connections of consumers to one node, and finds the `ProducerLink` to which a message or a broken
    connection belongs. Use it only on the event loop. `on_message` receives each message of an accepted consumer.
    `on_lost` is called for each link that breaks; its second argument is True if the consumer's process has ended. If
    that process ends only after the link was lost, `on_lost` is called a second time.
    """

    def __init__(
        self,
        context: NodeContext,
        *,
        on_message: Callable[[ProducerLink, ToProducer], None],
        on_lost: Callable[[ProducerLink, bool], None],
    ) -> None:
        """Listen on the address of the node's settings. Raises `zmq.ZMQError` if the address is in use. `on_message`
        gets each message of a consumer, and `on_lost` each link that breaks (and whether the consumer's process has
        ended).
        """
        self._context = context
        self._on_message = on_message
        self._on_lost = on_lost
        self._links: dict[int, ProducerLink] = {}
        self._by_identity: dict[bytes, ProducerLink] = {}
        self._next_link = 1
        settings = context.settings
        socket = context.zmq.socket(zmq.ROUTER)
        configure(socket, settings)
        encrypt(socket, settings, listens=True)
        # Without this option ZeroMQ drops messages to a consumer that is gone, and the loss would not be noticed.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(settings.bind)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = MonitoredSocket(
            socket, on_message=self._receive, on_down=self._on_down, events=zmq.EVENT_DISCONNECTED
        )

    def __iter__(self) -> Iterator[ProducerLink]:
        return iter(self._links.values())

    def get(self, number: int) -> ProducerLink | None:
        """Return the `ProducerLink` with this number, the connection of one consumer, or None if it is gone."""
        return self._links.get(number)

    def drop(self, ticket: TicketId) -> None:
        """Remove the queued blocks of a ticket from the links to all consumers, so that they are not sent."""
        for link in self._links.values():
            link.drop(ticket)

    def is_reading(self, ticket: TicketId) -> bool:
        """Return whether the memory of this ticket's blocks is still read here: by a ZeroMQ frame that is being sent,
        or by a thread that stages blocks or computes checksums.
        """
        return any(link.is_reading(ticket) for link in self._links.values())

    def forget_lost(self, in_use: Collection[int], peers_in_use: Collection[tuple[InstanceId, Generation]]) -> None:
        """Forget links whose connection is lost. Keep a link if a served ticket uses it (its number is `in_use`), if
        its consumer has served tickets (`peers_in_use`), or if blocks are still read through it.
        """
        for number, link in list(self._links.items()):
            # Keep a lost link while a session of its consumer lives: its pidfd still reports the death of that process.
            if not link.is_up and number not in in_use and link.peer not in peers_in_use and link.is_idle():
                link.close()
                del self._links[number]

    def close(self) -> None:
        """Stop listening, and close the links to all consumers."""
        self._socket.close(linger_ms=LINGER_MS)
        for link in self._links.values():
            link.close()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        link = self._by_identity.get(identity)
        try:
            message = producer_decoder.decode(frames[1].buffer)
        except (WireError, IndexError) as exc:
            logger.warning("undecodable message of a peer: %s", exc)
            return
        if isinstance(message, Hello) and link is None:
            self._greet(identity, int(frames[1].get(zmq.SRCFD)), message)
        elif isinstance(message, Join) and link is None:
            self._join(identity, int(frames[1].get(zmq.SRCFD)), message)
        elif link is None:
            self._answer(identity, Refuse("say hello first"))
        else:
            self._on_message(link, message)

    def _greet(self, identity: bytes, fd: int, hello: Hello) -> None:
        # The system reuses file descriptors: handle the end of an older connection with this number first.
        self._socket.drain_monitor()
        refuse = refusal(self._context, hello)
        if refuse is not None:
            logger.warning("peer=%s refused: %s", hello.instance, refuse.reason)
            self._answer(identity, refuse)
            return
        # Numbers are never used again: a session may still refer to a link that is gone.
        number, self._next_link = self._next_link, self._next_link + 1
        link = ProducerLink(
            self._context, self._socket, identity=identity, number=number, fd=fd, hello=hello, on_lost=self._lose
        )
        self._links[number] = self._by_identity[identity] = link
        link.send(welcome(self._context, link))

    def _join(self, identity: bytes, fd: int, join: Join) -> None:
        self._socket.drain_monitor()
        # The secret identifies the link; the identity of a new connection says nothing about its owner.
        link = next((link for link in self._links.values() if link.admits(join)), None)
        if link is None:
            self._answer(identity, Refuse("no connection with this secret can be joined"))
            return
        link.join(identity, fd)
        self._by_identity[identity] = link

    def _answer(self, identity: bytes, refuse: Refuse) -> None:
        try:
            self._socket.send([identity, encode(refuse)])
        except zmq.ZMQError as exc:
            logger.debug("a refused peer is already gone: %s", exc)

    def _on_down(self, fd: int) -> None:
        """Handle the end of the connection with the file descriptor `fd`: its link is lost on the next turn of the
        event loop.
        """
        for link in self._links.values():
            if fd in link.fds and link.is_up:
                # Messages that arrived before the end, such as a release, are still in the socket: `_ended` handles
                # them first.
                self._context.loop.call_soon(self._ended, link)

    def _ended(self, link: ProducerLink) -> None:
        self._socket.drain()
        self._lose(link, False)

    def _lose(self, link: ProducerLink, dead: bool) -> None:
        dead = dead or link.is_dead()
        if link.is_up:
            logger.info("peer=%s disconnected dead=%s", link.peer[0], dead)
            link.lose()
            for identity in link.identities:
                self._by_identity.pop(identity, None)
        self._on_lost(link, dead)
