"""Both ends of the connection between a router and an instance, over real sockets on loopback."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton_serve.bench.ports import free_port
from baton_serve.contracts.identity import Generation, InstanceId, RequestId
from baton_serve.contracts.instance import Load
from baton_serve.contracts.messages import Cancel, Heartbeat, LoadReport, ToInstance, Tokens, ToRouter
from baton_serve.contracts.wire import encode
from baton_serve.services.common.cluster_key import ClusterKey, cluster_key
from baton_serve.services.common.rpc.framing import PREAMBLE, frame
from baton_serve.services.common.rpc.instance_link import InstanceLink, InstanceServer, RouterId

REPORT = LoadReport(instance=InstanceId("decode-0"), generation=Generation(1), load=Load(free_blocks=1, total_blocks=1))


class Instance:
    """A server that answers heartbeats unless it is muted."""

    def __init__(self, router_timeout_s: float, key: ClusterKey | None) -> None:
        self.server = InstanceServer(router_timeout_s=router_timeout_s, key=key)
        self.received: asyncio.Queue[tuple[RouterId, ToInstance]] = asyncio.Queue()
        self.lost: asyncio.Queue[RouterId] = asyncio.Queue()
        self.is_mute = False

    def on_message(self, router: RouterId, message: ToInstance) -> None:
        if not isinstance(message, Heartbeat):
            self.received.put_nowait((router, message))
        elif not self.is_mute:
            self.server.send(router, REPORT)


class Router:
    def __init__(
        self, address: str, key: ClusterKey | None, *, heartbeat_s: float = 0.05, timeout_s: float = 5.0
    ) -> None:
        self.received: asyncio.Queue[ToRouter] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.link = InstanceLink(
            address,
            on_message=self.received.put_nowait,
            on_lost=self.lost.put_nowait,
            heartbeat_s=heartbeat_s,
            timeout_s=timeout_s,
            key=key,
        )


@pytest.fixture(params=[None, cluster_key("k" * 32)], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> ClusterKey | None:
    """The cluster's key, or None for connections without encryption."""
    found: ClusterKey | None = request.param
    return found


def run(body: Callable[[Instance, Router], Awaitable[None]], key: ClusterKey | None) -> None:
    async def whole() -> None:
        instance = Instance(5.0, key)
        await instance.server.start(instance.on_message, instance.lost.put_nowait)
        router = Router(instance.server.address, key)
        await router.link.start()
        async with asyncio.timeout(10):
            await body(instance, router)
        await router.link.close()
        await instance.server.close()

    asyncio.run(whole())


def test_messages_go_both_ways_in_order(key: ClusterKey | None) -> None:
    async def body(instance: Instance, router: Router) -> None:
        for number in range(2000):
            router.link.send(Cancel(RequestId(str(number))))
        for number in range(2000):
            sender, message = await instance.received.get()
            assert message == Cancel(RequestId(str(number)))
            instance.server.send(
                sender, Tokens(request_id=RequestId("r"), sequence=0, position=number, token_ids=[number])
            )
        positions: list[int] = []
        while len(positions) < 2000:
            answer = await router.received.get()
            if isinstance(answer, Tokens):
                positions.append(answer.position)
        assert positions == list(range(2000))

    run(body, key)


def test_a_link_is_ready_with_the_first_load_report(key: ClusterKey | None) -> None:
    async def body(instance: Instance, router: Router) -> None:
        assert not router.link.is_ready
        assert await router.received.get() == REPORT
        assert router.link.is_ready

    run(body, key)


def test_an_instance_that_ends_is_lost_at_once_and_once(key: ClusterKey | None) -> None:
    async def body(instance: Instance, router: Router) -> None:
        await router.received.get()
        await instance.server.close()
        assert await router.lost.get() == "the connection broke"
        router.link.send(Cancel(RequestId("r")))
        assert router.lost.empty() and router.link.is_lost and not router.link.is_ready

    run(body, key)


def test_an_instance_that_falls_silent_is_lost(key: ClusterKey | None) -> None:
    async def whole() -> None:
        instance = Instance(5.0, key)
        instance.is_mute = True
        await instance.server.start(instance.on_message, instance.lost.put_nowait)
        router = Router(instance.server.address, key, timeout_s=0.2)
        await router.link.start()
        async with asyncio.timeout(10):
            assert await router.lost.get() == "no message for 0.2 s"
        await router.link.close()
        await instance.server.close()

    asyncio.run(whole())


