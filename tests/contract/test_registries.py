"""One test suite for each registry: the contract of `services.common.registry.port`."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_serve.bench.ports import free_port
from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord, Load
from baton_serve.services.common.errors import ConfigurationError, RegistryUnavailable, Superseded
from baton_serve.services.common.registry import (
    RegistryClient,
    RegistryView,
    check_registry_url,
    registry_client,
    registry_view,
)
from baton_serve.services.common.registry.memory_registry import MemoryRegistryView
from baton_serve.services.common.registry.redis_registry import RedisRegistryView, connect_redis
from tests.contract.redis_server import RedisServer
from tests.unit.router.fakes import record as made_up

TIMEOUT_S = 10.0
SHORT_TTL_S = 0.3
"""Of a record that has been seen: while it lives nothing is waited for, however busy the machine is."""
A = InstanceId("prefill-0")


def record(instance: str = A, generation: int = 1, free_blocks: int = 8) -> InstanceRecord:
    load = Load(free_blocks=free_blocks, total_blocks=8)
    return made_up(instance, "prefill", generation=generation, load=load)


@dataclass
class Watched:
    """A started view that can be waited for."""

    view: RegistryView
    changed: asyncio.Event
    num_changes: int = 0

    def note(self) -> None:
        self.num_changes += 1
        self.changed.set()

    async def until(self, is_so: Callable[[RegistryView], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_so(self.view):
                self.changed.clear()
                await self.changed.wait()

    def who(self) -> list[tuple[str, int]]:
        return [(found.instance, found.generation) for found in self.view.records()]


@dataclass
class Registry:
    """One backend: makes views and clients of it."""

    new_view: Callable[[], RegistryView]
    url: str

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Watched]:
        watched = Watched(self.new_view(), asyncio.Event())
        await watched.view.start(watched.note)
        if isinstance(watched.view, MemoryRegistryView):
            self.url = watched.view.url
        try:
            yield watched
        finally:
            await watched.view.close()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RegistryClient]:
        client = registry_client(self.url)
        try:
            yield client
        finally:
            await client.close()


def new_redis(tmp_path: Path) -> RedisServer:
    return RedisServer(tmp_path)


@pytest.fixture(params=["memory", "memory-ipc", pytest.param("redis", marks=pytest.mark.redis)])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    if request.param == "memory":
        yield Registry(lambda: registry_view("memory://127.0.0.1:0"), "")
        return
    if request.param == "memory-ipc":
        yield Registry(lambda: registry_view(f"memory:///@baton-test-{secrets.token_hex(8)}"), "")
        return
    server = new_redis(tmp_path)
    server.start()
    try:
        yield Registry(lambda: RedisRegistryView(server.url, refresh_s=0.05, grace_s=0.5), server.url)
    finally:
        server.kill()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def with_one(registry: Registry, body: Callable[[Watched, RegistryClient], Awaitable[None]]) -> None:
    """Runs `body` with a view and a client."""

    async def whole() -> None:
        async with registry.watched() as watched, registry.client() as client:
            await body(watched, client)

    run(whole())


def test_a_view_ends_at_once_however_early_it_is_closed(registry: Registry) -> None:
    async def body() -> None:
        for turns in range(8):
            view = registry.new_view()
            await view.start(lambda: None)
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(TIMEOUT_S):
                await view.close()

    run(body())


def test_a_registered_instance_is_seen(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        assert watched.view.is_connected()
        assert watched.view.records() == []
        await client.register(record(), 30)
        await watched.until(lambda view: view.records() == [record()])

    with_one(registry, body)


def test_records_are_ordered_by_instance(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        for name in ("c", "a", "b"):
            await client.register(record(name), 30)
        await watched.until(lambda view: len(view.records()) == 3)
        assert [name for name, _ in watched.who()] == ["a", "b", "c"]

    with_one(registry, body)


def test_an_instance_that_leaves_is_gone_at_once(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        await client.register(record(), 30)
        await watched.until(lambda view: bool(view.records()))
        await client.leave(A, Generation(1))
        await watched.until(lambda view: not view.records())

    with_one(registry, body)


def test_a_record_that_is_not_renewed_expires(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        await client.register(record(), 30)
        await watched.until(lambda view: bool(view.records()))
        await client.register(record(), SHORT_TTL_S)
        await watched.until(lambda view: not view.records())

    with_one(registry, body)


def test_a_renewal_keeps_a_record_and_refreshes_its_load_without_being_news(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        first_ttl_s = 2.0
        await client.register(record(), first_ttl_s)
        await client.register(record(), 30)
        await client.register(record("end-of-ttl"), 30)
        await watched.until(lambda view: len(view.records()) == 2)
        before = watched.num_changes
        await client.register(record(free_blocks=3), 30)
        await client.register(record("end-of-ttl"), first_ttl_s)
        await watched.until(lambda view: len(view.records()) == 1)
        assert watched.view.records()[0].load.free_blocks == 3
        assert watched.num_changes == before + 1

    with_one(registry, body)


def test_a_change_other_than_in_load_is_news(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        await client.register(record(), 30)
        await watched.until(lambda view: bool(view.records()))
        await client.register(msgspec.structs.replace(record(), draining=True), 30)
        await watched.until(lambda view: view.records()[0].draining)

    with_one(registry, body)


def test_a_newer_generation_replaces_the_older_one(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        await client.register(record(generation=9), 30)
        await client.register(record(generation=4), 30)
        await watched.until(lambda view: view.records() == [record(generation=4)])

    with_one(registry, body)


def test_a_stale_generation_neither_overwrites_nor_removes_a_newer_one(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        async with registry.client() as newer:
            await client.register(record(generation=9), 30)
            await watched.until(lambda view: bool(view.records()))
            await client.register(record(generation=9), SHORT_TTL_S)
            await watched.until(lambda view: not view.records())
            await newer.register(record(generation=4), 30)
            with pytest.raises(Superseded):
                await client.register(record(generation=9), 30)
            await client.leave(A, Generation(9))
            await client.register(record("b"), 30)
            await watched.until(lambda view: len(view.records()) == 2)
            assert watched.who() == [("b", 1), (A, 4)]

    with_one(registry, body)


def test_a_generation_that_has_left_stays_gone(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        await client.register(record(generation=9), 30)
        await client.leave(A, Generation(9))
        with pytest.raises(Superseded):
            await client.register(record(generation=9), 30)
        await client.register(record(generation=10), 30)
        await watched.until(lambda view: view.records() == [record(generation=10)])

    with_one(registry, body)


def test_leaving_twice_or_unknown_is_no_error(registry: Registry) -> None:
    async def body(watched: Watched, client: RegistryClient) -> None:
        await client.register(record(generation=2), 30)
        await client.leave(A, Generation(1))
        await client.leave(A, Generation(2))
        await client.leave(A, Generation(2))
        assert watched.view.is_connected()

    with_one(registry, body)


def test_a_registry_without_a_backend_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    async def body() -> None:
        for url in (f"unix://{tmp_path}/nothing.sock", "memory://127.0.0.1:9"):
            client = registry_client(url)
            with pytest.raises(RegistryUnavailable):
                await client.register(record(), 30)
            await client.close()

    run(body())


@pytest.mark.redis
def test_what_other_programs_write_to_redis_hides_no_instance(tmp_path: Path) -> None:
    server = new_redis(tmp_path)
    server.start()
    registry = Registry(lambda: RedisRegistryView(server.url), server.url)

    async def body(watched: Watched, client: RegistryClient) -> None:
        async with connect_redis(server.url) as other:
            await other.rpush("baton:instance:list", "a")
            await other.set("baton:instance:long", bytes(8 << 20))
            await other.set("baton:instance:broken", b"\xff\x00")
            await other.sadd("baton:instances", "list", "long", "broken", "none", b"\xff\xfe")
            await other.publish("baton:changes", b"left \xff\xfe \xff")
        await client.register(record(), 30)
        await watched.until(lambda view: len(view.records()) == 1)
        assert watched.view.is_connected() and watched.who() == [(A, 1)]
        assert isinstance(watched.view, RedisRegistryView)
        assert [task.get_name() for task in watched.view._tasks if task.done()] == [], "publications are still received"

    try:
        with_one(registry, body)
    finally:
        server.kill()


@pytest.mark.redis
def test_when_redis_is_lost_the_last_view_is_kept_and_recovery_is_automatic(tmp_path: Path) -> None:
    server = new_redis(tmp_path)
    server.start()
    registry = Registry(lambda: RedisRegistryView(server.url, refresh_s=0.05, grace_s=0.5), server.url)

    async def body(watched: Watched, client: RegistryClient) -> None:
        await client.register(record("stays"), 30)
        await client.register(record("dies"), 30)
        await watched.until(lambda view: len(view.records()) == 2)
        server.kill()
        await watched.until(lambda view: not view.is_connected())
        with pytest.raises(RegistryUnavailable):
            await client.register(record("stays"), 30)
        assert len(watched.view.records()) == 2
        server.start()
        await watched.until(lambda view: view.is_connected())
        assert len(watched.view.records()) == 2, "the emptied store must not empty the view at once"
        await client.register(record("stays"), 30)
        await watched.until(lambda view: len(view.records()) == 1)
        assert watched.who() == [("stays", 1)]

    try:
        with_one(registry, body)
    finally:
        server.kill()


@pytest.mark.redis
def test_a_view_started_without_redis_says_so_and_finds_it_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = new_redis(tmp_path)
    registry = Registry(lambda: RedisRegistryView(server.url, refresh_s=0.05), server.url)

    async def body(watched: Watched, client: RegistryClient) -> None:
        assert not watched.view.is_connected()
        assert [entry.levelname for entry in caplog.records] == ["WARNING"]
        assert "no instance is known" in caplog.text
        server.start()
        await client.register(record(), 30)
        await watched.until(lambda view: view.is_connected() and bool(view.records()))

    try:
        with_one(registry, body)
    finally:
        server.kill()


def test_instances_fill_a_restarted_router_s_registry_by_renewing() -> None:
    async def body() -> None:
        port = free_port()  # nobody is given it between the two
        first = Registry(lambda: registry_view(f"memory://127.0.0.1:{port}"), "")
        async with first.watched() as watched:
            client = registry_client(first.url)
            await client.register(record(), 30)
            await watched.until(lambda view: bool(view.records()))
        second = Registry(lambda: registry_view(first.url), "")
        async with second.watched() as watched, asyncio.timeout(3 * TIMEOUT_S):
            while not watched.view.records():
                with suppress(RegistryUnavailable):  # sent before it was seen that the first has gone
                    await client.register(record(), 30)
        await client.close()

    run(body())


@pytest.mark.parametrize(
    "url",
    [
        "memory://",
        "memory:///",
        "memory://host",
        "http://x:1",
        "",
        "memory://h:port",
        "redis:/host",
        "rediss://",
        "unix:",
    ],
)
def test_a_url_of_no_registry_is_refused_with_what_is_allowed(url: str) -> None:
    for make in (registry_client, registry_view, check_registry_url):
        with pytest.raises(ConfigurationError, match="use memory://HOST:PORT, redis://"):
            make(url)
