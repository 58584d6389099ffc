"""A transport whose writes leave together. uvloop writes at once: each piece would be a system call, and each might
wake a process at the other end that sleeps again before the next.
"""

import asyncio
from collections.abc import Callable
from typing import Any


class GatheringTransport:
    """A transport whose writes leave together at the end of the loop's turn. Everything else is the real one's."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self.is_closing: Callable[[], bool] = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
            self._parts = []
            if not self._transport.is_closing():
                self._transport.write(data)