def test_a_router_that_falls_silent_is_lost(key: ClusterKey | None) -> None:
    async def whole() -> None:
        instance = Instance(0.2, key)
        await instance.server.start(instance.on_message, instance.lost.put_nowait)
        router = Router(instance.server.address, key, heartbeat_s=60)
        await router.link.start()
        async with asyncio.timeout(10):
            lost = await instance.lost.get()
        assert lost not in instance.server.routers()
        await router.link.close()
        await instance.server.close()

    asyncio.run(whole())


def test_a_lost_router_gets_no_more_messages_and_closes_its_connection(key: ClusterKey | None) -> None:
    """It was only busy, and would wait for ever for what has been given up here."""

    async def whole() -> None:
        instance = Instance(0.2, key)
        await instance.server.start(instance.on_message, instance.lost.put_nowait)
        router = Router(instance.server.address, key, heartbeat_s=0.6, timeout_s=1.0)
        await router.link.start()
        async with asyncio.timeout(10):
            assert await router.received.get() == REPORT
            await instance.lost.get()
            router.link.send(Cancel(RequestId("r")))
            assert await router.lost.get() == "no message for 1 s"
        assert instance.received.empty() and instance.lost.empty()
        await router.link.close()
        await instance.server.close()

    asyncio.run(whole())


def test_sending_a_message_to_a_lost_router_reports_it(key: ClusterKey | None) -> None:
    async def body(instance: Instance, router: Router) -> None:
        router.link.send(Cancel(RequestId("r")))
        sender, _ = await instance.received.get()
        await router.link.close()
        while instance.lost.empty():
            instance.server.send(sender, REPORT)
            await asyncio.sleep(0)
        assert await instance.lost.get() == sender

    run(body, key)


def test_a_link_connects_once_an_instance_listens(key: ClusterKey | None) -> None:
    async def whole() -> None:
        instance = Instance(5.0, key)
        port = free_port()
        instance.server.address = f"tcp://127.0.0.1:{port}"
        router = Router(f"tcp://127.0.0.1:{port}", key)
        await router.link.start()
        router.link.send(Cancel(RequestId("early")))
        await asyncio.sleep(0.05)
        await instance.server.start(instance.on_message, instance.lost.put_nowait)
        async with asyncio.timeout(10):
            assert (await instance.received.get())[1] == Cancel(RequestId("early"))
            assert await router.received.get() == REPORT
        await router.link.close()
        await instance.server.close()

    asyncio.run(whole())


def test_only_a_router_with_the_clusters_key_can_connect() -> None:
    async def whole() -> None:
        server = InstanceServer(key=cluster_key("k" * 32))
        received: asyncio.Queue[ToInstance] = asyncio.Queue()

        def on_message(router: RouterId, message: ToInstance) -> None:
            received.put_nowait(message)
            server.send(router, REPORT)

        await server.start(on_message, lambda _: None)
        reasons = {
            cluster_key("k" * 32): "",
            cluster_key("x" * 32): "the peer has another key (--cluster-key-file)",
            None: "the connection broke",
        }
        for key, reason in reasons.items():
            answers: asyncio.Queue[ToRouter] = asyncio.Queue()
            lost: asyncio.Queue[str] = asyncio.Queue()
            link = InstanceLink(
                server.address, on_message=answers.put_nowait, on_lost=lost.put_nowait, timeout_s=5.0, key=key
            )
            await link.start()
            async with asyncio.timeout(10):
                if not reason:
                    assert await answers.get() == REPORT
                else:
                    assert await lost.get() == reason
                    assert answers.empty()
            await link.close()
        await server.close()

    asyncio.run(whole())


def test_messages_that_are_none_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        server, received = InstanceServer(), asyncio.Event()
        await server.start(lambda router, message: received.set(), lambda router: None)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
        writer.write(PREAMBLE + frame(b"") * 1000 + frame(b"\xc1 no MessagePack") + frame(encode(Heartbeat())))
        assert await reader.readexactly(len(PREAMBLE)) == PREAMBLE
        await received.wait()
        writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert len([record for record in caplog.records if "cannot be decoded" in record.message]) == 1
