"""Starts, watches and stops a local cluster, and decides when it is ready, a process is hung, or all must end.

It runs no model and no server itself. Whether the cluster is ready is read from the router's /health.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from baton_serve.services.common.errors import ConfigurationError, LocalError
from baton_serve.services.common.process_lifecycle import EXIT_HOPELESS, cancel_all
from baton_serve.services.common.process_supervisor import ProcessSupervisor, WatchRules, end_reason, until_hung
from baton_serve.services.common.restart_policy import HANG_WINDOW_S, MAX_HANGS, HangPolicy
from baton_serve.services.local.child import Child, Console, without_program
from baton_serve.services.local.launches import ForkLauncher, ProgramLauncher
from baton_serve.services.local.plan import Process

if TYPE_CHECKING:
    import httpx

ROUTER = "router"
MODULE = "baton_serve.services.cli"
"""The module that every process runs: the command line of Baton."""
ROUTER_AFTER_S = 3.0
"""Time beyond `drain_s` for which the router keeps running if instances have not ended. Then it stops too, and its last
requests end."""
STOP_DEADLINE_S = 25.0
"""Time from the router's SIGTERM until processes that still run are killed."""


class ProcessLostError(LocalError):
    """A process of a local cluster failed too often and is not restarted any more."""


class _Health(msgspec.Struct, frozen=True):
    """The part of the router's /health that the supervisor reads."""

    pools: dict[str, int]
    """Number of instances of each role that accept requests. Unlike the list of instances it needs no API key."""


@dataclass(frozen=True, slots=True)
class ClusterTimeouts:
    """The time limits of a local cluster, in seconds."""

    start_s: float = 1800.0
    """Longest time until a restarted instance is ready."""
    drain_s: float = 30.0
    """Time that instances give running requests at the stop."""
    # With --workers one process of the router may hang until its own supervisor restarts it, after three missed
    # queries. More are needed here, so that this supervisor does not restart the whole router meanwhile.
    router: WatchRules = field(default_factory=lambda: WatchRules(max_missed=6))
    """When the router counts as hung: after about 40 s."""


