"""Keeps the processes of a local cluster running: starts them, restarts those that die, ends them in order.

Hosts nothing itself; whether the cluster serves is read from the router's /health.
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
_POLL_S = 0.1
ROUTER_AFTER_S = 3.0
"""So long the router serves on while instances drain; then it stops too, and what still runs there ends."""
STOP_DEADLINE_S = 25.0


class ProcessLostError(LocalError):
    """A process was given up."""


class _ReadyInstance(msgspec.Struct, frozen=True):
    instance: str
    total_blocks: int = 0


class _Health(msgspec.Struct, frozen=True):
    instances: list[_ReadyInstance]


class Supervisor:
    """`processes` has the router first; the others are forked where `forks` can be. Once all of them have been ready
    the cluster is never ended from here: a process that dies then is started again, however often."""

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
        if self._forks is None:
            self._spawn_all(self._processes)
            return
        self._spawn_all([ROUTER])  # it needs nothing that the others wait for
        instances = [name for name in self._processes if name != ROUTER]
        self._forks.warm_up(lambda: self._spawn_all(instances))

    def _spawn_all(self, names: Iterable[str]) -> None:
        for name in names:
            self._spawn(name)

    async def wait_ready(self, timeout_s: float) -> None:
        """Until every instance serves. Raises `ConfigurationError` with the reason of a process that cannot start."""
        import httpx  # a tenth of a second, for which what has been started should not wait

        deadline = asyncio.get_running_loop().time() + timeout_s
        async with httpx.AsyncClient(verify=False, timeout=5.0) as client:
            while not await self._is_complete(client):
                if self._error is not None:
                    raise self._error
                if asyncio.get_running_loop().time() > deadline:
                    waiting = [name for name, child in self.children.items() if not child.is_ready and name != ROUTER]
                    raise ConfigurationError(
                        f"not ready within {timeout_s:g} s: {', '.join(waiting) or ROUTER} (--start-timeout-s)"
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait()
                self._changed.clear()
        self._has_served = True
        for restarts in self._restarts.values():
            restarts.has_served = True

    async def stop(self) -> None:
        """Instances finish what runs, then the router; what is left after the deadline is killed."""
        self._is_stopping = True
        instances = [child for name, child in self.children.items() if name != ROUTER]
        router = [child for name, child in self.children.items() if name == ROUTER]
        if any(child.status is None for child in [*instances, *router]):
            self._console.line("serve", "stopping; what runs may end first (Ctrl-C again: at once)")
        try:
            _signal(instances, signal.SIGTERM)
            await _wait(instances, ROUTER_AFTER_S)
            _signal(router, signal.SIGTERM)
            await _wait([*instances, *router], STOP_DEADLINE_S)
        finally:
            for child in [*instances, *router]:
                if child.status is None:
                    self._console.line("serve", f"{child.name} has not ended in time and is killed")
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
        if not self._has_served and child.status == EXIT_HOPELESS:
            self._fail(ConfigurationError(f"{name} cannot start: {_reason(child)}"))
            return
        loop = asyncio.get_running_loop()
        delay_s = self._restarts[name].next_delay_s(lived_s=loop.time() - child.started_at, has_served=child.is_ready)
        if delay_s is None:
            self._give_up(name, child)
            return
        self._console.line("serve", f"{name} has died ({child.end_reason()}); it starts again in {delay_s:g} s")
        loop.call_later(delay_s, self._spawn, name)

    def _give_up(self, name: str, child: Child) -> None:
        self._console.line("serve", f"{name} keeps failing ({child.end_reason()}) and is given up. Its last lines:")
        for line in child.recent_lines:
            self._console.line("serve", f"  {line}")
        self._fail(ProcessLostError(f"{name} keeps failing: {_reason(child)}"))

    def _fail(self, error: LocalError) -> None:
        """The first reason counts. `wait_ready` raises it."""
        self._error = self._error or error

    async def _is_complete(self, client: "httpx.AsyncClient") -> bool:
        import httpx

        try:
            answer = await client.get(f"{self._url}/health")
            health = msgspec.json.decode(answer.content, type=_Health)
        except (httpx.TransportError, msgspec.DecodeError):
            return False
        self._restarts[ROUTER].has_served = True
        return len(health.instances) == len(self._processes) - 1 and self.children.keys() == self._processes.keys()


def _signal(children: Sequence[Child], number: int) -> None:
    for child in children:
        child.signal(number)


async def _wait(children: Sequence[Child], timeout_s: float) -> None:
    """Until all have ended, or the time is up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for child in children:
                await child.ended.wait()


def _reason(child: Child) -> str:
    return child.last_line() or child.end_reason()
