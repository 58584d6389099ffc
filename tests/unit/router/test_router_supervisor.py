"""The supervisor of a router's processes, with processes that only sleep in place of routers."""

import asyncio
import os
import signal
import socket
import sys
import tempfile

import pytest

from baton_serve.services.common.process_supervisor import WatchRules
from baton_serve.services.router.processes.router_supervisor import RouterSupervisor
from baton_serve.services.router.processes.sibling_rpc import RouterProcess, is_hung
from baton_serve.services.router.settings import RouterSettings

READY_AND_BUSY = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
STARTING = "import time; time.sleep(60)"


class Sleepers(RouterSupervisor):
    """Process 0 is ready at once and ignores SIGTERM. Process 1 starts when the test sets `may_start`."""

    def __init__(self, folder: str) -> None:
        settings = RouterSettings(model="m", workers=2)
        super().__init__(settings, [RouterProcess(index, 2, folder) for index in range(2)], relay=None)
        self.may_start = asyncio.Event()
        self.is_starting = asyncio.Event()
        self.processes: dict[int, asyncio.subprocess.Process] = {}

    async def _create_process(self, worker: RouterProcess) -> asyncio.subprocess.Process:
        if worker.index == 1:
            self.is_starting.set()
            await self.may_start.wait()
        pipe = asyncio.subprocess.PIPE
        code = STARTING if worker.index else READY_AND_BUSY
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe)
        self.processes[worker.index] = process
        return process

    async def end_of_second(self) -> None:
        """Return when process 1 has exited."""
        self.may_start.set()
        while 1 not in self.processes:  # noqa: ASYNC110 - another task starts it
            await asyncio.sleep(0)
        await self.processes[1].wait()


class Answering(RouterSupervisor):
    """One process that only sleeps, in place of a router. The test answers the queries at its socket."""

    def __init__(self, folder: str, rules: WatchRules) -> None:
        self.worker = RouterProcess(0, 1, folder)
        super().__init__(RouterSettings(model="m"), [self.worker], relay=None, rules=rules)
        self.started: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()

    async def _create_process(self, worker: RouterProcess) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)", stdin=pipe, stdout=pipe
        )
        self.started.put_nowait(process)
        return process


def test_a_process_that_takes_connections_but_does_not_answer_is_killed_and_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(folder: str) -> None:
        supervisor = Answering(folder, WatchRules(interval_s=0.01, timeout_s=0.2, max_missed=2))
        path = supervisor.worker.socket(0)
        # A listening socket that nobody accepts from, as that of a stopped process.
        with socket.socket(socket.AF_UNIX) as stopped:
            stopped.bind(path)
            stopped.listen()
            await supervisor.start()
            hung = await supervisor.started.get()
            assert await asyncio.wait_for(hung.wait(), 20) == -signal.SIGKILL
        os.unlink(path)
        num_queries = asyncio.Semaphore(0)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readline() == b"stats\n"
            num_queries.release()
            writer.write(b"{}")
            writer.close()

        async with await asyncio.start_unix_server(answer, path):
            second = await asyncio.wait_for(supervisor.started.get(), 20)
            for _ in range(5):
                await asyncio.wait_for(num_queries.acquire(), 20)
            assert second.returncode is None, "a process that answers is left alone"
            await supervisor.stop()
        assert await second.wait() == -signal.SIGTERM

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(folder))
    assert "has not answered 2 queries" in caplog.text


def test_a_process_that_has_closed_its_socket_is_not_hung() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/none"
        assert not asyncio.run(is_hung(path, 5.0))
        with socket.socket(socket.AF_UNIX) as closed:
            closed.bind(path)
        assert not asyncio.run(is_hung(path, 5.0))


def test_a_process_that_starts_while_the_router_stops_ends_before_the_others_have_finished() -> None:
    async def scenario(folder: str) -> None:
        supervisor = Sleepers(folder)
        starting = asyncio.create_task(supervisor.start())
        await supervisor.is_starting.wait()
        stopping = asyncio.create_task(supervisor.stop())
        try:
            await asyncio.wait_for(supervisor.end_of_second(), timeout=3)
            assert not stopping.done(), "process 0 still has requests"
        finally:
            supervisor.processes[0].kill()
            await stopping
            starting.cancel()
            await asyncio.wait([starting])
        # No process is left.
        assert all([await process.wait() for process in supervisor.processes.values()])

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(folder))
