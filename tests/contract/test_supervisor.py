"""The supervisor with real processes that do what the test says, in place of router and instances."""

import asyncio
import io
import multiprocessing.forkserver as stdlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from baton_serve.bench.ports import free_port
from baton_serve.services.common.errors import ConfigurationError, LocalError
from baton_serve.services.common.process_lifecycle import EXIT_HUNG
from baton_serve.services.common.process_supervisor import WatchRules
from baton_serve.services.common.restart_policy import MAX_FAILED_STARTS
from baton_serve.services.local import cluster_supervisor as supervisor_module
from baton_serve.services.local.child import Console
from baton_serve.services.local.cluster_supervisor import ClusterSupervisor, ClusterTimeouts
from baton_serve.services.local.launches import ForkLauncher, ProgramLauncher
from baton_serve.services.local.plan import Process

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PUPPET = "tests.contract.puppet"
ROUTER_RULES = WatchRules(interval_s=0.05, timeout_s=1.0, max_missed=3)


@pytest.fixture(scope="module", autouse=True)
def server_of_its_own() -> Iterator[None]:
    """Give this module a fork server of its own. A process has only one, which imports what the first caller
    requested; that of the other tests imports more."""
    server = stdlib.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        for name in stdlib.__all__:
            patch.setattr(stdlib, name, getattr(server, name))
        yield
        server._stop()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, params=["programs", "forks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select how processes are started, by fork or as programs. Both ways must behave equally."""
    monkeypatch.setattr(Stage, "preload", PUPPET if request.param == "forks" else None)
    return str(request.param)


class Stage:
    """A supervisor over puppets: `instances` are their arguments."""

    preload: str | None = None

    def __init__(
        self,
        *instances: list[str],
        router: list[str] | None = None,
        start_timeout_s: float = 60.0,
        drain_s: float = 30.0,
    ) -> None:
        port = str(free_port())
        processes = [Process("router", router or ["router", port, str(len(instances))], {})]
        processes += [
            Process(f"prefill-{number}", argv, {}, device=f"device {number}") for number, argv in enumerate(instances)
        ]
        self.output = io.StringIO()
        self.supervisor = ClusterSupervisor(
            processes,
            console=Console(self.output, [process.name for process in processes]),
            url=f"http://127.0.0.1:{port}",
            environ=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
            module=PUPPET,
            forks=ForkLauncher(PUPPET, ProgramLauncher(PUPPET), preload=self.preload) if self.preload else None,
            timeouts=ClusterTimeouts(start_s=start_timeout_s, drain_s=drain_s, router=ROUTER_RULES),
        )

    def pid(self, name: str) -> int:
        return self.supervisor.runs[name].pid

    async def until(self, fact: Callable[[], bool]) -> None:
        while not fact():  # noqa: ASYNC110 - of other processes, which set no event
            await asyncio.sleep(0.02)

    def is_ready(self, name: str) -> bool:
        return name in self.supervisor.runs and self.supervisor.runs[name].is_ready


def run(stage: Callable[[], Stage], body: Callable[[Stage], Awaitable[None]]) -> str:
    """Returns what was printed. Afterwards no process is left."""

    async def whole() -> str:
        on = stage()
        on.supervisor.start()
        try:
            async with asyncio.timeout(30):
                await body(on)
        finally:
            await on.supervisor.stop()
        assert all(child.status is not None for child in on.supervisor.runs.values())
        return on.output.getvalue()

    return asyncio.run(whole())


def test_it_is_ready_when_the_router_knows_all_instances_and_all_end_when_it_stops() -> None:
    async def body(stage: Stage) -> None:
        await stage.supervisor.wait_ready(20)

    run(lambda: Stage(["ready"], ["ready"]), body)


def test_each_process_has_a_group_of_its_own_in_one_session() -> None:
    """Ctrl-C reaches `serve` alone, and niceness counts between instances on kernels that share time among sessions."""

    async def body(stage: Stage) -> None:
        await stage.until(lambda: stage.is_ready("prefill-0"))
        pid = stage.pid("prefill-0")
        assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)

    run(lambda: Stage(["ready"]), body)


