"""Writes of a connection to an instance: all of one iteration of the loop are sent at once, none is lost at the end,
and unsent bytes are kept up to a limit.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from baton_serve.services.common.errors import PeerUnreachable
from baton_serve.services.common.zmq.zmtp import command, frame_message, handshake
from baton_serve.services.common.zmq.zmtp_sockets import ZmtpDealer, ZmtpRouter


class Listener(asyncio.Protocol):
    """The other end: answers the handshake, keeps what comes after it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.is_over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(handshake(b"ROUTER"))

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over.set()


def with_dealer(test: Callable[[ZmtpDealer, Listener], Awaitable[None]]) -> None:
    async def scenario() -> None:
        listener = Listener()
        server = await asyncio.get_running_loop().create_server(lambda: listener, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        dealer = ZmtpDealer(f"tcp://127.0.0.1:{port}", on_message=lambda _: None, on_lost=lambda _: None)
        dealer.start()
        dealer.send(b"first")
        async with asyncio.timeout(10):
            while frame_message(b"first") not in b"".join(listener.received):  # noqa: ASYNC110 - the fake has no events
                await asyncio.sleep(0.001)
            listener.received.clear()
            await test(dealer, listener)
        dealer.close()
        server.close()

    asyncio.run(scenario())


def test_messages_of_one_turn_are_one_write() -> None:
    async def scenario(dealer: ZmtpDealer, listener: Listener) -> None:
        for message in (b"a", b"b", b"c"):
            dealer.send(message)
        while not listener.received:  # noqa: ASYNC110 - the fake has no events
            await asyncio.sleep(0.001)
        assert listener.received == [frame_message(b"a") + frame_message(b"b") + frame_message(b"c")]

    with_dealer(scenario)


def test_what_was_sent_just_before_the_end_still_arrives() -> None:
    async def scenario(dealer: ZmtpDealer, listener: Listener) -> None:
        dealer.send(b"the last")
        dealer.close(linger_ms=1000)
        await listener.is_over.wait()
        assert b"".join(listener.received) == frame_message(b"the last")

    with_dealer(scenario)


def strict_dealer(address: str) -> ZmtpDealer:
    def lost(reason: str) -> None:
        raise AssertionError(reason)

    return ZmtpDealer(address, on_message=lambda _: None, on_lost=lost, max_unsent_bytes=1000)


def test_messages_to_a_peer_that_is_not_there_are_kept_up_to_a_limit() -> None:
    async def scenario() -> None:
        sender = strict_dealer("tcp://127.0.0.1:1")
        for _ in range(5):  # frames of 202 bytes
            sender.send(bytes(200))
        with pytest.raises(PeerUnreachable):
            sender.send(bytes(200))
        sender.close()

    asyncio.run(scenario())


def test_messages_to_a_peer_that_does_not_read_are_kept_up_to_a_limit() -> None:
    async def scenario() -> None:
        is_over = asyncio.Event()

        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(handshake(b"ROUTER"))
            await is_over.wait()
            writer.close()

        server = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1)
        port = server.sockets[0].getsockname()[1]
        sender = strict_dealer(f"tcp://127.0.0.1:{port}")
        sender.start()
        with pytest.raises(PeerUnreachable):
            for _ in range(1000):
                sender.send(bytes(1_000_000))
                await asyncio.sleep(0.001)
        sender.close()
        is_over.set()
        server.close()

    asyncio.run(scenario())


async def silent_after(begin: bytes) -> list[str]:
    """Why a router that has little patience loses a peer that sends `begin` and nothing more."""
    reasons: list[str] = []
    router = ZmtpRouter(
        on_message=lambda peer, message: None,
        on_lost=lambda peer, reason: reasons.append(reason),
        handshake_s=0.1,
        silence_s=0.1,
    )
    address = await router.start("tcp://127.0.0.1:0")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(begin)
    async with asyncio.timeout(10):
        await reader.read(-1)
    writer.close()
    await router.close()
    return reasons


@pytest.mark.parametrize(
    "begin",
    [b"", handshake(b"DEALER")[:20], handshake(b"DEALER"), handshake(b"DEALER") + frame_message(b"")],
    ids=["nothing", "half a handshake", "a handshake", "an empty message"],
)
def test_a_connection_that_is_silent_ends(begin: bytes) -> None:
    assert asyncio.run(silent_after(begin)) == ["the peer was silent for too long"]


def test_a_connection_whose_peer_is_there_stays() -> None:
    async def scenario() -> None:
        reasons: list[str] = []
        router = ZmtpRouter(
            on_message=lambda peer, message: None,
            on_lost=lambda peer, reason: reasons.append(reason),
            silence_s=0.3,
        )
        address = await router.start("tcp://127.0.0.1:0")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(handshake(b"DEALER"))
        await reader.readexactly(len(handshake(b"ROUTER")))
        pong = command(b"\x04PONGx")
        for _ in range(8):
            await asyncio.sleep(0.1)
            writer.write(command(b"\x04PING\x00\x00x"))
            assert await reader.readexactly(len(pong)) == pong
        assert reasons == []
        writer.close()
        await router.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
