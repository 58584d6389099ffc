"""Connections between routers and instances: all messages of one iteration of the loop are sent at once, none is lost
at the end, unsent bytes are kept up to a limit, and peers that are silent or lack the key are closed.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from baton_serve.services.common.cluster_key import ClusterKey, cluster_key
from baton_serve.services.common.errors import PeerUnreachable
from baton_serve.services.common.rpc.connections import MessageClient, MessageServer
from baton_serve.services.common.rpc.encryption import Encryption, tls_context
from baton_serve.services.common.rpc.framing import PREAMBLE, ProtocolError, frame

KEY, OTHER_KEY = cluster_key("k" * 32), cluster_key("x" * 32)


class Listener(asyncio.Protocol):
    """The other end: sends its preamble and keeps all received bytes."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.is_over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(PREAMBLE)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over.set()


def with_client(test: Callable[[MessageClient, Listener], Awaitable[None]]) -> None:
    async def scenario() -> None:
        listener = Listener()
        server = await asyncio.get_running_loop().create_server(lambda: listener, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = MessageClient(f"tcp://127.0.0.1:{port}", on_message=lambda _: None, on_lost=lambda _: None)
        client.start()
        client.send(b"first")
        async with asyncio.timeout(10):
            while frame(b"first") not in b"".join(listener.received):  # noqa: ASYNC110 - the fake has no events
                await asyncio.sleep(0.001)
            listener.received.clear()
            await test(client, listener)
        client.close()
        server.close()

    asyncio.run(scenario())


def test_messages_of_one_turn_are_one_write() -> None:
    async def scenario(client: MessageClient, listener: Listener) -> None:
        for message in (b"a", b"b", b"c"):
            client.send(message)
        while not listener.received:  # noqa: ASYNC110 - the fake has no events
            await asyncio.sleep(0.001)
        assert listener.received == [frame(b"a") + frame(b"b") + frame(b"c")]

    with_client(scenario)


def test_what_was_sent_just_before_the_end_still_arrives() -> None:
    async def scenario(client: MessageClient, listener: Listener) -> None:
        client.send(b"the last")
        client.close(linger_ms=1000)
        await listener.is_over.wait()
        assert b"".join(listener.received) == frame(b"the last")

    with_client(scenario)


def strict_client(address: str) -> MessageClient:
    def lost(reason: str) -> None:
        raise AssertionError(reason)

    return MessageClient(address, on_message=lambda _: None, on_lost=lost, max_unsent_bytes=1000)


def test_messages_to_a_peer_that_is_not_there_are_kept_up_to_a_limit() -> None:
    async def scenario() -> None:
        sender = strict_client("tcp://127.0.0.1:1")
        for _ in range(5):  # frames of 204 bytes
            sender.send(bytes(200))
        with pytest.raises(PeerUnreachable):
            sender.send(bytes(200))
        sender.close()

    asyncio.run(scenario())


def test_messages_to_a_peer_that_does_not_read_are_kept_up_to_a_limit() -> None:
    async def scenario() -> None:
        is_over = asyncio.Event()

        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(PREAMBLE)
            await is_over.wait()
            writer.close()

        server = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1)
        port = server.sockets[0].getsockname()[1]
        sender = strict_client(f"tcp://127.0.0.1:{port}")
        sender.start()
        with pytest.raises(PeerUnreachable):
            for _ in range(1000):
                sender.send(bytes(1_000_000))
                await asyncio.sleep(0.001)
        sender.close()
        is_over.set()
        server.close()

    asyncio.run(scenario())


async def silent_after(begin: bytes, key: ClusterKey | None) -> list[str]:
    """Return why a server with short timeouts loses a peer that sends `begin` and nothing more."""
    reasons: list[str] = []
    server = MessageServer(
        on_message=lambda peer, message: None,
        on_lost=lambda peer, reason: reasons.append(reason),
        key=key,
        handshake_s=0.1,
        silence_s=0.1,
    )
    address = await server.start("tcp://127.0.0.1:0")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(begin)
    async with asyncio.timeout(10):
        await reader.read(-1)
    writer.close()
    await server.close()
    return reasons


