"""Fixtures: a router over a fake cluster, asked through its ASGI application."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton_serve.contracts.instance import Role
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.api.responses.kept_responses import KeptResponses
from baton_serve.services.router.app import create_app
from baton_serve.services.router.batch.batch_setup import Batches
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.http.gateway import Gateway
from baton_serve.services.router.main import (
    admission_control,
    prefill_fallback_after_s,
    request_policy,
    router_load,
)
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.requests.dispatcher import Dispatcher
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.pooling_dispatcher import PoolingDispatcher
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.served_model import ServedModel
from tests.unit.router.fakes import FakeCluster, record
from tests.unit.router.tokenizers_for_tests import write_folder


class Router:
    """A router whose instances are fakes, with a client."""

    def __init__(self, fakes: FakeCluster, settings: RouterSettings, model: ServedModel, keys: list[str]) -> None:
        self.fakes = fakes
        self.metrics = RouterMetrics(CollectorRegistry(), "tiny")
        self.cluster = Cluster(
            fakes, fakes, clock=time.monotonic, prefill_fallback_after_s=prefill_fallback_after_s(settings)
        )
        api_keys = ApiKeys(keys)
        self.admission = admission_control(settings, has_several_owners=api_keys.has_several_owners)
        self.dispatcher = Dispatcher(
            self.cluster,
            rules=request_policy(settings),
            admission=self.admission,
            metrics=self.metrics,
            clock=time.monotonic,
        )
        self.pooling = PoolingDispatcher(
            self.cluster,
            rules=request_policy(settings),
            admission=self.admission,
            metrics=self.metrics,
            clock=time.monotonic,
        )
        self.service = ModelService(
            settings,
            model=model,
            cluster=self.cluster,
            dispatcher=self.dispatcher,
            pooling=self.pooling,
            metrics=self.metrics,
            clock=time.monotonic,
        )
        self.kept = KeptResponses.of(settings)
        folder = settings.batch_folder
        self.batches = Batches(folder, settings, api_keys, clock=time.monotonic) if folder else None
        self.app: Gateway = create_app(
            self.service,
            api_keys=api_keys,
            kept=self.kept,
            batches=self.batches.api if self.batches else None,
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://router")

    async def start(self) -> None:
        await self.cluster.start()
        await settle()
        if self.batches is not None:
            endpoints = {path: row.app for path, row in self.app.table.items()}
            self.batches.start(
                endpoints,
                load=partial(router_load, self.app, self.cluster, [self.service]),
                owner=self.app.keys.named,
                bodies=self.app.bodies,
            )

    async def close(self) -> None:
        await self.http.aclose()
        await self.kept.close()
        if self.batches is not None:
            await self.batches.close()
        self.dispatcher.close()
        await self.cluster.close()

    async def complete(self, **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/completions", json={"seed": 0, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        answer = await self.http.post(path, json={"seed": 0, **body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.text)

    def check_idle(self) -> None:
        """Assert that ended requests have left nothing behind."""
        assert self.dispatcher.num_running == 0
        assert self.fakes.busy() == []
        for worker in self.cluster.workers():
            assert worker.load_estimates == {}
            worker.check_invariants()
        self.cluster.index.check_invariants()


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def settle(turns: int = 20) -> None:
    """Lets everything run that waits for nothing but its turn."""
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("router") / "tiny")


@pytest.fixture(scope="session")
def model(model_folder: Path) -> ServedModel:
    return ServedModel.from_settings(RouterSettings(model=str(model_folder)))


Serve = Callable[..., Any]


@pytest.fixture
def serve(model: ServedModel, model_folder: Path) -> Iterator[Serve]:
    """`serve(test)` runs `await test(router)` on one prefill and one decode instance."""

    @asynccontextmanager
    async def running(
        pools: dict[Role, int], keys: list[str], settings: dict[str, Any], pooling: PoolingProfile | None
    ) -> AsyncIterator[Router]:
        fakes = FakeCluster()
        for role, count in pools.items():
            for i in range(count):
                fakes.add(record(f"{role}-{i}", role, pooling=pooling))
        chosen = RouterSettings(model=str(model_folder), disaggregation_min_tokens=0, instance_wait_s=0.05)
        chosen = msgspec.structs.replace(chosen, **settings)
        router = Router(fakes, chosen, model, keys)
        await router.start()
        try:
            yield router
            await settle()
            router.check_idle()
        finally:
            await router.close()

    def run(
        test: Callable[[Router], Awaitable[None]],
        *,
        prefill: int = 1,
        decode: int = 1,
        unified: int = 0,
        keys: list[str] | None = None,
        pooling: PoolingProfile | None = None,
        **settings: Any,
    ) -> None:
        pools: dict[Role, int] = {"prefill": prefill, "decode": decode, "unified": unified}

        async def scenario() -> None:
            async with asyncio.timeout(10), running(pools, keys or [], settings, pooling) as router:
                await test(router)

        asyncio.run(scenario())

    yield run
