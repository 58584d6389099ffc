"""Runs a pair's calls of a collective library in two threads, which can be given up if a call never returns. Both can
be given up if a call of the library never returns.

Neither thread polls. Both block in calls that release the GIL (docs/log/block-transfer.md).
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
    """The second half of sending or receiving a message: waits for the collective library after the message was queued.
    It runs in a second thread, so that the next message can start.
    """

    def __call__(self) -> None:
        """Wait until the message has been sent or received completely. Raises `PairBrokenError` if the pair breaks."""
        ...


Job = Callable[[Pair], Finish | None]
"""Starts a message and returns what waits for its end, or None if it has ended. Raises `PairBrokenError` if the pair
cannot be used any more.
"""


class PairThread:
    """Calls a collective library for one pair (a connection of two processes), in threads of its own: it runs
    `open_pair`, then jobs (messages) in order. A job may start before earlier ones have finished; up to `LANES` run at
    the same time. `on_failed` is called on the event loop at most once, and not after `close`. If no job ends within
    `stall_timeout_s`, this counts as a failure: the peer or the library hangs.
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
        """Return whether any of the two threads has not ended. After `close` this means that it is stuck in the
        collective library.
        """
        return self._num_running > 0

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def submit(self, job: Job) -> None:
        """Queue a job, which starts to send or receive one message. Call it only on the event loop."""
        self._num_waiting += 1
        self._jobs.put(job)
        if self._watching is None:
            self._watch()

    def close(self) -> None:
        """Give up the connection of the two processes without waiting: drop the jobs that have not begun, and abandon
        the running ones.
        """
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
        # `close` came while the pair was being opened and could not abandon it then.
        if is_closed:
            pair.abandon()
            return
        self._call_on_loop(self._is_open)
        while (job := self._jobs.get()) is not None:
            # At most `LANES` messages in flight: their lanes' memory is used again after that.
            self._lanes.acquire()
            if self._is_closed:
                raise PairBrokenError("closed")
            finish = job(pair)
            if finish is None:
                self._ended()
            else:
                self._begun.put(finish)

    def _finish_all(self) -> None:
        """Run the second thread: wait for the end of each message, in the order in which the messages were started.
        After the pair was given up, messages in flight end with an error or never.
        """
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
            self._call_on_loop(self._failed, str(exc))
        except Exception as exc:
            logger.exception("oneccl: a pair broke")
            self._call_on_loop(self._failed, f"{type(exc).__name__}: {exc}")

    def _call_on_loop(self, call: Callable[..., None], *arguments: str) -> None:
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
        """Give up the connection of the two processes if jobs wait and none has ended since the last check,
        `stall_timeout_s` seconds ago; otherwise check again after the same time. `seen` is the number of jobs that had
        ended at the last check.
        """
        if self._num_done >= self._num_waiting:
            self._watching = None
            return
        if seen == self._num_done:
            self._failed(f"no message ended within {self._stall_timeout_s:g} s")
            return
        self._watching = self._loop.call_later(self._stall_timeout_s, self._watch, self._num_done)
