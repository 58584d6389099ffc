"""The one thread that calls a pair. It can be given up while a call of the library never returns."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from kvtransfer.errors import TransportUnavailable
from kvtransfer.transports.oneccl.pair import LANES, Pair, PairBrokenError

logger = logging.getLogger(__name__)


class Finish(Protocol):
    """What is left of a job once the library has its work."""

    def is_done(self) -> bool:
        """Calling it will not wait long."""
        ...

    def __call__(self) -> None:
        """Waits. Raises `PairBrokenError`."""
        ...


Job = Callable[[Pair], Finish | None]
"""Raises `PairBrokenError` when the pair is of no use any more."""
POLL_S = 0.00005


class PairThread:
    """Runs `open`, then jobs in order; each is begun before the ones ahead of it are finished.

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
        self._begun: deque[Finish] = deque()
        self._is_closed = False
        self._num_waiting = 0
        self._num_done = 0
        self._watching: asyncio.TimerHandle | None = None
        self.is_running = True
        """The thread has not ended: after `close`, it is stuck in the library."""
        self.opened: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="baton-pair", daemon=True).start()

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
        try:
            self._work()
        except TransportUnavailable as exc:
            self._tell(self._failed, str(exc))
        except Exception as exc:
            logger.exception("a pair broke")
            self._tell(self._failed, f"{type(exc).__name__}: {exc}")
        finally:
            self._leave()
            self.is_running = False

    def _work(self) -> None:
        pair = self._open_pair()
        with self._lock:
            self._pair = pair
            is_closed = self._is_closed
        if is_closed:
            pair.abandon()
            return
        self._tell(self._is_open)
        while True:
            while self._begun and (len(self._begun) >= LANES or self._begun[0].is_done()):
                self._finish()
            try:
                job = self._jobs.get(timeout=POLL_S if self._begun else None)
            except Empty:
                continue
            if job is None:
                return
            if self._is_closed:
                raise PairBrokenError("closed")
            finish = job(pair)
            if finish is None:
                self._num_done += 1
            else:
                self._begun.append(finish)

    def _finish(self) -> None:
        self._begun.popleft()()
        self._num_done += 1

    def _leave(self) -> None:
        """The pair is given up, so what was begun ends: with an error, or never."""
        while self._begun:
            with contextlib.suppress(Exception):
                self._begun.popleft()()

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
