"""Start the processes of a router with `--workers`, restart each that exits or hangs, and stop them together.

The supervisor also holds their port and hosts their registry. It serves no requests (ADR 0009).
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from functools import partial
from math import ceil

import msgspec
import zmq

from baton_serve.child_command import module_command
from baton_serve.services.common.cluster_key import read_cluster_key
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.listener import bind_tcp
from baton_serve.services.common.process_lifecycle import Lifecycle, cancel_all
from baton_serve.services.common.process_supervisor import ProcessSupervisor, WatchRules, until_hung
from baton_serve.services.router.processes.registry_relay import RegistryRelay
from baton_serve.services.router.processes.sibling_rpc import RouterProcess, is_hung
from baton_serve.services.router.settings import RouterSettings

logger = logging.getLogger(__name__)

READY = b"ready\n"
"""Line that a router process writes to its standard output once it accepts requests."""
_MODULE = "baton_serve.services.router.processes.router_process"
_CLOSE_GRACE_S = 5.0
"""Time in seconds that a process gets after `--shutdown-timeout-s` to close its connections, before it is killed."""


class ProcessAssignment(msgspec.Struct, frozen=True):
    """The JSON that a router process reads from its standard input when it starts: its settings, and which of the
    router's processes it is.
    """

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
    """Reserve the port for this router's processes and return its number; the processes bind it with SO_REUSEPORT.

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
    """Start the relay for a registry in memory (`memory:`) and return it. Return None for Redis, which each process
    reads by itself.

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


class _RouterRun:
    """One router process from its start to its end. It is ready once it has printed `READY`, and is killed if it hangs
    after that.
    """

    def __init__(self, process: asyncio.subprocess.Process, name: str, socket: str, rules: WatchRules) -> None:
        """Watch `process`, which is called `name` in logs and answers queries at `socket` once it is ready. `rules` say
        when it counts as hung.
        """
        self.is_ready = False
        self.status: int | None = None
        self._process = process
        self._name = name
        self._socket = socket
        self._rules = rules
        self._watching: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        assert self._process.stdout is not None
        self.is_ready = await self._process.stdout.readline() == READY
        self._watching = asyncio.create_task(self._kill_if_hung())
        try:
            self.status = await self._process.wait()
        finally:
            await cancel_all([self._watching])

    async def _kill_if_hung(self) -> None:
        # The kernel goes on giving a stopped or blocked process its share of new connections, until it is killed.
        rules = self._rules
        await until_hung(partial(is_hung, self._socket), rules)
        logger.error(
            "%s has not answered %d queries of its supervisor within %g s each, so it is killed: it was stopped, or "
            "its event loop is blocked",
            self._name,
            rules.max_missed,
            rules.timeout_s,
        )
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        # A process that ends has `--shutdown-timeout-s`.
        if self._watching is not None and number == signal.SIGTERM:
            self._watching.cancel()
        with contextlib.suppress(ProcessLookupError):  # it has exited, but `wait` has not returned yet
            self._process.send_signal(number)


class RouterSupervisor(ProcessSupervisor[_RouterRun]):
    """Starts the processes of one router, restarts each that exits, and stops all of them at the end. Runs on the event
    loop.
    """

    def __init__(
        self,
        settings: RouterSettings,
        workers: list[RouterProcess],
        *,
        relay: RegistryRelay | None,
        rules: WatchRules | None = None,
    ) -> None:
        """Create the supervisor without starting a process. The caller owns `relay`, which is None if the registry is
        not a `memory:` one.
        """
        super().__init__()
        self._rules = rules or WatchRules()
        self._settings = settings
        self._workers = {f"router process {worker.index}": worker for worker in workers}
        self._relay = relay

    async def start(self) -> None:
        """Start all processes and return once each is ready. Raises `ConfigurationError` if one cannot start at all."""
        names = list(self._workers)
        # The first process starts alone: an error that stops all of them, such as a missing file, is logged only once.
        for group in (names[:1], names[1:]):
            self._keep_running(group)
            await self._wait_until(self._are_all_ready)

    async def stop(self) -> None:
        """Send SIGTERM to all processes and wait until they have finished their requests and exited.

        If the caller cancels this at its deadline, the remaining processes are killed.
        """
        await self._stop((self._workers, None))

    async def _are_all_ready(self) -> bool:
        return self.runs.keys() == self._tasks.keys() and all(run.is_ready for run in self.runs.values())

    def _report(self, text: str) -> None:
        logger.error("%s", text)

    def _given_up(self, name: str, run: _RouterRun) -> ConfigurationError:
        return ConfigurationError("the router's processes cannot start; see the error above")

    async def _spawn(self, name: str) -> _RouterRun:
        worker = self._workers[name]
        process = await self._create_process(worker)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has exited already, as `wait` shows
            process.stdin.write(msgspec.json.encode(self._assignment(worker)))
            await process.stdin.drain()
            process.stdin.close()
        if self._relay is not None:
            self._relay.send_all_records(worker.index)
        return _RouterRun(process, name, worker.socket(worker.index), self._rules)

    async def _create_process(self, worker: RouterProcess) -> asyncio.subprocess.Process:
        # Its own session keeps Ctrl-C of the terminal away from it: only the supervisor gets that signal and passes it
        # on, once. `die_with_parent` ends the process if the supervisor is killed and cannot end it.
        return await asyncio.create_subprocess_exec(
            *module_command("baton_serve.services.common.die_with_parent", str(os.getpid()), _MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    def _assignment(self, worker: RouterProcess) -> ProcessAssignment:
        """Return the settings for one process. The limits on all requests together are divided among the processes."""
        settings = self._settings
        own = msgspec.structs.replace(
            settings,
            registry=settings.registry if self._relay is None else worker.registry(),
            max_concurrent_requests=ceil(settings.max_concurrent_requests / worker.count),
            max_queued_tokens=ceil(settings.max_queued_tokens / worker.count),
        )
        return ProcessAssignment(msgspec.structs.asdict(own), worker)
