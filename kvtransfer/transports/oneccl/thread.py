"""The thread that calls a pair, and one that waits for what it began. They can be given up while a call of the library
never returns.

Neither asks again and again: both stand in calls that leave Python's lock to others (docs/log/block-transfer.md).
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Protocol

from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.transports.oneccl.pair import LANES, Pair, PairBrokenError

logger = logging.getLogger(__name__)


class Finish(Protocol):
    """What is left of a job once the library has its work. Runs in the second thread."""

    def __call__(self) -> None:
        """Waits. Raises `PairBrokenError`."""
        ...


Job = Callable[[Pair], Finish | None]
"""Raises `PairBrokenError` when the pair is of no use any more."""


class PairThread:
    """Runs `open`, then jobs in order; each is begun before the ones ahead of it are finished, `LANES` at once.

    `on_failed` is called on the loop, at most once, and not after `close`. A job that does not end within
    `stall_timeout_s` is a failure: the peer is stuck, or the library is.
    """

    def __init__(
        self, open_pair: Callable[[], Pair], *, on_failed: Callable[[str], None], stall_timeout_s: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._open_pair = open_pair
        self._on_failed = on_failed
        self._stall_timeout_s = stall_timeout_s
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pair: Pair | None = None
        self._begun: SimpleQueue[Finish | None] = SimpleQueue()
        self._lanes = threading.Semaphore(LANES)
        self._is_closed = False
        self._num_waiting = 0
        self._num_done = 0
        self._watching: asyncio.TimerHandle | None = None
        self._num_running = 2
        self.opened: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="baton-pair", daemon=True).start()
        threading.Thread(target=self._finish_all, name="baton-pair-end", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """A thread has not ended: after `close`, it is stuck in the library."""
        return self._num_running > 0

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def submit(self, job: Job) -> None:
        self._num_waiting += 1
        self._jobs.put(job)
        if self._watching is None:
            self._watch()

    def close(self) -> None:
        """Never blocks. Jobs that have not begun are dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            pair = self._pair
        if self._watching is not None:
            self._watching.cancel()
        if not self.opened.done():
            self.opened.cancel()
        self._jobs.put(None)
        if pair is not None:
            pair.abandon()

    def _run(self) -> None:
        with self._explained():
            self._work()
        self._begun.put(None)
        self._left()

    def _work(self) -> None:
        pair = self._open_pair()
        with self._lock:
            self._pair = pair
            is_closed = self._is_closed
        if is_closed:
            pair.abandon()
            return
        self._tell(self._is_open)
        while (job := self._jobs.get()) is not None:
            self._lanes.acquire()
            if self._is_closed:
                raise PairBrokenError("closed")
            finish = job(pair)
            if finish is None:
                self._ended()
            else:
                self._begun.put(finish)

    def _finish_all(self) -> None:
        """When the pair was given up, what was begun ends: with an error, or never."""
        while (finish := self._begun.get()) is not None:
            with self._explained():
                finish()
            self._ended()
        self._left()

    def _ended(self) -> None:
        with self._lock:
            self._num_done += 1
        self._lanes.release()

    def _left(self) -> None:
        with self._lock:
            self._num_running -= 1

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TransportUnavailable as exc:
            self._tell(self._failed, str(exc))
        except Exception as exc:
            logger.exception("a pair broke")
            self._tell(self._failed, f"{type(exc).__name__}: {exc}")

    def _tell(self, call: Callable[..., None], *arguments: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _is_open(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def _failed(self, reason: str) -> None:
        if self._is_closed:
            return
        if not self.opened.done():
            self.opened.set_exception(PairBrokenError(reason))
            self.opened.exception()
        self.close()
        self._on_failed(reason)

    def _watch(self, seen: int = -1) -> None:
        """Some job must have ended since the last look."""
        if self._num_done >= self._num_waiting:
            self._watching = None
            return
        if seen == self._num_done:
            self._failed(f"nothing moved for {self._stall_timeout_s:g} s")
            return
        self._watching = self._loop.call_later(self._stall_timeout_s, self._watch, self._num_done)
