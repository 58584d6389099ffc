"""Decides which handoff gets free KV blocks next on a decode worker; the others wait here, by priority and arrival.

Blocks are granted strictly by priority, then by arrival, so that a large prompt is never starved by small ones. All
waiting handoffs query the engine in one command, and again whenever more blocks are free than at the last refusal.
"""

import asyncio
import bisect
from dataclasses import dataclass
from functools import partial

from baton_serve.contracts.messages import Work
from baton_serve.engine.errors import RequestError
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.interfaces import EnginePort, Reservation


@dataclass(slots=True, eq=False)
class _Waiter:
    """One handoff that waits for blocks: its request, its place in the order of arrival, and the future that gets the
    reserved blocks.
    """

    work: Work
    order: int
    granted: "asyncio.Future[Reservation]"

    @property
    def key(self) -> tuple[int, int]:
        return self.work.priority, self.order


@dataclass(frozen=True, slots=True)
class _GrantedBlocks:
    """The engine's answers to one query of the waiting handoffs, for the first handoffs of the query: reserved blocks,
    or an error. The first handoff without an answer needs more than the `free_blocks` that were left.
    """

    answers: list[Reservation | RequestError]
    free_blocks: int


class BlockQueue:
    """The queue of handoffs that wait until a decode instance has enough free KV blocks. At most `max_waiting` may wait
    (`--max-waiting`). Use it only on the event loop.
    """

    def __init__(self, engine: EngineCalls, *, max_waiting: int) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._waiting: list[_Waiter] = []
        self._num_pending = 0
        self._is_querying = False
        self._refused_at: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def reserve(self, work: Work, *, within_s: float) -> Reservation:
        """Reserve KV blocks for the prompt of `work`, and wait up to `within_s` seconds until enough are free.

        Raises `RequestFailed` if too many handoffs wait or the time is over, and the errors of `Engine.reserve`. If
        this raises or is cancelled, the caller must cancel the request in the engine, which may have granted it blocks
        meanwhile.
        """
        if self._refused_at is not None and len(self._waiting) >= self._max_waiting:
            raise RequestFailed(
                "overloaded", f"{len(self._waiting)} handoffs wait for KV blocks already (--max-waiting): retry later"
            )
        try:
            async with asyncio.timeout(within_s):
                return await self._wait(work)
        except TimeoutError:
            raise RequestFailed(
                "overloaded", f"not enough free KV blocks for the prompt within {within_s:g} s"
            ) from None

    def on_free_blocks(self, free_blocks: int) -> None:
        """Try again to reserve blocks for the waiting handoffs, if `free_blocks`, the present number, is larger than at
        the last attempt.
        """
        if self._refused_at is not None:
            if free_blocks > self._refused_at:
                self._refused_at = None
                self._query_engine()
            else:
                # Fewer are free now, so a smaller number already is an improvement.
                self._refused_at = free_blocks

    async def _wait(self, work: Work) -> Reservation:
        granted: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(work, self._num_pending, granted)
        self._num_pending += 1
        bisect.insort(self._waiting, waiter, key=lambda w: w.key)
        # The last refusal was for another head of the queue; this one may need fewer blocks.
        if self._waiting[0] is waiter:
            self._refused_at = None
        self._query_engine()
        try:
            return await granted
        finally:
            # The waiter gave up. If it was the head of the queue, the next one may fit into the free blocks.
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._refused_at = None
                self._query_engine()

    def _query_engine(self) -> None:
        if self._is_querying or not self._waiting or self._refused_at is not None:
            return
        self._is_querying = True
        queried = list(self._waiting)
        # `then` runs before the statistics of any later step: blocks that become free right after a refusal may be the
        # last ones for a long time, and must be noticed.
        answer = self._engine.call(
            lambda engine: _grant(engine, [waiter.work for waiter in queried]), then=partial(self._on_grants, queried)
        )
        answer.add_done_callback(partial(self._on_query_failed, queried))

    def _on_query_failed(self, queried: list[_Waiter], done: "asyncio.Future[_GrantedBlocks]") -> None:
        """Called when a query of the engine for free blocks is `done`. If the query itself failed, because the engine
        has stopped or the command raised, let all handoffs that it asked for (`queried`) fail.
        """
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or error is not None:
            self._is_querying = False
            for waiter in queried:
                self._settle(waiter, error or RequestFailed("internal", "the engine of this instance has stopped"))
            self._query_engine()

    def _on_grants(self, queried: list[_Waiter], grants: _GrantedBlocks) -> None:
        """Give the engine's answers to the handoffs that asked (`queried`). If the first handoff of the queue got none,
        remember how many blocks were free then.
        """
        self._is_querying = False
        for waiter, answer in zip(queried, grants.answers, strict=False):
            self._settle(waiter, answer)
        refused = queried[len(grants.answers) :]
        # If another waiter is the head of the queue by now, the engine does not know it yet: query again.
        if refused and self._waiting and self._waiting[0] is refused[0]:
            self._refused_at = grants.free_blocks
        self._query_engine()

    def _settle(self, waiter: _Waiter, answer: Reservation | BaseException) -> None:
        """Remove the handoff `waiter` from the queue and pass `answer`, its reserved blocks or an error, to the task
        that waits for it.
        """
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        if waiter.granted.done():
            # The waiter timed out. Its handler has posted a cancel, which the engine runs after this grant: the blocks
            # do not leak.
            return
        if isinstance(answer, BaseException):
            waiter.granted.set_exception(answer)
        else:
            waiter.granted.set_result(answer)


def _grant(engine: EnginePort, works: list[Work]) -> _GrantedBlocks:
    """Reserve KV blocks for the prompts of `works` in order, until one needs more blocks than are free. Runs in the
    engine thread.
    """
    answers: list[Reservation | RequestError] = []
    for work in works:
        try:
            answer = engine.reserve(work)
        except RequestError as exc:
            # This prompt can never be served; the next ones still can.
            answers.append(exc)
            continue
        if answer is None:
            # Do not try smaller prompts behind it: they would take the blocks that it waits for.
            break
        answers.append(answer)
    return _GrantedBlocks(answers, engine.stats().free_blocks)
