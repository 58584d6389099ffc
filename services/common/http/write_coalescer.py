"""Collects the writes to all connections and sends them at the end of the event loop's iteration.

uvloop writes each piece immediately. Each would be a system call, and could wake up a process at the other end, which
would go to sleep again before the next piece.
"""

import asyncio
import os


class WriteCoalescer:
    """Collects what all connections of a server write in one iteration of the event loop, and sends it at the end: one
    system call for each connection, and one callback for all of them.
    """

    def __init__(self) -> None:
        self.due: list[PendingWrites] = []

    def of(self, transport: asyncio.Transport) -> "PendingWrites":
        """Create the object through which the connection with this transport writes."""
        return PendingWrites(transport, self)

    def flush(self) -> None:
        """Send what was collected for all connections in this iteration of the event loop."""
        due, self.due = self.due, []
        for unsent in due:
            unsent.flush()


class PendingWrites:
    """Holds the data that one connection has written in this iteration of the event loop and that is not sent yet."""

    __slots__ = ("_data", "_descriptor", "_more", "_transport", "_writes")

    def __init__(self, transport: asyncio.Transport, writes: WriteCoalescer) -> None:
        self._transport = transport
        self._writes = writes
        self._descriptor = _descriptor(transport)
        self._data = b""
        self._more: list[bytes] | None = None

    def add(self, data: bytes) -> None:
        """Send `data`, which must not be empty, at the end of this iteration of the event loop."""
        # Mostly there is one piece, which needs no list.
        if not self._data:
            self._data = data
            due = self._writes.due
            if not due:
                asyncio.get_running_loop().call_soon(self._writes.flush)
            due.append(self)
        elif self._more is None:
            self._more = [data]
        else:
            self._more.append(data)

    def flush(self) -> None:
        """Send the collected data of this connection now. It is dropped if the connection is being closed."""
        data = self._data
        if not data:
            return
        self._data = b""
        if self._more is not None:
            data, self._more = b"".join((data, *self._more)), None
        transport = self._transport
        if transport.is_closing():
            return
        # If the transport still has unsent data, writing past it would change the order.
        if self._descriptor is None or transport.get_write_buffer_size():
            transport.write(data)
            return
        # A direct write is cheaper than the transport's (docs/log/router.md). The transport gets only the rest that the
        # kernel does not take.
        try:
            written = os.write(self._descriptor, data)
        except OSError:
            # The kernel's buffer is full or the connection is broken. The transport handles either.
            written = 0
        if written < len(data):
            transport.write(data[written:])


def _descriptor(transport: asyncio.Transport) -> int | None:
    """Return the socket's file descriptor if data can be written to it directly, or None if the transport must encrypt
    it (TLS).
    """
    connection = transport.get_extra_info("socket")
    if connection is None or transport.get_extra_info("sslcontext") is not None:
        return None
    return int(connection.fileno())