class ClusterSupervisor(ProcessSupervisor[Child]):
    """Starts, watches and stops the processes of one local cluster. All methods run on the event loop. Its base class
    `ProcessSupervisor` starts a process again when it has died.

    `processes` has the router first. With `forks`, instances are forked from the fork server. Until all processes have
    been ready once, a process that keeps failing ends the start with an error. After that every process that dies is
    restarted, without a limit, unless its device keeps hanging (`HangPolicy`). A restarted instance that is not ready
    within `timeouts.start_s` counts as hung, and is killed. So is a router that accepts connections and does not answer
    (`timeouts.router`).
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
        timeouts: ClusterTimeouts | None = None,
    ) -> None:
        super().__init__()
        self._processes = {process.name: process for process in processes}
        self._instances = [name for name in self._processes if name != ROUTER]
        self._console = console
        self._url = url
        self._programs = ProgramLauncher(module)
        self._forks = forks
        self._hangs = HangPolicy()
        self._timeouts = timeouts or ClusterTimeouts()
        self._environ = environ
        self._watching: asyncio.Task[None] | None = None
        """Kills the last run of the router if it hangs."""
        self._has_served = False
        self._start_error: str | None = None

    def start(self) -> None:
        """Start the router now, and the instances now or as soon as the fork server is ready."""
        # The router does not need torch, so it starts while the fork server imports it.
        self._keep_running([ROUTER])
        if self._forks is None:
            self._keep_running(self._instances)
        else:
            self._forks.warm_up(lambda: self._keep_running(self._instances))

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every instance of the cluster is ready.

        Raises `ConfigurationError` if a process cannot start or `timeout_s` seconds are over, and `ProcessLostError` if
        a process keeps failing. The message contains the last line that the process printed.
        """
        # The import takes a tenth of a second. It runs here, so that the processes are started before it.
        import httpx

        try:
            async with asyncio.timeout(timeout_s), httpx.AsyncClient(verify=False, timeout=5.0) as client:
                await self._wait_until(lambda: self._is_complete(client))
        except TimeoutError:
            waiting = [name for name, child in self.runs.items() if not child.is_ready and name != ROUTER]
            raise ConfigurationError(
                f"not ready within {timeout_s:g} s: {', '.join(waiting) or ROUTER}; see the log above,"
                " or allow more time with --start-timeout-s"
            ) from None
        self._has_served = True

    @property
    def stop_s(self) -> float:
        """Return the longest time in seconds that `stop` takes."""
        return self._timeouts.drain_s + ROUTER_AFTER_S + STOP_DEADLINE_S

    async def stop(self) -> None:
        """Stop the instances, which finish their requests, then the router. Kill the processes that still run after
        `STOP_DEADLINE_S` seconds more.
        """
        if any(child.status is None for child in self.runs.values()):
            left = f"running streams have up to {self._timeouts.drain_s:g} s left (--drain-timeout-s)"
            self._report(f"stopping: {left}; press Ctrl-C again to stop at once")
        await self._end_watch()  # a router that ends accepts no more connections
        # The router must outlive the draining instances: it passes the tokens of their requests on.
        await self._stop((self._instances, self._timeouts.drain_s + ROUTER_AFTER_S), ([ROUTER], STOP_DEADLINE_S))

    async def _spawn(self, name: str) -> Child:
        launch = self._programs if name == ROUTER or self._forks is None else self._forks
        child = Child(
            self._processes[name],
            launch=launch,
            console=self._console,
            environ=self._environ,
            # During the start `_given_up` returns this error, so that it is printed once.
            holds_error=not self._has_served,
        )
        if name == ROUTER:
            await self._end_watch()
            self._watching = asyncio.create_task(self._kill_if_hung(child), name="watch of the router")
        # `wait_ready` limits the first start, and the router prints no line when it is ready.
        if self._has_served and name != ROUTER:
            asyncio.get_running_loop().call_later(self._timeouts.start_s, self._check_ready, child)
        return child

    async def _end_watch(self) -> None:
        if self._watching is not None:
            await cancel_all([self._watching])

    async def _kill_if_hung(self, router: Child) -> None:
        rules = self._timeouts.router
        await until_hung(self._is_router_hung, rules)
        self._report(
            f"the router has not answered {rules.max_missed} queries within {rules.timeout_s:g} s each, so it is "
            "killed: it was stopped, or its event loop is blocked"
        )
        router.signal(signal.SIGKILL)

    async def _is_router_hung(self, timeout_s: float) -> bool:
        """Return whether the router accepts a connection but does not answer within `timeout_s` seconds."""
        import httpx

        try:
            async with asyncio.timeout(timeout_s), httpx.AsyncClient(verify=False, timeout=timeout_s) as client:
                await client.get(f"{self._url}/ping")
        except (TimeoutError, httpx.TimeoutException):
            return True
        except httpx.TransportError:  # it starts, ends or refuses a connection
            return False
        return False

    def _check_ready(self, child: Child) -> None:
        """Kill the restarted instance `child` if it is still not ready after its time limit: a card that hung may also
        hang while a model is loaded.
        """
        if child.status is None and not child.is_ready and not self._stopping.is_set():
            waited = f"{child.name} is not ready within {self._timeouts.start_s:g} s (--start-timeout-s)"
            self._report(f"{waited} and is killed")
            child.is_killed_unready = True
            child.signal(signal.SIGKILL)

    def _is_starting(self, name: str) -> bool:
        return not self._has_served

    def _report(self, text: str) -> None:
        self._console.line("serve", text)

    def _taken_out(self, name: str, run: Child) -> LocalError | None:
        # Instances on the CPU are counted one by one: it is their code that hangs, and the others must go on.
        device = self._processes[name].device or f"the CPU of {name}"
        if not run.has_hung or not self._hangs.must_take_out(device, asyncio.get_running_loop().time()):
            return None
        message = (
            f"{device} is taken out: its instances hung {MAX_HANGS} times within {HANG_WINDOW_S / 60:g} minutes, so"
            f" {name} is not started again. Check the device (dmesg, `baton doctor`), then restart baton serve"
        )
        self._report(message)
        return ProcessLostError(message)

    def _given_up(self, name: str, run: Child) -> LocalError:
        # The last line that a process printed usually says why it ended.
        reason = run.last_line() or end_reason(run)
        if run.status == EXIT_HOPELESS:
            # The first of these errors ends the start and is printed then; another process may have a different one.
            if self._start_error is not None and without_program(reason) != self._start_error:
                self._report(f"{name} cannot start: {without_program(reason)}")
            self._start_error = self._start_error or without_program(reason)
            return ConfigurationError(f"{name} cannot start: {without_program(reason)}")
        self._report(f"{name} keeps failing ({end_reason(run)}) and is not restarted any more. Its last lines:")
        for line in run.recent_lines:
            self._report(f"  {line}")
        return ProcessLostError(f"{name} keeps failing: {reason}")

    async def _is_complete(self, client: "httpx.AsyncClient") -> bool:
        """Return whether the router answers and counts all instances as ready."""
        import httpx

        try:
            answer = await client.get(f"{self._url}/health")
            health = msgspec.json.decode(answer.content, type=_Health)
        except (httpx.TransportError, msgspec.DecodeError):
            return False
        # The router prints no line when it is ready, as instances do; its first answer shows it.
        self.runs[ROUTER].is_ready = True
        return sum(health.pools.values()) == len(self._instances) and self.runs.keys() == self._processes.keys()
