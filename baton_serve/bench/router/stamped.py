"""A streamed answer read with the kernel's word for when it came: what the reader itself is late by can be told apart.

The kernel stamps a segment when the sender's write hands it to the network device (loopback: within that very call),
with `CLOCK_REALTIME` (Documentation/networking/timestamping.rst): the sender's moments have to be of that clock too.
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
"""What one read brought, when its last segment came to the socket, and when it was read: `CLOCK_REALTIME`, in ns."""


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


class ClockWatch:
    """Nobody may have set `CLOCK_REALTIME` while it measured."""

    _MOST_NS = 100_000

    def __init__(self) -> None:
        self._offset_ns = now_ns() - time.monotonic_ns()

    def check(self) -> None:
        """Raises `RuntimeError`."""
        moved_ns = now_ns() - time.monotonic_ns() - self._offset_ns
        if abs(moved_ns) > self._MOST_NS:
            raise RuntimeError(f"the clock was set by {moved_ns / 1e6:.3f} ms while this measured")


async def stream(port: int, request: bytes, on_read: OnRead) -> None:
    """Asks on a connection of its own and reads to the answer's end. Raises `HttpError`."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
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
        """What has come of it; None once it is over."""

    def read(self) -> None:
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
    """The first segments of a process that is the first to ask for stamps may have none: then it came when it was
    read."""
    for level, kind, value in control:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            return int(seconds * 1_000_000_000 + nanoseconds)
    return read_ns
