"""The supervisor of a router's processes, with processes that only sleep in place of routers."""

import asyncio
import sys
import tempfile

from baton_serve.services.router.processes.sibling_rpc import RouterProcess
from baton_serve.services.router.processes.supervisor import RouterSupervisor
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
