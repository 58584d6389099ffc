"""Writes of one iteration of the event loop are sent at its end: in order, complete, and not to closed connections."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

from baton_serve.services.common.http.write_coalescer import PendingWrites, WriteCoalescer


class Counted:
    """A real transport of which is known what it was asked to write."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.written: list[bytes] = []
        self._transport = transport

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def run(body: Callable[[PendingWrites, Counted, socket.socket], Awaitable[None]]) -> None:
    async def scenario() -> None:
        near, far = socket.socketpair()
        with near, far:
            far.setblocking(False)
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
            counted = Counted(transport)
            try:
                await body(WriteCoalescer().of(cast(asyncio.Transport, counted)), counted, far)
            finally:
                transport.abort()
                await asyncio.sleep(0)

    asyncio.run(scenario())


async def received(far: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(10):
        while len(data) < size:
            data += await loop.sock_recv(far, 1 << 20)
    return data


def test_pieces_of_one_turn_leave_together_past_an_empty_transport() -> None:
    async def body(unsent: PendingWrites, transport: Counted, far: socket.socket) -> None:
        for piece in (b"a", b"b", b"c"):
            unsent.add(piece)
        assert transport.written == []
        await asyncio.sleep(0)
        assert far.recv(100) == b"abc" and transport.written == []
        unsent.add(b"d")
        await asyncio.sleep(0)
        assert far.recv(100) == b"d"

    run(body)


def test_what_the_kernel_does_not_take_waits_in_the_transport_and_nothing_overtakes_it() -> None:
    async def body(unsent: PendingWrites, transport: Counted, far: socket.socket) -> None:
        sent = bytearray()
        for number in range(40):
            piece = bytes((number,)) * 100_000
            sent += piece
            unsent.add(piece)
            await asyncio.sleep(0)
        assert 0 < len(transport.written) <= 40, "more than the kernel takes"
        assert len(b"".join(transport.written)) < len(sent), "the kernel was given the first of it at once"
        assert await received(far, len(sent)) == sent
        assert transport.get_write_buffer_size() == 0
        transport.written.clear()
        unsent.add(b"at once again")
        await asyncio.sleep(0)
        assert far.recv(100) == b"at once again" and transport.written == []

    run(body)


def test_nothing_is_written_to_a_connection_that_is_being_closed() -> None:
    async def body(unsent: PendingWrites, transport: Counted, far: socket.socket) -> None:
        unsent.add(b"late")
        transport.close()
        unsent.flush()
        await asyncio.sleep(0)
        assert transport.written == [] and await received(far, 0) == b""

    run(body)


def test_a_client_that_is_gone_is_the_transports_to_find_out() -> None:
    async def body(unsent: PendingWrites, transport: Counted, far: socket.socket) -> None:
        far.close()
        unsent.add(b"nobody reads this")
        unsent.flush()
        assert transport.written == [b"nobody reads this"]

    run(body)


def test_encrypted_connections_are_written_to_by_their_transport_alone() -> None:
    class Encrypted(Counted):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return object() if name == "sslcontext" else self._transport.get_extra_info(name, default)

    async def body(_: PendingWrites, transport: Counted, far: socket.socket) -> None:
        encrypted = Encrypted(transport._transport)
        unsent = WriteCoalescer().of(cast(asyncio.Transport, encrypted))
        unsent.add(b"secret")
        await asyncio.sleep(0)
        assert encrypted.written == [b"secret"]

    run(body)