def test_a_killed_instance_is_reported_and_started_again() -> None:
    async def body(stage: Stage) -> None:
        await stage.supervisor.wait_ready(20)
        before = stage.pid("prefill-0")
        os.kill(before, signal.SIGKILL)
        await stage.until(lambda: stage.pid("prefill-0") != before)

    output = run(lambda: Stage(["ready"]), body)
    assert "serve     | prefill-0 has died (SIGKILL) and is restarted in 0.5 s\n" in output


def test_a_stopped_router_is_killed_and_started_again_and_a_serving_one_is_left_alone() -> None:
    async def body(stage: Stage) -> None:
        await stage.supervisor.wait_ready(20)
        before = stage.pid("router")
        # Ten times the interval and more than the three queries that a hung router may miss.
        await asyncio.sleep(0.5)
        assert stage.pid("router") == before and stage.supervisor.runs["router"].status is None
        os.kill(before, signal.SIGSTOP)
        await stage.until(lambda: stage.pid("router") != before)
        await stage.supervisor.wait_ready(20)

    output = run(lambda: Stage(["ready"]), body)
    assert "the router has not answered 3 queries within 1 s each, so it is killed" in output
    assert "router has died (SIGKILL) and is restarted" in output


def test_a_process_that_cannot_start_ends_it_at_once_with_its_reason() -> None:
    async def body(stage: Stage) -> None:
        with pytest.raises(ConfigurationError, match="prefill-1 cannot start: no such folder"):
            await stage.supervisor.wait_ready(20)

    failing = ["exit", "2", "baton prefill: no such folder"]
    output = run(lambda: Stage(["ready"], failing, router=["ready"]), body)
    assert "prefill-1 | some line\n" in output
    assert "no such folder" not in output, "the error is printed by the caller too"


def test_a_stop_says_how_long_running_streams_have_left() -> None:
    async def body(stage: Stage) -> None:
        await stage.until(lambda: stage.is_ready("prefill-0"))

    output = run(lambda: Stage(["ready"]), body)
    assert (
        "serve     | stopping: running streams have up to 30 s left (--drain-timeout-s); press Ctrl-C again" in output
    )


