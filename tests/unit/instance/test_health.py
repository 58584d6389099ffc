"""The answer of an instance to probes."""

import asyncio

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton_serve.services.instance.health import create_app
from tests.unit.instance.test_operators import HEALTH


async def do_nothing(exit_afterwards: bool) -> None:
    """Stand in for a drain."""


@pytest.mark.parametrize(("status", "code"), [("ok", 200), ("draining", 200), ("failed", 503)])
def test_a_failed_instance_is_not_alive_for_probes(status: str, code: int) -> None:
    health = msgspec.structs.replace(HEALTH, status=status)
    app = create_app(lambda: health, CollectorRegistry(), drain=do_nothing, key=None)

    async def probe() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://instance") as client:
            return await client.get("/health")

    answer = asyncio.run(probe())
    assert (answer.status_code, answer.json()["status"]) == (code, status)
