"""Read a streamed answer with the kernel's time stamps of its arrival, which exclude delays of the reading process.

The kernel stamps a segment when the sender's write passes it to the network device (on loopback within that call),
with `CLOCK_REALTIME` (Documentation/networking/timestamping.rst). So the sender must use that clock, too.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Callable

from baton_serve.bench.router.http_load import HttpError

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module does not name it
_TIMESPEC = struct.Struct("@qq")
_CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
_MAX_READ_BYTES = 256 * 1024
_END_OF_HEAD = b"\r\n\r\n"
_END_OF_STREAM = b"0\r\n\r\n"

OnRead = Callable[[bytes, int, int], None]
"""Callback for one read: the data, the arrival of its last segment at the socket, and the time of the read; both in ns
of `CLOCK_REALTIME`."""


def now_ns() -> int:
    """Return the time of `CLOCK_REALTIME` in ns."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


class ClockWatch:
    """Detects that `CLOCK_REALTIME` was set during a measurement, by comparing it with the monotonic clock."""

    _MOST_NS = 100_000
    """Largest accepted difference; NTP adjusts the rate a little all the time."""

    def __init__(self) -> None:
        self._offset_ns = now_ns() - time.monotonic_ns()

    def check(self) -> None:
        """Raise `RuntimeError` if the clock was set since this object was created."""
        moved_ns = now_ns() - time.monotonic_ns() - self._offset_ns
        if abs(moved_ns) > self._MOST_NS:
            raise RuntimeError(f"the clock was set by {moved_ns / 1e6:.3f} ms during the measurement")


async def stream(port: int, request: bytes, on_read: OnRead) -> None:
    """Send a request on a new connection and read the answer to its end. Raises `HttpError`."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        # Without Nagle's algorithm the request leaves at once.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, request)
        reading = _Reading(connection, on_read)
        loop.add_reader(connection, reading.read)
        try:
            await reading.done
        finally:
            loop.remove_reader(connection)


class _Reading:
    def __init__(self, connection: socket.socket, on_read: OnRead) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._on_read = on_read
        self._head: bytes | None = b""
        """Bytes of the response head received so far; None once the body has begun."""

    def read(self) -> None:
        """Read what has arrived, with its time stamp. Called by the event loop."""
        try:
            data, control, _, _ = self._connection.recvmsg(_MAX_READ_BYTES, _CONTROL_BYTES)
        except BlockingIOError:
            return
        read_ns = now_ns()
        if not data:
            self._fail("the connection broke")
            return
        if self._head is not None:
            data = self._body(self._head + data)
        if data:
            self._on_read(data, _came_ns(control, read_ns), read_ns)
        if data.endswith(_END_OF_STREAM) and not self.done.done():
            self.done.set_result(None)

    def _body(self, data: bytes) -> bytes:
        head, end, body = data.partition(_END_OF_HEAD)
        self._head = None if end else data
        if end and head[9:12] != b"200":
            self._fail(head.decode("latin-1"))
        return body

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(HttpError(reason))


def _came_ns(control: list[tuple[int, int, bytes]], read_ns: int) -> int:
    """Return the arrival time of a read's last segment. The first segments after time stamps were enabled in the
    kernel may have none: then return the time of the read."""
    for level, kind, value in control:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            return int(seconds * 1_000_000_000 + nanoseconds)
    return read_ns