def test_a_crash_at_start_is_tried_again(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        await stage.supervisor.wait_ready(20)
        await stage.until(lambda: stage.is_ready("prefill-0"))

    assert "has died (status 1)" in run(lambda: Stage(["once", str(tmp_path / "tried"), "1"]), body)


def test_what_never_becomes_ready_is_given_up_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MIN_DELAY_S", 0.01)
    fuse = tmp_path / "fuse"
    fuse.touch()

    async def body(stage: Stage) -> None:
        with pytest.raises(LocalError, match="prefill-0 keeps failing: boom"):
            await stage.supervisor.wait_ready(20)

    # This router answers to nobody, so that the cluster is not taken for one that serves.
    output = run(lambda: Stage(["unless", str(fuse), "boom"], router=["ready"]), body)
    assert "prefill-0 keeps failing (status 1) and is not restarted any more. Its last lines:\n" in output
    assert "serve     |   boom\n" in output


@pytest.mark.parametrize("name", ["router", "prefill-0"])
def test_a_process_of_a_cluster_that_has_served_is_started_again_after_any_number_of_deaths(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MIN_DELAY_S", 0.01)
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MAX_DELAY_S", 0.01)

    async def body(stage: Stage) -> None:
        await stage.supervisor.wait_ready(20)
        for _ in range(MAX_FAILED_STARTS + 3):
            next_delay_s = stage.pid(name)
            os.kill(next_delay_s, signal.SIGKILL)
            await stage.until(lambda next_delay_s=next_delay_s: stage.pid(name) != next_delay_s)  # type: ignore[misc]
        await stage.supervisor.wait_ready(20)

    output = run(lambda: Stage(["ready"]), body)
    assert "not restarted any more" not in output


@pytest.mark.parametrize(
    ("status", "text"), [(EXIT_HUNG, "the engine has hung"), (1, "Timeout (0:01:10)!")], ids=["status", "timer"]
)
def test_a_device_that_keeps_hanging_is_taken_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, text: str
) -> None:
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MIN_DELAY_S", 0.01)
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MAX_DELAY_S", 0.01)
    fault = tmp_path / "fault"

    async def body(stage: Stage) -> None:
        await stage.supervisor.wait_ready(20)
        await stage.until(lambda: stage.is_ready("prefill-0") and stage.is_ready("prefill-1"))
        other = stage.pid("prefill-0")
        fault.touch()
        os.kill(stage.pid("prefill-1"), signal.SIGKILL)
        await stage.until(lambda: "is taken out" in stage.output.getvalue())
        assert stage.pid("prefill-0") == other and is_running(other)

    output = run(lambda: Stage(["ready"], ["hung", str(fault), str(status), text]), body)
    assert "device 1 is taken out: its instances hung 3 times within 30 minutes, so prefill-1 is not started" in output
    assert output.count(f"prefill-1 has died (status {status}) and is restarted") == 2


def test_a_restarted_instance_that_does_not_become_ready_counts_as_hung(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MIN_DELAY_S", 0.01)
    monkeypatch.setattr("baton_serve.services.common.restart_policy.MAX_DELAY_S", 0.01)
    fault = tmp_path / "fault"

    async def body(stage: Stage) -> None:
        await stage.supervisor.wait_ready(20)
        await stage.until(lambda: stage.is_ready("prefill-0"))
        fault.touch()
        os.kill(stage.pid("prefill-0"), signal.SIGKILL)
        await stage.until(lambda: "is taken out" in stage.output.getvalue())

    output = run(lambda: Stage(["slow", str(fault)], start_timeout_s=0.3), body)
    assert output.count("prefill-0 is not ready within 0.3 s (--start-timeout-s) and is killed") == 3
    assert "device 0 is taken out" in output


def test_what_never_becomes_ready_is_named() -> None:
    async def body(stage: Stage) -> None:
        with pytest.raises(ConfigurationError, match=r"not ready within 0.3 s: .*--start-timeout-s"):
            await stage.supervisor.wait_ready(0.3)

    run(lambda: Stage(["ready"], router=["ready"]), body)


def test_what_ignores_the_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_DEADLINE_S", 0.3)
    monkeypatch.setattr(supervisor_module, "ROUTER_AFTER_S", 0.1)

    async def body(stage: Stage) -> None:
        await stage.until(lambda: stage.is_ready("prefill-0"))

    assert "prefill-0 did not exit in time and is killed" in run(lambda: Stage(["deaf"], drain_s=0.1), body)


def test_the_router_passes_on_what_draining_instances_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "ROUTER_AFTER_S", 0.1)

    async def body(stage: Stage) -> None:
        await stage.until(lambda: stage.is_ready("prefill-0"))
        stopping = asyncio.create_task(stage.supervisor.stop())
        await asyncio.sleep(1.0)
        assert [run.status for run in stage.supervisor.runs.values()] == [None, None]
        await stopping

    assert "running streams have up to 20 s left" in run(lambda: Stage(["drains", "2"], drain_s=20.0), body)


def test_a_server_that_cannot_be_forked_is_done_without(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(Stage, "preload", "tests.contract.no_such_module")

    async def body(stage: Stage) -> None:
        # While a program is being executed, its command line is empty.
        await stage.until(lambda: stage.is_ready("prefill-0"))
        assert "baton_serve.services.common.die_with_parent" in about(stage.pid("prefill-0"), "cmdline")

    if way == "forks":
        run(lambda: Stage(["ready"]), body)


def test_a_fork_is_named_and_has_the_variables_of_its_process() -> None:
    async def body(stage: Stage) -> None:
        await stage.until(lambda: stage.is_ready("prefill-0"))
        if stage.preload:
            assert about(stage.pid("prefill-0"), "comm") == "baton prefill-0\n"

    said = run(lambda: Stage(["variable", "PYTHONPATH"]), body)
    assert f"prefill-0 | PYTHONPATH={ROOT}\n" in said


def test_a_killed_supervisor_leaves_no_orphan(way: str) -> None:
    code = f"""
import asyncio, sys
from tests.contract.test_supervisor import PUPPET, Stage
Stage.preload = PUPPET if {way == "forks"} else None
async def main():
    stage = Stage(["deaf"])
    stage.supervisor.start()
    await stage.until(lambda: stage.is_ready("prefill-0"))
    print(stage.pid("prefill-0"), stage.pid("router"), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline and len(pids) == 2
        time.sleep(0.01)


def about(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_text()


def is_running(pid: int) -> bool:
    """A zombie that was not reaped does not count as running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
