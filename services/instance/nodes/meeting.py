"""Accepts the ranks of other hosts on the first host (`--node-rank 0`), and refuses those of other instances.

Both ends of each connection prove that they have the cluster's key (TLS), before a message is parsed. The port stays
open as long as the process lives: ranks that come while the model is loaded, or while the instance sleeps, wait here
for the next start.
"""

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping

from baton_serve.engine.parallel.channel import Channel, ChannelError
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.rpc.encryption import tls_context
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.nodes.agreement import (
    RankHello,
    RankRefused,
    RankWelcome,
    agreement,
    notice_silence,
)
from baton_serve.services.instance.settings import InstanceSettings

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
"""Longest time in seconds until a new connection has proved its key and said which rank it is."""
REPORT_INTERVAL_S = 10.0
"""Time in seconds between two log lines about hosts that are missing."""
_MAX_UNKNOWN = 32
"""Largest number of connections that have not said who they are; more are closed at once."""


class NodeMeeting:
    """Collects the connections of the ranks on other hosts. Implements `RemoteRanks` for the engine."""

    def __init__(self, settings: InstanceSettings) -> None:
        """Open nothing yet. `settings` must have passed `check_nodes`."""
        self._settings = settings
        self._per_node = settings.devices_per_node
        self._expected = range(self._per_node, settings.num_devices)
        self._arrived: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._unknown = threading.BoundedSemaphore(_MAX_UNKNOWN)
        self._listener: socket.socket | None = None
        self._is_closed = False

    @property
    def address(self) -> str:
        """Return the IP address of this host that the other hosts reach."""
        assert self._listener is not None
        return str(self._listener.getsockname()[0])

    def open(self, key: ClusterKey) -> None:
        """Listen on `--master-addr` and `--master-port`. Raises `StartFailed` if that is not possible."""
        host, port = self._settings.master_addr, self._settings.master_port
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=128)
        except OSError as exc:
            raise StartFailed(
                f"--master-addr {host}, --master-port {port}: {exc.strerror or exc}; give an address of this host,"
                " which has --node-rank 0, and a free port"
            ) from exc
        context = tls_context(key, is_server=True)
        threading.Thread(target=self._accept, args=(self._listener, context), name="nodes", daemon=True).start()

    async def close(self) -> None:
        """Close the port, and the connections of ranks that wait."""
        with self._changed:
            self._is_closed = True
            # `accept` of the other thread returns only after a shutdown.
            if self._listener is not None:
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)
                self._listener.close()
            for connection in self._arrived.values():
                connection.close()
            self._arrived.clear()

    def connect(self) -> Mapping[int, socket.socket]:
        """Wait for all ranks on other hosts, and give their connections to the caller. Called in the engine's thread.

        Raises `ChannelError` if a rank has not come within `--node-wait-s`.
        """
        deadline = time.monotonic() + self._settings.node_wait_s
        report_at = time.monotonic() + 1.0
        with self._changed:
            while missing := self._missing():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ChannelError(
                        f"{self._names(missing)} did not come to {self._place()} within"
                        f" {self._settings.node_wait_s:g} s (--node-wait-s)"
                    )
                if time.monotonic() >= report_at:
                    logger.info("waiting at %s for %s", self._place(), self._names(missing))
                    report_at += REPORT_INTERVAL_S
                self._changed.wait(min(left_s, 1.0))
            logger.info("all %d hosts of this instance are there", self._settings.nnodes)
            arrived, self._arrived = self._arrived, {}
            return arrived

    def _missing(self) -> list[int]:
        """Return the ranks that are not there, after dropping the connections that have ended."""
        for rank in [rank for rank, connection in self._arrived.items() if _has_ended(connection)]:
            self._arrived.pop(rank).close()
        return [rank for rank in self._expected if rank not in self._arrived]

    def _names(self, missing: list[int]) -> str:
        """Return the hosts of missing ranks, for messages."""
        nodes = sorted({rank // self._per_node for rank in missing})
        ranks = ", ".join(map(str, missing))
        return f"--node-rank {', '.join(map(str, nodes))} of --nnodes {self._settings.nnodes} (ranks {ranks})"

    def _place(self) -> str:
        return f"{self._settings.master_addr} port {self._settings.master_port}"

    def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections until `close`. Run in a thread."""
        while True:
            try:
                connection, (host, *_) = listener.accept()
            except OSError:
                return  # closed
            # A thread for each, because a stranger may connect and say nothing.
            if self._unknown.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(connection, host, context), daemon=True).start()
            else:
                connection.close()

    def _greet(self, connection: socket.socket, host: str, context: ssl.SSLContext) -> None:
        """Find out which rank a new connection is, and keep it, or close it."""
        try:
            connection.settimeout(HELLO_TIMEOUT_S)
            notice_silence(connection)
            connection = context.wrap_socket(connection, server_side=True)
            channel: Channel[RankHello] = Channel(connection, RankHello, send_timeout_s=HELLO_TIMEOUT_S)
            hello = channel.receive(HELLO_TIMEOUT_S)
            if reason := self._obstacle(hello):
                logger.warning("%s cannot join this instance: %s", host, reason)
                channel.send(channel.encode(RankRefused(reason)))
                channel.close()
                return
            channel.send(channel.encode(RankWelcome(self._settings.model)))
        except (OSError, ChannelError) as exc:
            logger.warning("%s has connected to %s without joining: %s", host, self._place(), exc)
            connection.close()
            return
        finally:
            self._unknown.release()
        with self._changed:
            if self._is_closed:
                connection.close()
                return
            # A rank that connects again has been restarted.
            if (earlier := self._arrived.pop(hello.rank, None)) is not None:
                earlier.close()
            self._arrived[hello.rank] = connection
            self._changed.notify_all()

    def _obstacle(self, hello: RankHello) -> str:
        """Return why a rank does not belong to this instance, or an empty text."""
        own = agreement(self._settings)
        if hello.instance != own:
            return f"it runs {hello.instance}, and the first host {own}; they must be equal"
        if hello.rank not in self._expected:
            return f"it has rank {hello.rank}, and the other hosts have {self._expected[0]} to {self._expected[-1]}"
        return ""


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other end of a connection is closed, or does not answer any more."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
