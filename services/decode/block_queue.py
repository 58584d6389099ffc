"""Prompts that wait for blocks: granted strictly by priority, then arrival, so that a large one is never starved.

All that wait ask the engine together, in one command, and again whenever more blocks are free than at the last refusal.
"""

import asyncio
import bisect
from dataclasses import dataclass
from functools import partial

from baton_serve.contracts.messages import Work
from baton_serve.engine.errors import RequestError
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.ports import EnginePort, Reservation


@dataclass(slots=True, eq=False)
class _Waiter:
    work: Work
    order: int
    granted: "asyncio.Future[Reservation]"

    @property
    def key(self) -> tuple[int, int]:
        return self.work.priority, self.order


@dataclass(frozen=True, slots=True)
class _GrantedBlocks:
    """Answers to the first of those who asked. If there are fewer than asked, `free_blocks` were not enough."""

    answers: list[Reservation | RequestError]
    free_blocks: int


class BlockQueue:
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
        """Blocks for a prompt, once there is room. Raises `RequestFailed` when too many wait or the time is over, and
        what `Engine.reserve` raises.

        When cancelled or late, the caller frees what may have been taken meanwhile.
        """
        if self._refused_at is not None and len(self._waiting) >= self._max_waiting:
            raise RequestFailed("overloaded", f"{len(self._waiting)} handoffs wait for blocks")
        try:
            async with asyncio.timeout(within_s):
                return await self._wait(work)
        except TimeoutError:
            raise RequestFailed("overloaded", f"no room for the prompt within {within_s:g} s") from None

    def on_free_blocks(self, free_blocks: int) -> None:
        if self._refused_at is not None:
            if free_blocks > self._refused_at:
                self._refused_at = None
                self._query_engine()
            else:
                self._refused_at = free_blocks

    async def _wait(self, work: Work) -> Reservation:
        granted: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(work, self._num_pending, granted)
        self._num_pending += 1
        bisect.insort(self._waiting, waiter, key=lambda w: w.key)
        if self._waiting[0] is waiter:
            self._refused_at = None
        self._query_engine()
        try:
            return await granted
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._refused_at = None
                self._query_engine()

    def _query_engine(self) -> None:
        if self._is_querying or not self._waiting or self._refused_at is not None:
            return
        self._is_querying = True
        asked = list(self._waiting)
        # Before any later numbers: blocks that become free after a refusal may be the last for long.
        answer = self._engine.call(
            lambda engine: _grant(engine, [waiter.work for waiter in asked]), then=partial(self._on_grants, asked)
        )
        answer.add_done_callback(partial(self._on_query_failed, asked))

    def _on_query_failed(self, asked: list[_Waiter], done: "asyncio.Future[_GrantedBlocks]") -> None:
        """The engine has stopped, or could not say."""
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or error is not None:
            self._is_querying = False
            for waiter in asked:
                self._settle(waiter, error or RequestFailed("internal", "the engine has stopped"))
            self._query_engine()

    def _on_grants(self, asked: list[_Waiter], grants: _GrantedBlocks) -> None:
        self._is_querying = False
        for waiter, answer in zip(asked, grants.answers, strict=False):
            self._settle(waiter, answer)
        refused = asked[len(grants.answers) :]
        if refused and self._waiting and self._waiting[0] is refused[0]:
            self._refused_at = grants.free_blocks
        self._query_engine()

    def _settle(self, waiter: _Waiter, answer: Reservation | BaseException) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        if waiter.granted.done():
            return  # given up meanwhile: its owner has sent the cancel behind our question
        if isinstance(answer, BaseException):
            waiter.granted.set_exception(answer)
        else:
            waiter.granted.set_result(answer)


def _grant(engine: EnginePort, works: list[Work]) -> _GrantedBlocks:
    """In the engine's thread: one after the other until one finds no room."""
    answers: list[Reservation | RequestError] = []
    for work in works:
        try:
            answer = engine.reserve(work)
        except RequestError as exc:
            answers.append(exc)
            continue
        if answer is None:
            break
        answers.append(answer)
    return _GrantedBlocks(answers, engine.stats().free_blocks)