def client_hello() -> bytes:
    encryption = Encryption(tls_context(KEY, is_server=False))
    encryption.decrypt(b"")
    return encryption.pending()


@pytest.mark.parametrize(
    ("begin", "key"),
    [
        (b"", None),
        (PREAMBLE[:4], None),
        (PREAMBLE, None),
        (PREAMBLE + frame(b""), None),
        (b"", KEY),
        (client_hello()[:20], KEY),
        (client_hello(), KEY),
    ],
    ids=[
        "nothing",
        "half a preamble",
        "a preamble",
        "an empty message",
        "nothing to an encrypted server",
        "half a ClientHello",
        "a ClientHello",
    ],
)
def test_a_connection_that_is_silent_ends(begin: bytes, key: ClusterKey | None) -> None:
    assert asyncio.run(silent_after(begin, key)) == ["the peer was silent for too long"]


def test_a_connection_whose_peer_is_there_stays() -> None:
    async def scenario() -> None:
        reasons: list[str] = []
        received = asyncio.Event()
        server = MessageServer(
            on_message=lambda peer, message: received.set(),
            on_lost=lambda peer, reason: reasons.append(reason),
            silence_s=0.3,
        )
        address = await server.start("tcp://127.0.0.1:0")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(PREAMBLE)
        assert await reader.readexactly(len(PREAMBLE)) == PREAMBLE
        for _ in range(8):
            await asyncio.sleep(0.1)
            received.clear()
            writer.write(frame(b"heartbeat"))
            await received.wait()
        assert reasons == []
        writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))


async def exchanged(key: ClusterKey | None, messages: list[bytes]) -> list[bytes]:
    """Send messages to a server that returns each of them, and return what comes back."""
    returned: list[bytes] = []
    is_whole = asyncio.Event()

    def on_message(message: bytes) -> None:
        returned.append(message)
        if len(returned) == len(messages):
            is_whole.set()

    server = MessageServer(
        on_message=lambda peer, message: server.send(peer, message), on_lost=lambda peer, reason: None, key=key
    )
    client = MessageClient(
        await server.start("tcp://127.0.0.1:0"), on_message=on_message, on_lost=lambda _: None, key=key
    )
    client.start()
    for message in messages:
        client.send(message)
    async with asyncio.timeout(10):
        await is_whole.wait()
    client.close()
    await server.close()
    return returned


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_messages_of_any_length_arrive_in_order(key: ClusterKey | None) -> None:
    lengths = (0, 1, 100, 16_383, 16_384, 16_385, 1_000_000, 0, 5_000_000, 7)
    messages = [bytes((number,)) * length for number, length in enumerate(lengths)]
    assert asyncio.run(exchanged(key, messages)) == messages


def test_an_encrypted_connection_carries_no_plain_text() -> None:
    async def scenario() -> None:
        seen: list[bytes] = []

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65_536):
                seen.append(data)
                writer.write(data)
            writer.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(forward(reader, server_writer), forward(server_reader, writer))

        answers: asyncio.Queue[bytes] = asyncio.Queue()
        server = MessageServer(
            on_message=lambda peer, message: server.send(peer, message), on_lost=lambda peer, reason: None, key=KEY
        )
        port = int((await server.start("tcp://127.0.0.1:0")).rpartition(":")[2])
        proxy = await asyncio.start_server(between, "127.0.0.1", 0)
        client = MessageClient(
            f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}",
            on_message=answers.put_nowait,
            on_lost=lambda _: None,
            key=KEY,
        )
        client.start()
        client.send(b"a secret prompt")
        assert await answers.get() == b"a secret prompt"
        client.close()
        await server.close()
        proxy.close()
        assert len(b"".join(seen)) > 500 and b"secret" not in b"".join(seen) and PREAMBLE not in b"".join(seen)

    asyncio.run(asyncio.wait_for(scenario(), 10))


