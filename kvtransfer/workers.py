"""Threads that copy and hash, so that the event loop does not. Results come back on the loop, many per wake-up."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Job = Callable[[], None]
"""Runs in a thread. Must not raise; tells its results by `Workers.post`."""


class Workers:
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
        self._jobs.put(job)

    def post(self, result: Callable[[], None]) -> None:
        """From a job: call this on the loop, in the order of posting."""
        with self._lock:
            self._results.append(result)
            wake = not self._is_woken
            self._is_woken = True
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def close(self) -> None:
        """Ends the threads after the jobs already given; their results are dropped."""
        for _ in self._threads:
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
            self._loop.call_soon(result)
