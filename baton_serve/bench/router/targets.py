"""Targets for load on routers: Baton's router with fake instances, other routers with fake servers, and a fake server
without any router.

Fake instances and servers run in this process and answer at once.
"""

import asyncio
import contextlib
import json
import shlex
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baton_serve.bench.listening import num_listening
from baton_serve.bench.ports import free_port
from baton_serve.bench.router.fake_instances import FakeInstance
from baton_serve.bench.router.fake_servers import FakeServer
from baton_serve.bench.router.http_load import HttpError, LoadConnection, post
from baton_serve.child_command import module_command
from baton_serve.contracts.instance import Role
from baton_serve.contracts.messages import Work

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "services" / "local" / "demo_model"
MODEL_NAME = "baton-demo"
ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
_START_S = 180.0


@dataclass(slots=True)
class RouterTarget:
    """A running router. `process` is None if the load goes directly to a fake server."""

    name: str
    port: int
    process: psutil.Process | None = None
    instances: list[FakeInstance] = field(default_factory=list)
    arrived: dict[str, float] = field(default_factory=dict)
    """Time at which the work of each request arrived at an instance, by the client's request ID."""

    def cpu_s(self) -> float:
        """Return the CPU seconds of the router's process and its descendants so far."""
        if self.process is None:
            return 0.0
        times = [one.cpu_times() for one in (self.process, *self.process.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))


def chat(text: str, *, max_tokens: int = 16, stream: bool = False, request_id: str | None = None) -> bytes:
    """Return a chat request, head and body."""
    body: dict[str, object] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": max_tokens, "temperature": 0, "stream": stream}
    headers = f"x-request-id: {request_id}\r\n" if request_id else ""
    return post("/v1/chat/completions", json.dumps(body).encode(), headers=headers)


@asynccontextmanager
async def baton(*, log_level: str, is_paced: bool = False, workers: int = 1) -> AsyncIterator[RouterTarget]:
    """Start Baton's router with four fake instances, and wait until it knows them. Its log goes to a temporary file."""
    arrived: dict[str, float] = {}

    def on_work(work: Work) -> None:
        arrived.setdefault(work.request_id.split("-")[1], time.perf_counter())

    port = free_port()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("ab") as log:
        registry = f"memory://{folder}/registry"
        command = module_command("baton_serve", "router", "--model", str(MODEL), "--port", str(port))
        command += ["--served-model-name", MODEL_NAME, "--registry", registry, "--log-level", log_level]
        command += ["--workers", str(workers)]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=log)
        fakes = [
            FakeInstance(f"{role}-{i}", role, MODEL_NAME, on_work, is_paced=is_paced) for i, role in enumerate(ROLES)
        ]
        try:
            for fake in fakes:
                await fake.start(registry)
            router = psutil.Process(process.pid)
            await _wait_until_all_are_known(router, port, workers)
            yield RouterTarget("Baton", port, router, fakes, arrived)
        finally:
            for fake in fakes:
                await fake.close()
            await _stop(process)


@asynccontextmanager
async def others(peers: list[str]) -> AsyncIterator[list[RouterTarget]]:
    """Start the other targets. The first is `direct`, a fake server in a process of its own, so that a request wakes
    another process and back as with a router. Then `peers`, each given as `NAME=COMMAND` in which `{port}`,
    `{servers}`, `{server_list}` (separated by commas) and `{models}` (one name per server) are replaced."""
    servers = [FakeServer(MODEL_NAME) for _ in ROLES]
    async with AsyncExitStack() as stack:
        found = [RouterTarget("direct", await stack.enter_async_context(_server_apart()))]
        for server in servers:
            await server.start()
            stack.callback(server.close)
        urls = [f"http://127.0.0.1:{server.port}" for server in servers]
        for peer in peers:
            name, _, command = peer.partition("=")
            port = free_port()
            names = {"port": port, "servers": " ".join(urls), "server_list": ",".join(urls)}
            filled = command.format(**names, models=",".join([MODEL_NAME] * len(urls)))
            process = await asyncio.create_subprocess_exec(
                *shlex.split(filled), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
            stack.push_async_callback(_stop, process)
            await _wait_until_answered(name, port, process)
            found.append(RouterTarget(name, port, psutil.Process(process.pid)))
        yield found


@asynccontextmanager
async def _server_apart() -> AsyncIterator[int]:
    """Start a fake server in a process of its own and yield its port."""
    pipe = asyncio.subprocess.PIPE
    command = module_command("baton_serve.bench.router.fake_servers", MODEL_NAME)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_START_S):
            port = int(await process.stdout.readline())
        yield port
    finally:
        await _stop(process)


async def _wait_until_all_are_known(router: psutil.Process, port: int, workers: int) -> None:
    """Wait until each router process knows all instances. A connection reaches a random one of the processes that
    listen; if many in a row know all instances, then all processes do. Raises `TimeoutError`."""
    deadline, in_a_row = time.monotonic() + _START_S, 1 if workers == 1 else 16 * workers
    while time.monotonic() < deadline:
        if num_listening(router, port) == workers and await _knows_all(port, in_a_row):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the router was not ready within {_START_S:g} s")


async def _knows_all(port: int, num_times: int) -> bool:
    """Return whether `num_times` new connections in a row reach a process that knows all instances."""
    with contextlib.suppress(OSError, HttpError):
        for _ in range(num_times):
            connection = await LoadConnection.open(port)
            health = json.loads(await connection.ask(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"))
            connection.close()
            if len(health["instances"]) < len(ROLES):
                return False
        return True
    return False


async def _wait_until_answered(name: str, port: int, process: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.returncode is None:
        with contextlib.suppress(OSError, HttpError):
            connection = await LoadConnection.open(port)
            await connection.ask(chat("Are you there?"))
            connection.close()
            return
        await asyncio.sleep(0.2)
    raise SystemExit(f"baton-bench router: {name} did not answer within {_START_S:g} s")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
    await process.wait()
