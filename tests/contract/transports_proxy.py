"""A TCP proxy in front of a producer, which resets connections, cuts, silences or holds them at a byte, and changes
bytes on the way."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable

Change = Callable[[bytearray, int], None]
"""Gets bytes on their way to the consumer, and how many of that connection came before them."""


class Proxy:
    def __init__(self, target: str) -> None:
        self._host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._writers: list[asyncio.StreamWriter] = []
        """Two of each connection, in their order."""
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""
        self.change: Change = lambda data, before: None
        self.cut_at: int | None = None
        """The connection that carries this byte to the consumer is reset before it; once."""
        self.silent_at: int | None = None
        """The connection that carries this byte to the consumer is silenced before it; once."""
        self.hold_at: int | None = None
        """This byte of each connection, and those after it, go to the consumer only after `release`."""
        self.received: list[int] = []
        """Bytes that went to the consumer, of each connection."""
        self.num_held = 0
        """Connections whose bytes wait for `release`."""
        self._silent: set[int] = set()
        self._released = asyncio.Event()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reset(self, connection: int | None = None) -> None:
        """As a broken network does: RST, both ways; of all connections, or of one, in the order they were made."""
        chosen = slice(None) if connection is None else slice(2 * connection, 2 * connection + 2)
        for writer in self._writers[chosen]:
            raw: socket.socket = writer.get_extra_info("socket")
            if raw.fileno() < 0:
                continue  # it ended before
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        if connection is None:
            self._writers.clear()

    def silence(self) -> None:
        """As a peer behind a firewall that forgot the connection: bytes of all present connections vanish, both ways,
        without an end. New connections work."""
        self._silent.update(range(len(self.received)))

    def release(self) -> None:
        """Deliver the bytes that `hold_at` has held."""
        self.hold_at = None
        self._released.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, there]
        self.received.append(0)
        number = len(self.received) - 1
        for source, target, is_down in ((reader, there, False), (there_reader, writer, True)):
            pump = asyncio.create_task(self._pump(source, target, number, is_down=is_down))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, number: int, *, is_down: bool
    ) -> None:
        before = 0
        with contextlib.suppress(ConnectionError):
            while data := bytearray(await source.read(16 << 10)):
                if is_down:
                    self.received[number] += len(data)
                    self.change(data, before)
                    if await self._is_cut(data, before, target):
                        return
                    if self.silent_at is not None and before + len(data) > self.silent_at:
                        self.silent_at = None
                        self._silent.add(number)
                    if self.hold_at is not None and before + len(data) > self.hold_at:
                        self.num_held += 1
                        await self._released.wait()
                before += len(data)
                if number not in self._silent:
                    target.write(data)
                    await target.drain()
        target.close()

    async def _is_cut(self, data: bytearray, before: int, target: asyncio.StreamWriter) -> bool:
        if self.cut_at is None or before + len(data) <= self.cut_at:
            return False
        target.write(data[: self.cut_at - before])
        await target.drain()
        self.cut_at = None
        self.reset()
        return True


@contextlib.asynccontextmanager
async def proxy_of(target: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
