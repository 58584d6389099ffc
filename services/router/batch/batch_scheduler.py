"""Decide which batches of the folder run now, also after a restart, and how many at a time."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton_serve.services.common.process_lifecycle import cancel_all
from baton_serve.services.router.batch.batch_run import BatchRun, RunPorts
from baton_serve.services.router.batch.records import FINAL, StoredBatch

logger = logging.getLogger(__name__)

MAX_RUNNING = 8
"""Number of batches that one process runs at once. They share the requests that may run, so that a small batch need not
wait for the end of a large one."""
MAX_RUNNING_OF_OWNER = MAX_RUNNING // 2
"""Number of batches of one owner among them: long batches of one API key must not keep those of all others waiting."""
_MIN_SCAN_S = 0.1
"""Least time in seconds between two looks, however often clients create and cancel batches."""
SCAN_S = 2.0
"""Time in seconds between two looks into the folder: for batches that other processes were asked for, or that a process
has left when it died."""
_SWEEP_S = 600.0
_RETRY_S = 30.0
"""Delay in seconds before a batch that failed with an unexpected error, such as one of the folder, is run again."""


@dataclass(slots=True)
class _Running:
    owner: str
    run: BatchRun | None
    """The field is None until the batch is locked."""


class BatchScheduler:
    """Looks for batches in the folder and runs them, from `start` to `close`. `main` owns it. Use it on the event loop
    only.
    """

    def __init__(self, ports: RunPorts, *, clock: Callable[[], float]) -> None:
        """Create the scheduler without starting it. `clock` is monotonic."""
        self._ports = ports
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._delayed_until: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._scanning: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start to look for batches and run them, in the background."""
        self._scanning = asyncio.create_task(self._scan_forever(), name="batches")

    def wake(self) -> None:
        """Look for new or cancelled batches now and not after the usual pause."""
        self._wake.set()

    async def close(self) -> None:
        """Stop running batches, after writing the results that they have so far. They continue when a process starts
        again.
        """
        self._is_closed = True
        if self._scanning is not None:
            await cancel_all([self._scanning])
        for running in self._running.values():
            if running.run is not None:
                running.run.stop()
        # Not cancelled: each writes its results first. The owner of this scheduler bounds the time (`Lifecycle`).
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _scan_forever(self) -> None:
        swept_at = -_SWEEP_S
        while True:
            self._wake.clear()
            try:
                for stored in await asyncio.to_thread(self._open_batches):
                    self._start_run(stored.batch.id, stored.owner)
                if self._clock() - swept_at >= _SWEEP_S:
                    swept_at = self._clock()
                    await asyncio.to_thread(self._ports.store.sweep, self._ports.wall_clock())
            except OSError:
                # The folder may be on a network: the next look may succeed.
                logger.exception("the folder of batches cannot be read")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SCAN_S):
                    await self._wake.wait()
            await asyncio.sleep(_MIN_SCAN_S)

    def _open_batches(self) -> list[StoredBatch]:
        """Return the records of all batches in the folder that have not ended, the oldest first."""
        # All names are listed at each look, and the records of open batches are read, in a thread.
        found = [stored for stored in self._ports.store.batches() if stored.batch.status not in FINAL]
        return sorted(found, key=lambda stored: (stored.batch.created_at, stored.batch.id))

    def _start_run(self, batch_id: str, owner: str) -> None:
        # Later batches wait in the folder; the next look starts them.
        is_delayed = self._delayed_until.get(batch_id, 0.0) > self._clock()
        if batch_id in self._running or len(self._running) >= MAX_RUNNING or is_delayed:
            return
        if sum(running.owner == owner for running in self._running.values()) >= MAX_RUNNING_OF_OWNER:
            return
        self._running[batch_id] = running = _Running(owner, None)
        task = asyncio.create_task(self._run(batch_id, running), name=f"batch {batch_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch_id: str, running: _Running) -> None:
        try:
            # Taken on the event loop, without a thread: it never waits.
            with self._ports.store.lock(batch_id) as is_locked:
                if not is_locked:
                    return
                # Read under the lock: another process may just have ended the batch.
                stored = await asyncio.to_thread(self._ports.store.stored_batch, batch_id)
                if stored is None or stored.batch.status in FINAL or self._is_closed:
                    return
                running.run = BatchRun(stored, self._ports)
                await running.run.run()
            self._delayed_until.pop(batch_id, None)
        except Exception:
            # An error of one batch must not end the others. Its state is in the folder, so that it can be tried again.
            logger.exception("the batch %s failed with an unexpected error and will be tried again", batch_id)
            self._delayed_until[batch_id] = self._clock() + _RETRY_S
        finally:
            del self._running[batch_id]
