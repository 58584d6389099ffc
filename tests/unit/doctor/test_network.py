"""Reaching the registry and the peers."""

import asyncio

from baton_serve.bench.ports import free_port
from baton_serve.services.doctor.findings import Finding
from baton_serve.services.doctor.network import check_network


async def found(registry: str = "", *peers: str) -> list[Finding]:
    return [finding async for finding in check_network(registry, list(peers))]


def test_nothing_named_is_nothing_checked() -> None:
    assert asyncio.run(found()) == []


def test_a_listener_answers() -> None:
    async def ask() -> list[Finding]:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await found("", f"127.0.0.1:{port}")

    (finding,) = asyncio.run(ask())
    assert finding.status == "ok"


def test_a_closed_port_is_a_problem() -> None:
    (finding,) = asyncio.run(found("", f"127.0.0.1:{free_port()}"))
    assert finding.status == "problem" and finding.remedy


def test_an_invalid_address_is_reported() -> None:
    (finding,) = asyncio.run(found("", "somewhere"))
    assert "HOST:PORT" in finding.message


def test_the_router_that_hosts_the_registry_is_a_peer() -> None:
    (finding,) = asyncio.run(found(f"memory://127.0.0.1:{free_port()}"))
    assert finding.check == "peers"


def test_a_redis_that_is_away_is_a_problem_without_its_password() -> None:
    (finding,) = asyncio.run(found(f"redis://:hush@127.0.0.1:{free_port()}/0"))
    assert finding.status == "problem"
    assert "hush" not in finding.message + finding.remedy
