"""Supervises the processes of a local cluster: starts them, restarts them when they die, and stops them in order.

It runs no model and no server itself. Whether the cluster is ready is read from the router's /health.
"""

import asyncio
import contextlib
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from baton_serve.services.common.errors import ConfigurationError, LocalError
from baton_serve.services.common.lifecycle import EXIT_HOPELESS, RestartPolicy
from baton_serve.services.local.child import Child, Console
from baton_serve.services.local.launches import ForkLauncher, ProgramLauncher
from baton_serve.services.local.plan import Process

if TYPE_CHECKING:
    import httpx

ROUTER = "router"
MODULE = "baton_serve.services.cli"
"""The module that every process runs: the command line of Baton."""
_POLL_S = 0.1
"""Time between two looks at the router's /health while the cluster starts."""
ROUTER_AFTER_S = 3.0
"""Time for which the router keeps running while instances drain. Then it stops too, and its last requests end."""
STOP_DEADLINE_S = 25.0
"""Time from the router's SIGTERM until processes that still run are killed."""


class ProcessLostError(LocalError):
    """A process failed too often and is not restarted any more."""


class _ReadyInstance(msgspec.Struct, frozen=True):
    """One instance in the router's /health."""

    instance: str
    total_blocks: int = 0


class _Health(msgspec.Struct, frozen=True):
    """The part of the router's /health that the supervisor reads."""

    instances: list[_ReadyInstance]


class Supervisor:
    """Owns the processes of one local cluster. All methods run on the event loop.

    `processes` has the router first. With `forks`, instances are forked from its server. Until all processes have been
    ready once, a process that keeps failing ends the start with an error. After that every process that dies is
    restarted, without a limit.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        *,
        console: Console,
        url: str,
        environ: Mapping[str, str],
        module: str = MODULE,
        forks: ForkLauncher | None = None,
    ) -> None:
        self._processes = {process.name: process for process in processes}
        self._console = console
        self._url = url
        self._programs = ProgramLauncher(module)
        self._forks = forks
        self.children: dict[str, Child] = {}
        self._restarts = {name: RestartPolicy() for name in self._processes}
        self._environ = environ
        self._has_served = False
        self._is_stopping = False
        self._changed = asyncio.Event()
        self._error: LocalError | None = None

    def start(self) -> None:
        """Start the router now, and the instances now or as soon as the fork server is ready."""
        if self._forks is None:
            self._spawn_all(self._processes)
            return
        # The router does not need torch, so it starts while the fork server imports it.
        self._spawn_all([ROUTER])
        instances = [name for name in self._processes if name != ROUTER]
        self._forks.warm_up(lambda: self._spawn_all(instances))

    def _spawn_all(self, names: Iterable[str]) -> None:
        for name in names:
            self._spawn(name)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every instance is ready.

        Raises `ConfigurationError` if a process cannot start or the time is over, and `ProcessLostError` if a process
        keeps failing. The message contains the last line that the process printed.
        """
        # The import takes a tenth of a second. It runs here, so that the processes are started before it.
        import httpx

        deadline = asyncio.get_running_loop().time() + timeout_s
        async with httpx.AsyncClient(verify=False, timeout=5.0) as client:
            while not await self._is_complete(client):
                if self._error is not None:
                    raise self._error
                if asyncio.get_running_loop().time() > deadline:
                    waiting = [name for name, child in self.children.items() if not child.is_ready and name != ROUTER]
                    raise ConfigurationError(
                        f"not ready within {timeout_s:g} s: {', '.join(waiting) or ROUTER}; see the log above,"
                        " or allow more time with --start-timeout-s"
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait()
                self._changed.clear()
        self._has_served = True
        for restarts in self._restarts.values():
            restarts.has_served = True

    async def stop(self) -> None:
        """Stop the instances, which finish their requests, then the router. After `STOP_DEADLINE_S` kill the rest."""
        self._is_stopping = True
        instances = [child for name, child in self.children.items() if name != ROUTER]
        router = [child for name, child in self.children.items() if name == ROUTER]
        if any(child.status is None for child in [*instances, *router]):
            self._console.line("serve", "stopping after the running requests; press Ctrl-C again to stop at once")
        try:
            _signal(instances, signal.SIGTERM)
            # The router must outlive the draining instances for a moment: it passes the tokens of their requests on.
            await _wait(instances, ROUTER_AFTER_S)
            _signal(router, signal.SIGTERM)
            await _wait([*instances, *router], STOP_DEADLINE_S)
        finally:
            # Also reached on cancellation, after a second Ctrl-C: no process may be left behind.
            for child in [*instances, *router]:
                if child.status is None:
                    self._console.line("serve", f"{child.name} did not exit in time and is killed")
                    child.signal(signal.SIGKILL)
            await _wait([*instances, *router], 3.0)

    def _spawn(self, name: str) -> None:
        if not self._is_stopping:
            self.children[name] = Child(
                self._processes[name],
                launch=self._programs if name == ROUTER or self._forks is None else self._forks,
                console=self._console,
                environ=self._environ,
                on_end=lambda: self._ended(name),
            )

    def _ended(self, name: str) -> None:
        self._changed.set()
        child = self.children[name]
        if self._is_stopping:
            return
        # With this status the process reports that a restart cannot help: a bad flag, a broken model, a port in use.
        if not self._has_served and child.status == EXIT_HOPELESS:
            self._fail(ConfigurationError(f"{name} cannot start: {_reason(child)}"))
            return
        loop = asyncio.get_running_loop()
        delay_s = self._restarts[name].next_delay_s(lived_s=loop.time() - child.started_at, has_served=child.is_ready)
        if delay_s is None:
            self._give_up(name, child)
            return
        self._console.line("serve", f"{name} has died ({child.end_reason()}) and is restarted in {delay_s:g} s")
        loop.call_later(delay_s, self._spawn, name)

    def _give_up(self, name: str, child: Child) -> None:
        self._console.line(
            "serve", f"{name} keeps failing ({child.end_reason()}) and is not restarted any more. Its last lines:"
        )
        for line in child.recent_lines:
            self._console.line("serve", f"  {line}")
        self._fail(ProcessLostError(f"{name} keeps failing: {_reason(child)}"))

    def _fail(self, error: LocalError) -> None:
        """Keep the first error, which `wait_ready` raises. Later errors usually follow from it."""
        self._error = self._error or error

    async def _is_complete(self, client: "httpx.AsyncClient") -> bool:
        """Return whether the router answers and lists all instances as ready."""
        import httpx

        try:
            answer = await client.get(f"{self._url}/health")
            health = msgspec.json.decode(answer.content, type=_Health)
        except (httpx.TransportError, msgspec.DecodeError):
            return False
        # The router prints no line when it is ready, as instances do; its first answer shows it.
        self._restarts[ROUTER].has_served = True
        return len(health.instances) == len(self._processes) - 1 and self.children.keys() == self._processes.keys()


def _signal(children: Sequence[Child], number: int) -> None:
    for child in children:
        child.signal(number)


async def _wait(children: Sequence[Child], timeout_s: float) -> None:
    """Wait until all of `children` have exited, or until the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for child in children:
                await child.ended.wait()


def _reason(child: Child) -> str:
    """Return why a process ended, as well as its output shows it."""
    return child.last_line() or child.end_reason()
