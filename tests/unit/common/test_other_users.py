"""A process of another user of this machine cannot do anything at the sockets between Baton's processes."""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import Load
from baton_serve.contracts.messages import LoadReport, ToInstance, ToRouter
from baton_serve.services.common.cluster_key import ClusterKey, cluster_key, read_cluster_key
from baton_serve.services.common.errors import RegistryUnavailable
from baton_serve.services.common.registry import registry_client, registry_view
from baton_serve.services.common.registry.memory_registry import MemoryRegistryView
from baton_serve.services.common.rpc.connections import ANY_UNIX_SOCKET
from baton_serve.services.common.rpc.instance_link import InstanceLink, InstanceServer, RouterId
from baton_serve.services.local.main import new_key_file
from tests.contract.test_registries import record
from tests.other_user import NOBODY, as_nobody, needs_root

REPORT = LoadReport(instance=InstanceId("d"), generation=Generation(1), load=Load(free_blocks=1, total_blocks=1))


def bounded(body: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(40):
            await body()

    asyncio.run(whole())


async def connected(address: str) -> str:
    """Connect to `address` and return `served`, or the reason why the link was lost."""
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(what: str) -> None:
        if not found.done():
            found.set_result(what)

    def on_message(message: ToRouter) -> None:
        end("served")

    link = InstanceLink(address, on_message=on_message, on_lost=end, timeout_s=15.0)
    await link.start()
    try:
        return await found
    finally:
        await link.close()


def connect(address: str) -> str:
    return asyncio.run(connected(address))


def listen(name: str) -> bytes:
    """Return the first bytes of the first process that connects."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(8)
        listener.bind(f"\0{name}")
        listener.listen()
        connection, _ = listener.accept()
        with connection:
            return connection.recv(100)


async def register(url: str, key: ClusterKey | None) -> None:
    client = registry_client(url, key)
    try:
        await client.register(record(), 30.0)
    finally:
        await client.close()


def is_refused(url: str, key: ClusterKey | None) -> bool:
    try:
        asyncio.run(register(url, key))
    except RegistryUnavailable:
        return True
    return False


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except PermissionError:
        return "refused"


async def start(server: InstanceServer, received: list[ToInstance]) -> None:
    """Each message is answered."""

    def on_message(router: RouterId, message: ToInstance) -> None:
        received.append(message)
        server.send(router, REPORT)

    await server.start(on_message, lambda _: None)


def test_a_link_over_a_unix_socket_serves_processes_of_the_same_user() -> None:
    async def body() -> None:
        server = InstanceServer(ANY_UNIX_SOCKET, key=cluster_key("k" * 32))
        await start(server, [])
        assert server.address.startswith("ipc://@baton-")
        assert await connected(server.address) == "served"
        await server.close()

    bounded(body)


def test_no_two_servers_take_the_same_name() -> None:
    async def body() -> None:
        servers = [InstanceServer(ANY_UNIX_SOCKET) for _ in range(2)]
        for server in servers:
            await start(server, [])
        assert servers[0].address != servers[1].address
        for server in servers:
            await server.close()

    bounded(body)


def test_a_name_in_use_is_an_error() -> None:
    async def body() -> None:
        first = InstanceServer(ANY_UNIX_SOCKET)
        await start(first, [])
        with pytest.raises(OSError, match="in use"):
            await start(InstanceServer(first.address), [])
        await first.close()

    bounded(body)


@needs_root
def test_another_user_can_send_an_instance_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        server = InstanceServer(ANY_UNIX_SOCKET)
        received: list[ToInstance] = []
        await start(server, received)
        assert await asyncio.to_thread(as_nobody, connect, server.address) == "the connection broke"
        assert not received
        assert await connected(server.address) == "served"
        await server.close()

    bounded(body)
    assert f"another user (uid {NOBODY})" in caplog.text


@needs_root
def test_a_router_says_nothing_to_another_user_who_listens_under_an_instance_s_name() -> None:
    """An instance has ended, so its name is free."""

    async def body() -> None:
        name = f"baton-test-{secrets.token_hex(8)}"
        listening = asyncio.create_task(asyncio.to_thread(as_nobody, listen, name))
        assert await connected(f"ipc://@{name}") == f"the peer is a process of another user (uid {NOBODY})"
        assert await listening == b""

    bounded(body)


@needs_root
@pytest.mark.parametrize("key", [None, cluster_key("k" * 32)], ids=["without a key", "with a key"])
def test_another_user_cannot_register_an_instance(key: ClusterKey | None, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        url = f"memory:///@baton-test-{secrets.token_hex(8)}"
        view = registry_view(url, key)
        await view.start(lambda: None)
        assert await asyncio.to_thread(as_nobody, is_refused, url, key)
        assert view.records() == []
        await register(url, key)
        assert len(view.records()) == 1
        await view.close()

    bounded(body)
    assert "a connection to the registry is refused: a process of another user" in caplog.text


def test_who_has_not_the_key_is_refused_by_the_registry_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        view = MemoryRegistryView("tcp://127.0.0.1:0", key=cluster_key("k" * 32))
        await view.start(lambda: None)
        for key in (None, cluster_key("x" * 32)):
            client = registry_client(view.url, key)
            with pytest.raises(RegistryUnavailable):
                await client.register(record(), 30.0)
            await client.close()
        assert view.records() == []
        await view.close()

    bounded(body)
    assert "a connection to the registry is refused" in caplog.text  # the reason depends on who closes first


def test_each_start_has_a_key_of_its_own_that_nobody_can_change() -> None:
    path, other = new_key_file(), new_key_file()
    assert read_cluster_key(path) == read_cluster_key(path) != read_cluster_key(other)
    with pytest.raises(PermissionError), Path(path).open("r+b", buffering=0) as file:
        file.write(b"x" * 64)


@needs_root
def test_another_user_cannot_read_the_key() -> None:
    assert as_nobody(read, new_key_file()) == "refused"
