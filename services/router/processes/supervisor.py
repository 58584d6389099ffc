"""Keeps the workers of one router: holds their port and their registry, starts them, starts again those that die, and
ends them together. Serves no request itself.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from math import ceil

import msgspec
import zmq

from baton_serve.child_command import module_command
from baton_serve.services.common.cluster_key import read_cluster_key
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.listening import bind_tcp
from baton_serve.services.common.lifecycle import EXIT_HOPELESS, Lifecycle, RestartPolicy
from baton_serve.services.router.processes.registry_relay import RegistryRelay
from baton_serve.services.router.processes.sibling_rpc import RouterProcess
from baton_serve.services.router.settings import RouterSettings

logger = logging.getLogger(__name__)

READY = b"ready\n"
_MODULE = "baton_serve.services.router.processes.process"
_CLOSE_GRACE_S = 5.0


class ProcessAssignment(msgspec.Struct, frozen=True):
    """What a worker reads from its standard input. `settings` by name; they have been checked."""

    settings: dict[str, object]
    worker: RouterProcess


async def start_router_processes(settings: RouterSettings, lifecycle: Lifecycle) -> None:
    """Returns when all of them serve. Raises `ConfigurationError`."""
    folder = tempfile.mkdtemp(prefix="baton-router-")

    async def remove_folder() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    lifecycle.on_stop("folder of the workers", remove_folder)
    settings = msgspec.structs.replace(settings, port=_hold_port(settings, lifecycle))
    workers = [RouterProcess(index, settings.workers, folder) for index in range(settings.workers)]
    relay = await _start_relay(settings, workers, lifecycle)
    supervisor = RouterSupervisor(settings, workers, relay=relay)
    grace_s = settings.shutdown_timeout_s + _CLOSE_GRACE_S
    lifecycle.on_stop("workers", supervisor.stop, deadline_s=grace_s)
    await supervisor.start()


def _hold_port(settings: RouterSettings, lifecycle: Lifecycle) -> int:
    """Shared from now on. Raises `ConfigurationError` when somebody else has it: a shared bind would not tell."""
    with bind_tcp(settings.host, settings.port) as probe:
        port: int = probe.getsockname()[1]
    held = bind_tcp(settings.host, port, shares_port=True, listens=False)

    async def release() -> None:
        held.close()

    lifecycle.on_stop("port", release)
    return port


async def _start_relay(
    settings: RouterSettings, workers: list[RouterProcess], lifecycle: Lifecycle
) -> RegistryRelay | None:
    """None where workers look into a registry of its own."""
    if not settings.registry.startswith("memory:"):
        return None
    key = read_cluster_key(settings.cluster_key_file)
    relay = RegistryRelay(settings.registry, [worker.registry() for worker in workers], key=key)
    try:
        await relay.start()
    except zmq.ZMQError as exc:
        raise ConfigurationError(f"cannot host the registry at {settings.registry}: {exc.strerror}") from exc
    lifecycle.on_stop("registry", relay.close)
    return relay


class RouterSupervisor:
    def __init__(self, settings: RouterSettings, workers: list[RouterProcess], *, relay: RegistryRelay | None) -> None:
        self._settings = settings
        self._workers = workers
        self._relay = relay
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def start(self) -> None:
        """The first one alone, so that what keeps all of them from starting is said once."""
        for group in (self._workers[:1], self._workers[1:]):
            ready = [asyncio.get_running_loop().create_future() for _ in group]
            self._tasks += [
                asyncio.create_task(self._keep_running(worker, first), name=f"worker-{worker.index}")
                for worker, first in zip(group, ready, strict=True)
            ]
            await asyncio.gather(*ready)

    async def stop(self) -> None:
        """They finish what runs. Those that do not are killed."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)
        try:
            await asyncio.gather(*(process.wait() for process in self._running.values()))
        finally:
            self._signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep_running(self, worker: RouterProcess, first: "asyncio.Future[None]") -> None:
        """Runs it again and again. `first` is told of its first start, or why there is none."""
        loop, restarts = asyncio.get_running_loop(), RestartPolicy()
        while not self._is_stopping:
            started_at = loop.time()
            process = self._running[worker.index] = await self._spawn(worker)
            is_ready = await self._until_ready(process, worker)
            if is_ready and not first.done():
                first.set_result(None)
            status = await process.wait()
            del self._running[worker.index]
            if self._is_stopping:
                return
            delay_s = restarts.next_delay_s(lived_s=loop.time() - started_at, has_served=is_ready)
            if not first.done() and (status == EXIT_HOPELESS or delay_s is None):
                first.set_exception(ConfigurationError("no worker can start; what keeps it is said above"))
                return
            assert delay_s is not None, "a worker that has been ready is never given up"
            logger.error("worker %d has died (status %d); it starts again in %g s", worker.index, status, delay_s)
            await asyncio.sleep(delay_s)

    async def _spawn(self, worker: RouterProcess) -> asyncio.subprocess.Process:
        # In a session of its own, so that Ctrl-C reaches this process alone and a worker hears of it once.
        return await asyncio.create_subprocess_exec(
            *module_command("baton_serve.services.common.die_with_parent", str(os.getpid()), _MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def _until_ready(self, process: asyncio.subprocess.Process, worker: RouterProcess) -> bool:
        """False: it ended before."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(msgspec.json.encode(self._assignment(worker)))
            await process.stdin.drain()
            process.stdin.close()
        if self._relay is not None:
            self._relay.send_all_records(worker.index)
        return await process.stdout.readline() == READY

    def _assignment(self, worker: RouterProcess) -> ProcessAssignment:
        """Bounds of all requests together are divided."""
        settings = self._settings
        own = msgspec.structs.replace(
            settings,
            registry=settings.registry if self._relay is None else worker.registry(),
            max_concurrent_requests=ceil(settings.max_concurrent_requests / worker.count),
            max_queued_tokens=ceil(settings.max_queued_tokens / worker.count),
        )
        return ProcessAssignment(msgspec.structs.asdict(own), worker)
