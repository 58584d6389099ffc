"""Runs the threads that copy and hash blocks for the event loop. Their results return to the loop, many for each
wake-up.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Job = Callable[[], None]
"""A function that runs in a worker thread. It must not raise; it reports its result with `Workers.post`."""


class Workers:
    """The pool of `count` threads in which one `TransferNode` copies and hashes blocks. `close` ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self._loop = loop
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._results: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name=f"baton-copy-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue the function `job` for the next free thread. The function must not raise; it reports its result by
        `post`.
        """
        self._jobs.put(job)

    def post(self, result: Callable[[], None]) -> None:
        """Run the callback `result` on the event loop. Worker threads call this; callbacks run in the order in which
        they were posted.
        """
        with self._lock:
            self._results.append(result)
            # One wake-up serves all results that are posted until the loop runs: waking it writes to a pipe each time.
            wake = not self._is_woken
            self._is_woken = True
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def close(self) -> None:
        """Wait until the queued functions have run, then end the threads. Callbacks that were posted and have not run
        yet are dropped.
        """
        for _ in self._threads:
            # One end marker for each thread, behind all jobs that were queued before.
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._results.clear()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _deliver(self) -> None:
        with self._lock:
            results = list(self._results)
            self._results.clear()
            self._is_woken = False
        for result in results:
            # Each result is a callback of its own, so that one that raises does not prevent the others.
            self._loop.call_soon(result)
