"""Supervise the processes of a router with `--workers`: start them, restart each that exits, and stop them together.

The supervisor also holds their port and hosts their registry. It serves no requests (ADR 0009).
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
from baton_serve.services.common.http.listener import bind_tcp
from baton_serve.services.common.lifecycle import EXIT_HOPELESS, Lifecycle, RestartPolicy
from baton_serve.services.router.processes.registry_relay import RegistryRelay
from baton_serve.services.router.processes.sibling_rpc import RouterProcess
from baton_serve.services.router.settings import RouterSettings

logger = logging.getLogger(__name__)

READY = b"ready\n"
"""Line that a router process writes to its standard output once it accepts requests."""
_MODULE = "baton_serve.services.router.processes.process"
_CLOSE_GRACE_S = 5.0
"""Time in seconds that a process gets after `--shutdown-timeout-s` to close its connections, before it is killed."""


class ProcessAssignment(msgspec.Struct, frozen=True):
    """The JSON that a router process reads from its standard input when it starts."""

    settings: dict[str, object]
    """Values of `RouterSettings` by name. The supervisor has checked them already."""
    worker: RouterProcess


async def start_router_processes(settings: RouterSettings, lifecycle: Lifecycle) -> None:
    """Start all processes of a router and return once each of them accepts requests; `lifecycle` ends them later.

    Raises `ConfigurationError` if the port or the registry's address is in use, or if no process can start.
    """
    folder = tempfile.mkdtemp(prefix="baton-router-")

    async def remove_folder() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    lifecycle.on_stop("folder of the router processes", remove_folder)
    # With `--port 0` the system chooses the port: all processes must get the number that it chose.
    settings = msgspec.structs.replace(settings, port=_hold_port(settings, lifecycle))
    workers = [RouterProcess(index, settings.workers, folder) for index in range(settings.workers)]
    relay = await _start_relay(settings, workers, lifecycle)
    supervisor = RouterSupervisor(settings, workers, relay=relay)
    grace_s = settings.shutdown_timeout_s + _CLOSE_GRACE_S
    lifecycle.on_stop("router processes", supervisor.stop, deadline_s=grace_s)
    await supervisor.start()


def _hold_port(settings: RouterSettings, lifecycle: Lifecycle) -> int:
    """Reserve the port for this router's processes and return its number; they bind it with SO_REUSEPORT.

    Raises `ConfigurationError` if another program uses the port.
    """
    # First bind without sharing: with SO_REUSEPORT the bind would succeed even if another router of this user had the
    # port, and the two would get each other's connections.
    with bind_tcp(settings.host, settings.port) as probe:
        port: int = probe.getsockname()[1]
    # This socket keeps the port while a process restarts. It does not listen, or the kernel would give it connections.
    held = bind_tcp(settings.host, port, shares_port=True, listens=False)

    async def release() -> None:
        held.close()

    lifecycle.on_stop("port", release)
    return port


async def _start_relay(
    settings: RouterSettings, workers: list[RouterProcess], lifecycle: Lifecycle
) -> RegistryRelay | None:
    """Start the relay of a `memory:` registry. Return None for Redis, which each process reads by itself.

    Raises `ConfigurationError` if the registry's address is in use.
    """
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
    """Starts the processes of one router, restarts each that exits, and stops them. Runs on the event loop."""

    def __init__(self, settings: RouterSettings, workers: list[RouterProcess], *, relay: RegistryRelay | None) -> None:
        """Create it. The caller owns `relay`, which is None if the registry is not of the `memory:` kind."""
        self._settings = settings
        self._workers = workers
        self._relay = relay
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def start(self) -> None:
        """Start all processes and return once each is ready. Raises `ConfigurationError` if one cannot start at all."""
        # The first process starts alone: an error that stops all of them, such as a missing file, is logged only once.
        for group in (self._workers[:1], self._workers[1:]):
            ready = [asyncio.get_running_loop().create_future() for _ in group]
            self._tasks += [
                asyncio.create_task(self._keep_running(worker, first), name=f"worker-{worker.index}")
                for worker, first in zip(group, ready, strict=True)
            ]
            await asyncio.gather(*ready)

    async def stop(self) -> None:
        """Send SIGTERM to all processes and wait until they have finished their requests.

        If the caller cancels this at its deadline, the remaining processes are killed.
        """
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
            with contextlib.suppress(ProcessLookupError):  # it has exited, but `_keep_running` has not noticed yet
                process.send_signal(number)

    async def _keep_running(self, worker: RouterProcess, first: "asyncio.Future[None]") -> None:
        """Run one process and restart it whenever it exits, until the router stops.

        `first` gets a result once the process is ready for the first time, or a `ConfigurationError` if it never is.
        """
        loop, restarts = asyncio.get_running_loop(), RestartPolicy()
        while not self._is_stopping:
            started_at = loop.time()
            process = self._running[worker.index] = await self._spawn(worker)
            if self._is_stopping:
                # `stop` sent its signal before this process existed. It has no requests yet, so it need not finish any.
                process.kill()
            is_ready = await self._until_ready(process, worker)
            if is_ready and not first.done():
                first.set_result(None)
            status = await process.wait()
            del self._running[worker.index]
            if self._is_stopping:
                return
            delay_s = restarts.next_delay_s(lived_s=loop.time() - started_at, has_served=is_ready)
            if not first.done() and (status == EXIT_HOPELESS or delay_s is None):
                first.set_exception(ConfigurationError("the router's processes cannot start; see the error above"))
                return
            assert delay_s is not None, "a process that has been ready is never given up"
            logger.error(
                "router process %d exited with status %d; restarting it in %g s", worker.index, status, delay_s
            )
            await asyncio.sleep(delay_s)

    async def _spawn(self, worker: RouterProcess) -> asyncio.subprocess.Process:
        # Its own session keeps Ctrl-C of the terminal away from it: only the supervisor gets that signal and passes it
        # on, once. `die_with_parent` ends the process if the supervisor is killed and cannot end it.
        return await asyncio.create_subprocess_exec(
            *module_command("baton_serve.services.common.die_with_parent", str(os.getpid()), _MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def _until_ready(self, process: asyncio.subprocess.Process, worker: RouterProcess) -> bool:
        """Send a process its assignment and wait until it is ready. Return False if it exited before."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has exited already: `readline` shows it
            process.stdin.write(msgspec.json.encode(self._assignment(worker)))
            await process.stdin.drain()
            process.stdin.close()
        if self._relay is not None:
            self._relay.send_all_records(worker.index)
        return await process.stdout.readline() == READY

    def _assignment(self, worker: RouterProcess) -> ProcessAssignment:
        """Return the settings of one process: the limits on all requests together are divided among the processes."""
        settings = self._settings
        own = msgspec.structs.replace(
            settings,
            registry=settings.registry if self._relay is None else worker.registry(),
            max_concurrent_requests=ceil(settings.max_concurrent_requests / worker.count),
            max_queued_tokens=ceil(settings.max_queued_tokens / worker.count),
        )
        return ProcessAssignment(msgspec.structs.asdict(own), worker)