def no_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def another_certificate() -> ssl.SSLContext:
    context = tls_context(OTHER_KEY, is_server=False)
    context.verify_mode = ssl.CERT_NONE
    return context


def old_version() -> ssl.SSLContext:
    context = tls_context(KEY, is_server=False)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize(
    ("context", "cause"),
    [
        (no_certificate(), "the peer has no key"),
        (another_certificate(), "the peer has another key"),
        (old_version(), "TLS failed: UNSUPPORTED_PROTOCOL"),
    ],
    ids=["no certificate", "another certificate", "an old version of TLS"],
)
def test_a_server_refuses_a_client_that_does_not_prove_the_key(context: ssl.SSLContext, cause: str) -> None:
    client, server = Encryption(context), Encryption(tls_context(KEY, is_server=True))
    client.decrypt(b"")
    with pytest.raises(ProtocolError, match=cause):
        for _ in range(3):
            server.decrypt(client.pending())
            client.decrypt(server.pending())
    assert not server.is_ready


def test_a_client_refuses_a_server_with_another_key_before_it_sends_anything_in_confidence() -> None:
    client, server = Encryption(tls_context(KEY, is_server=False)), Encryption(tls_context(OTHER_KEY, is_server=True))
    client.decrypt(b"")
    server.decrypt(client.pending())
    with pytest.raises(ProtocolError, match="the peer has another key"):
        client.decrypt(server.pending())
    assert not client.is_ready


def test_changed_bytes_end_an_encrypted_connection() -> None:
    client, server = Encryption(tls_context(KEY, is_server=False)), Encryption(tls_context(KEY, is_server=True))
    client.decrypt(b"")
    while not server.is_ready:
        server.decrypt(client.pending())
        client.decrypt(server.pending())
    record = bytearray(client.encrypt(b"message"))
    record[-1] ^= 1
    with pytest.raises(ProtocolError, match="TLS failed"):
        server.decrypt(bytes(record))


def test_an_encrypted_connection_that_is_damaged_while_messages_are_queued_is_lost_once() -> None:
    async def scenario() -> None:
        peers: asyncio.Queue[bytes] = asyncio.Queue()
        reasons: list[str] = []
        server = MessageServer(
            on_message=lambda peer, message: peers.put_nowait(peer),
            on_lost=lambda peer, reason: reasons.append(reason),
            key=KEY,
        )
        address = await server.start("tcp://127.0.0.1:0")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        client = Encryption(tls_context(KEY, is_server=False))
        client.decrypt(b"")
        while not client.is_ready:
            writer.write(client.pending())
            client.decrypt(await reader.read(65_536))
        writer.write(client.pending() + client.encrypt(PREAMBLE + frame(b"message")))
        peer = await peers.get()
        record = bytearray(client.encrypt(b"damaged"))
        record[-1] ^= 1
        writer.write(bytes(record))
        # In each iteration a message is queued before the loop reads.
        while not reasons:
            server.send(peer, b"answer")
            await asyncio.sleep(0)
        assert reasons == ["TLS failed: DECRYPTION_FAILED_OR_BAD_RECORD_MAC"]
        writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("begin", [PREAMBLE + frame(b"message"), bytes(1000), b"GET / HTTP/1.1\r\n\r\n"])
def test_peers_that_do_not_encrypt_are_refused_and_fill_no_log(begin: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        received: list[bytes] = []
        server = MessageServer(
            on_message=lambda peer, message: received.append(message), on_lost=lambda peer, reason: None, key=KEY
        )
        address = await server.start("tcp://127.0.0.1:0")
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            writer.write(begin)
            await reader.read(-1)
            writer.close()
        await server.close()
        assert not received

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert len([record for record in caplog.records if "a connection is refused" in record.message]) == 1
