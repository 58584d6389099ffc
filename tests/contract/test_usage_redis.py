"""Limits of keys over several routers, with a real Redis that is also lost, restarted empty and fenced by an ACL."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.services.common.errors import RegistryUnavailable
from baton_serve.services.common.registry import registry_client, registry_view
from baton_serve.services.common.registry.redis_registry import connect_redis
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.quota.usage_exchange import UsageExchange
from baton_serve.services.router.quota.usage_limits import UsageLedger
from baton_serve.services.router.quota.usage_redis import RedisUsageStore
from tests.contract.redis_server import RedisServer
from tests.unit.router.fakes import record

pytestmark = pytest.mark.redis

NOW = 1_700_000_000.0
CALLER = Caller(name="team-a", requests_per_minute=3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path)
    running.start()
    yield running
    running.kill()


def router(url: str) -> tuple[UsageLedger, UsageExchange]:
    ledger = UsageLedger()
    return ledger, UsageExchange(ledger, RedisUsageStore(url), wall_clock=lambda: NOW)


def test_two_routers_share_a_limit_also_after_redis_was_lost(server: RedisServer) -> None:
    async def scenario() -> None:
        (one, of_one), (two, of_two) = router(server.url), router(server.url)
        assert one.admit(CALLER, tokens=5, now=NOW) is None
        assert two.admit(CALLER, tokens=5, now=NOW) is None
        for exchange in (of_one, of_two, of_one):
            await exchange.exchange()
        assert [u.requests for u in one.used(CALLER, NOW)] == [2, 2]
        server.kill()
        assert one.admit(CALLER, tokens=5, now=NOW) is None, "counted here while nobody can be asked"
        await of_one.exchange()
        assert one.admit(CALLER, tokens=5, now=NOW) is not None
        server.start()
        for exchange in (of_one, of_two, of_one, of_two):
            await exchange.exchange()
        for ledger in (one, two):
            assert [u.requests for u in ledger.used(CALLER, NOW)] == [3, 3], "an empty store got all counts again"
        assert two.admit(CALLER, tokens=5, now=NOW) is not None
        await of_one.close()
        await of_two.close()

    asyncio.run(scenario())


def test_a_user_who_may_touch_nothing_but_baton_is_enough(server: RedisServer) -> None:
    rules = "on >hush ~baton:* &baton:* +@read +@write +@scripting +@pubsub +@connection".split()

    async def scenario() -> None:
        admin = connect_redis(server.url)
        await admin.execute_command("ACL", "SETUSER", "baton", "reset", *rules)  # type: ignore[no-untyped-call]
        url = server.url.replace("unix://", "unix://baton:hush@")
        ledger, exchange = router(url)
        assert ledger.admit(CALLER, tokens=5, now=NOW) is None
        await exchange.exchange()
        view, client = registry_view(url), registry_client(url)
        is_seen = asyncio.Event()
        await view.start(lambda: is_seen.set() if view.records() else None)
        await client.register(record("decode-0", "decode"), 10.0)
        async with asyncio.timeout(5):
            await is_seen.wait()
        await client.leave(InstanceId("decode-0"), Generation(1))
        wrong = registry_client(server.url.replace("unix://", "unix://baton:wrong@"))
        with pytest.raises(RegistryUnavailable):
            await wrong.register(record("decode-1", "decode"), 10.0)
        for closing in (view.close(), client.close(), wrong.close(), exchange.close(), admin.aclose()):
            await closing

    asyncio.run(scenario())
