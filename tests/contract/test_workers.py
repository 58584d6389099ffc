"""`baton router --workers 2` as real processes, over instances without engines: one port, one registry, one answer to
what is asked of the router as a whole.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.bench.listening import num_listening
from baton_serve.bench.ports import free_port
from baton_serve.bench.router.fake_instances import FakeInstance
from baton_serve.contracts.identity import InstanceId
from baton_serve.services.common.registry import RegistryView, registry_client, registry_view
from baton_serve.services.router.processes.registry_relay import RegistryRelay
from tests.e2e.cluster import ROOT, environment
from tests.unit.router.fakes import record

pytestmark = pytest.mark.slow
TIMEOUT_S = 60.0
MODEL = ROOT / "services" / "local" / "demo_model"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


async def until(fact: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await fact():  # noqa: ASYNC110 - other processes have no events
            await asyncio.sleep(0.05)


@dataclass
class Router:
    url: str
    process: asyncio.subprocess.Process
    fakes: list[FakeInstance]
    registry: str

    async def ask(self, path: str = "/v1/chat/completions", body: object = CHAT) -> httpx.Response:
        """Over a connection of its own, so that any worker may get it."""
        async with httpx.AsyncClient(timeout=20.0) as client:
            return await (client.post(self.url + path, json=body) if body else client.get(self.url + path))

    async def serves(self) -> bool:
        try:
            answer = await self.ask("/health", None)
        except httpx.TransportError:
            return False
        return len(answer.json()["instances"]) == len(self.fakes)

    async def generated(self) -> dict[str, float]:
        """Return the number of generated tokens by router process."""
        families = text_string_to_metric_families((await self.ask("/metrics", None)).text)
        (family,) = (family for family in families if family.name == "vllm:generation_tokens")
        return {sample.labels["worker"]: sample.value for sample in family.samples}

    def workers(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children())

    async def all_serve(self) -> bool:
        """Two workers that listen and know all instances: a connection meets either."""
        port = int(self.url.rpartition(":")[2])
        is_crew_whole = num_listening(psutil.Process(self.process.pid), port) == 2
        return is_crew_whole and all([await self.serves() for _ in range(20)])


@asynccontextmanager
async def router(folder: str, *args: str) -> AsyncIterator[Router]:
    registry, port = f"memory://{folder}/registry", free_port()
    command = [sys.executable, "-m", "baton_serve", "router", "--model", str(MODEL), "--workers", "2"]
    command += ["--registry", registry, "--port", str(port), *args]
    with (Path(folder) / "log").open("ab") as log:
        env = environment() | {"TMPDIR": folder}
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdout=log, stderr=log)
    fakes = [FakeInstance(f"decode-{i}", "decode", "demo", lambda work: None) for i in range(2)]
    try:
        for fake in fakes:
            await fake.start(registry)
        yield Router(f"http://127.0.0.1:{port}", process, fakes, registry)
    finally:
        for fake in fakes:
            await fake.close()
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        status = await process.wait()
        print((Path(folder) / "log").read_text())  # noqa: T201 - pytest shows it with a failure
    assert status == 0
    assert not [left for left in os.listdir(folder) if left.startswith("baton-router-")]


def test_two_workers_answer_as_one_router_and_one_that_is_killed_comes_back() -> None:
    async def run(folder: str) -> None:
        async with router(folder) as one:
            await until(one.all_serve)
            answers = await asyncio.gather(*(one.ask() for _ in range(24)))
            assert [answer.status_code for answer in answers] == [200] * 24
            await until(lambda: _tells_of(one, 24))
            made = await one.generated()
            assert all(made[worker] > 0 for worker in ("0", "1"))

            killed = one.workers()[0]
            killed.kill()
            await until(lambda: _other_than(one, killed.pid))
            await until(one.all_serve)
            assert {answer.status_code for answer in await asyncio.gather(*(one.ask() for _ in range(8)))} == {200}

            client = registry_client(one.registry)
            await client.register(record("decode-9", "decode"), 60.0)
            await client.leave(InstanceId("decode-9"), record("decode-9", "decode").generation)
            await client.close()
            await until(one.all_serve)

    with tempfile.TemporaryDirectory(prefix="b") as folder:
        asyncio.run(run(folder))


def test_a_router_process_that_is_stopped_is_replaced() -> None:
    async def run(folder: str) -> None:
        async with router(folder) as one:
            await until(one.all_serve)
            stopped = one.workers()[0]
            stopped.suspend()
            await until(lambda: _other_than(one, stopped.pid))
            await until(one.all_serve)
            assert {answer.status_code for answer in await asyncio.gather(*(one.ask() for _ in range(8)))} == {200}
        assert "has not answered 3 queries of its supervisor" in (Path(folder) / "log").read_text()

    with tempfile.TemporaryDirectory(prefix="b") as folder:
        asyncio.run(run(folder))


async def _tells_of(one: Router, requests: int) -> bool:
    """Return whether a router process whose sibling does not answer reports only its own requests."""
    made = sum((await one.generated()).values())
    health = (await one.ask("/health", None)).json()["generated_tokens"]
    return (made, health, len((await one.ask("/recent", None)).json())) == (4 * requests, 4 * requests, requests)


async def _other_than(one: Router, pid: int) -> bool:
    return len(one.workers()) == 2 and pid not in [worker.pid for worker in one.workers()]


def test_what_keeps_workers_from_starting_is_said_and_ends_the_router() -> None:
    async def run(folder: str) -> tuple[int | None, str]:
        command = [sys.executable, "-m", "baton_serve", "router", "--model", folder, "--workers", "2"]
        process = await asyncio.create_subprocess_exec(
            *command, "--registry", f"memory://{folder}/registry", "--port", str(free_port()),
            cwd=ROOT, env=environment(), stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        return process.returncode, said.decode()

    with tempfile.TemporaryDirectory(prefix="b") as folder:
        status, said = asyncio.run(run(folder))
    assert status == 2
    assert said.count("tokenizer.json") == 1
    assert said.endswith("baton router: the router's processes cannot start; see the error above\n")


def test_every_router_process_gets_the_url_of_the_common_registry() -> None:
    async def run(folder: str) -> None:
        url, own = f"memory://{folder}/all", [f"memory://{folder}/{index}" for index in range(2)]
        views = [registry_view(one) for one in own]
        relay = RegistryRelay(url, own)
        await relay.start()
        await views[0].start(lambda: None)
        client = registry_client(url)
        try:
            await client.register(record("prefill-0", "prefill"), 60.0)
            await client.register(record("decode-0", "decode"), 60.0)
            await until(_knows(views[0], ["decode-0", "prefill-0"]))
            await views[1].start(lambda: None)  # one that starts later
            relay.send_all_records(1)
            await until(_knows(views[1], ["decode-0", "prefill-0"]))
            await client.leave(InstanceId("decode-0"), record("decode-0", "decode").generation)
            for view in views:
                await until(_knows(view, ["prefill-0"]))
        finally:
            await client.close()
            await relay.close()
            for view in views:
                await view.close()

    with tempfile.TemporaryDirectory(prefix="b") as folder:
        asyncio.run(run(folder))


def _knows(view: RegistryView, names: list[str]) -> Callable[[], Awaitable[bool]]:
    async def fact() -> bool:
        return [found.instance for found in view.records()] == names

    return fact
