"""uvicorn's HTTP/1.1 protocol with what a server on an open network needs: heads of requests are bounded in size and
time; and with what a busy one wants: what one turn of the event loop writes to a connection leaves in one system call.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.gathering import GatheringTransport


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Of the request line and the headers of one request."""

    max_bytes: int = 64 * 1024
    timeout_s: float = 10.0


class GuardedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, limits: HeadLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._is_in_head = True
        self._num_heads = 0
        self._head_bytes = 0
        self._too_slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, GatheringTransport(transport, self.loop)))
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        num_heads = self._num_heads
        super().data_received(data)
        if self._is_in_head and self._num_heads == num_heads:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_bytes:
                self._refuse(b"431 Request Header Fields Too Large")
            elif self._too_slow is None:
                self._watch_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_heads += 1
        self._head_is_over()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def _watch_head(self) -> None:
        self._too_slow = self.loop.call_later(self._limits.timeout_s, self._refuse, b"408 Request Timeout")

    def _head_is_over(self) -> None:
        self._head_bytes = 0
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None

    def _refuse(self, status: bytes) -> None:
        self._head_is_over()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
