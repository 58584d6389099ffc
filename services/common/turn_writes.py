"""Writes to many connections that leave together at the end of the event loop's turn. uvloop writes at once: each piece
would be a system call, and each might wake a process at the other end that sleeps again before the next.
"""

import asyncio


class TurnWrites:
    """All connections share one: of a turn it costs one callback, however many connections were written to."""

    def __init__(self) -> None:
        self._due: list[Unsent] = []

    def of(self, transport: asyncio.Transport) -> "Unsent":
        return Unsent(transport, self)

    def soon(self, unsent: "Unsent") -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(unsent)

    def _flush(self) -> None:
        due, self._due = self._due, []
        for unsent in due:
            unsent.flush()


class Unsent:
    """What one connection was given and has not written yet."""

    __slots__ = ("_parts", "_transport", "_writes")

    def __init__(self, transport: asyncio.Transport, writes: TurnWrites) -> None:
        self._transport = transport
        self._writes = writes
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        if not self._parts:
            self._writes.soon(self)
        self._parts.append(data)

    def flush(self) -> None:
        """Nothing is written to a connection that is being closed."""
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts = []
            if not self._transport.is_closing():
                self._transport.write(data)
