"""Shared memory is handed to processes of the same user alone, and taken from such."""

import asyncio
import os
import secrets
import socket
from typing import cast

import pytest

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.kvtransfer import HostMemory, TransferSettings
from baton_serve.kvtransfer.control_messages import Hello, Offer, Welcome
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.liveness import this_host
from baton_serve.kvtransfer.transports.checksum_cache import ChecksumCache
from baton_serve.kvtransfer.transports.port import AttachRequest, NodeFacts, ReceiveTarget
from baton_serve.kvtransfer.transports.usm import UsmTransport
from tests.contract.transports_pair import LAYOUT
from tests.other_user import NOBODY, as_nobody, needs_root

pytestmark = needs_root
A = InstanceId("a")


def asked(address: bytes, secret: bytes) -> int:
    """How many descriptors are handed out."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(8)
        connection.connect(address)
        try:
            connection.sendall(secret)
            _, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
        except (BrokenPipeError, ConnectionResetError):
            return 0
    for descriptor in descriptors:
        os.close(descriptor)
    return len(descriptors)


def taken(address: bytes) -> int:
    """Return the number of bytes that the first process sends after it has connected."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(8)
        listener.bind(address)
        listener.listen()
        connection, _ = listener.accept()
        with connection:
            return len(connection.recv(100))


def with_transport() -> tuple[UsmTransport, HostMemory]:
    memory = HostMemory(4, LAYOUT.block_bytes)
    return UsmTransport(NodeFacts(A, Generation(1), memory, this_host()), TransferSettings()), memory


def test_another_user_gets_no_shared_memory_even_with_its_secret(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        transport, memory = with_transport()
        await transport.start()
        hello = Hello(
            protocol=1, instance=A, generation=Generation(2), layout=LAYOUT, host=this_host(), transports=["usm"]
        )
        wish = AttachRequest(hello, 0, (), memory, LAYOUT, LAYOUT, ChecksumCache())
        offer = (await transport.sender(wish, lambda _: None)).offer
        async with asyncio.timeout(40):
            assert await asyncio.to_thread(as_nobody, asked, offer.address, offer.secret) == 0
            assert await asyncio.to_thread(asked, offer.address, offer.secret) == 1
        await transport.close()
        memory.close()

    asyncio.run(body())
    assert f"shared memory was refused to a process of another user (uid {NOBODY})" in caplog.text


def test_no_secret_is_said_to_another_user_who_listens_under_a_producer_s_name() -> None:
    async def body() -> None:
        transport, memory = with_transport()
        address = b"\0baton-test-" + secrets.token_hex(8).encode()
        listening = asyncio.create_task(asyncio.to_thread(as_nobody, taken, address))
        offer, welcome = Offer("usm", address, b"s" * 32), cast(Welcome, None)
        async with asyncio.timeout(40):
            while not listening.done():
                with pytest.raises(TransportUnavailable) as refused:
                    await transport.attach(welcome, offer, ReceiveTarget(memory))
                if "another user" in str(refused.value):
                    break
                await asyncio.sleep(0.01)  # nobody listens yet
            assert await listening == 0
        assert f"a process of another user (uid {NOBODY}) listens at the producer's address" in str(refused.value)
        memory.close()

    asyncio.run(body())
