"""The supervisor of processes, with runs that end when the test says so."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import pytest

from baton_serve.services.common.errors import ConfigurationError, LocalError
from baton_serve.services.common.process_lifecycle import EXIT_HOPELESS
from baton_serve.services.common.process_supervisor import ProcessSupervisor, end_reason
from baton_serve.services.common.restart_policy import MAX_FAILED_STARTS


class FakeRun:
    """A process that exits on a signal, unless it ignores SIGTERM."""

    def __init__(self, *, ignores_sigterm: bool = False) -> None:
        self.is_ready = False
        self.status: int | None = None
        self.signals: list[int] = []
        self._ignores_sigterm = ignores_sigterm
        self._ended = asyncio.Event()

    def end(self, status: int) -> None:
        self.status = status
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL or not self._ignores_sigterm:
            self.end(-number)


class FakeSupervisor(ProcessSupervisor[FakeRun]):
    def __init__(self, make_run: Callable[[str], FakeRun]) -> None:
        super().__init__()
        self.make_run = make_run
        self.spawned: asyncio.Queue[FakeRun] = asyncio.Queue()
        self.reports: list[str] = []

    async def _spawn(self, name: str) -> FakeRun:
        run = self.make_run(name)
        self.spawned.put_nowait(run)
        return run

    def _report(self, text: str) -> None:
        self.reports.append(text)

    def _given_up(self, name: str, run: FakeRun) -> LocalError:
        return ConfigurationError(f"{name}: {end_reason(run)}")

    async def wait_until_given_up(self) -> None:
        async def never() -> bool:
            return False

        await self._wait_until(never)

    def run_all(self, *names: str) -> None:
        self._keep_running(names)

    async def stop(self, *groups: tuple[list[str], float | None]) -> None:
        await self._stop(*groups)


def dies_with(status: int, *, is_ready: bool = False) -> Callable[[str], FakeRun]:
    def make_run(name: str) -> FakeRun:
        run = FakeRun()
        run.is_ready = is_ready
        run.end(status)
        return run

    return make_run


def supervise(make_run: Callable[[str], FakeRun], body: Callable[[FakeSupervisor], Awaitable[None]]) -> FakeSupervisor:
    async def scenario() -> FakeSupervisor:
        supervisor = FakeSupervisor(make_run)
        async with asyncio.timeout(10):
            await body(supervisor)
        return supervisor

    return asyncio.run(scenario())


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MIN_DELAY_S", 0.001)
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MAX_DELAY_S", 0.001)


def test_a_process_that_never_becomes_ready_is_given_up_after_some_starts() -> None:
    async def body(supervisor: FakeSupervisor) -> None:
        supervisor.run_all("a")
        with pytest.raises(ConfigurationError, match="a: status 1"):
            await supervisor.wait_until_given_up()
        assert supervisor.spawned.qsize() == MAX_FAILED_STARTS

    assert supervise(dies_with(1), body).reports[0] == "a has died (status 1) and is restarted in 0.001 s"


def test_a_process_that_reports_that_a_restart_is_useless_is_given_up_at_once() -> None:
    async def body(supervisor: FakeSupervisor) -> None:
        supervisor.run_all("a")
        with pytest.raises(ConfigurationError, match=f"a: status {EXIT_HOPELESS}"):
            await supervisor.wait_until_given_up()

    assert supervise(dies_with(EXIT_HOPELESS), body).reports == []


@pytest.mark.parametrize("status", [1, EXIT_HOPELESS])
def test_a_process_that_has_been_ready_is_restarted_without_a_limit(status: int) -> None:
    async def body(supervisor: FakeSupervisor) -> None:
        supervisor.run_all("a")
        for _ in range(2 * MAX_FAILED_STARTS):
            await supervisor.spawned.get()
        await supervisor.stop((["a"], None))

    supervise(dies_with(status, is_ready=True), body)


def test_an_error_of_a_start_reaches_the_caller_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str) -> FakeRun:
        raise OSError("too many processes")

    async def body(supervisor: FakeSupervisor) -> None:
        supervisor.run_all("a")
        with pytest.raises(OSError, match="too many processes"):
            await supervisor.wait_until_given_up()

    supervise(fail, body)
    assert "a cannot be supervised any more" in caplog.text


def test_groups_stop_in_order_and_a_process_that_ignores_sigterm_is_killed() -> None:
    async def body(supervisor: FakeSupervisor) -> None:
        supervisor.run_all("deaf", "router")
        deaf, router = await supervisor.spawned.get(), await supervisor.spawned.get()
        await supervisor.stop((["deaf"], 0.01), (["router"], 0.01))
        assert deaf.signals == [signal.SIGTERM, signal.SIGKILL] and router.signals == [signal.SIGTERM]

    supervisor = supervise(lambda name: FakeRun(ignores_sigterm=name == "deaf"), body)
    assert supervisor.reports == ["deaf did not exit in time and is killed"]


def test_processes_are_killed_if_the_stop_is_cancelled() -> None:
    async def body(supervisor: FakeSupervisor) -> None:
        supervisor.run_all("deaf")
        deaf = await supervisor.spawned.get()
        stopping = asyncio.create_task(supervisor.stop((["deaf"], None)))
        await asyncio.wait([stopping], timeout=0.01)
        stopping.cancel()
        await asyncio.wait([stopping])
        assert deaf.signals == [signal.SIGTERM, signal.SIGKILL]

    supervise(lambda _: FakeRun(ignores_sigterm=True), body)
