"""Writes to many connections that leave together at the end of the event loop's turn. uvloop writes at once: each piece
would be a system call, and each might wake a process at the other end that sleeps again before the next.
"""

import asyncio
import os


class WriteCoalescer:
    """All connections share one: of a turn it costs one callback, however many connections were written to."""

    def __init__(self) -> None:
        self.due: list[PendingWrites] = []

    def of(self, transport: asyncio.Transport) -> "PendingWrites":
        return PendingWrites(transport, self)

    def flush(self) -> None:
        due, self.due = self.due, []
        for unsent in due:
            unsent.flush()


class PendingWrites:
    """What one connection was given and has not written yet."""

    __slots__ = ("_data", "_descriptor", "_more", "_transport", "_writes")

    def __init__(self, transport: asyncio.Transport, writes: WriteCoalescer) -> None:
        self._transport = transport
        self._writes = writes
        self._descriptor = _descriptor(transport)
        self._data = b""
        self._more: list[bytes] | None = None

    def add(self, data: bytes) -> None:
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
        """Nothing is written to a connection that is being closed."""
        data = self._data
        if not data:
            return
        self._data = b""
        if self._more is not None:
            data, self._more = b"".join((data, *self._more)), None
        transport = self._transport
        if transport.is_closing():
            return
        if self._descriptor is None or transport.get_write_buffer_size():
            transport.write(data)
            return
        # Cheaper than the transport's own queue, which is for what the kernel does not take (docs/log/router.md).
        try:
            written = os.write(self._descriptor, data)
        except OSError:  # it takes nothing now, or never again: the transport waits, or finds out
            written = 0
        if written < len(data):
            transport.write(data[written:])


def _descriptor(transport: asyncio.Transport) -> int | None:
    """Where bytes may be written beside the transport, while it has none to write: what is encrypted has no such."""
    connection = transport.get_extra_info("socket")
    if connection is None or transport.get_extra_info("sslcontext") is not None:
        return None
    return int(connection.fileno())
