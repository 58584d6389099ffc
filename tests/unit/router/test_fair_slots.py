"""Slots in which grammars are compiled: callers take turns, and one caller cannot fill the queue for the others."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from baton_serve.services.router.protocol.errors import RateLimitError
from baton_serve.services.router.text.grammar.compiling.fair_slots import FairSlots, QueueLimits
from tests.unit.router.conftest import settle


class Compiler:
    """Compiles one grammar at a time, each until `finish`; `order` has the callers whose turn has come."""

    def __init__(self, *, max_waiting: int = 4) -> None:
        self.slots = FairSlots(QueueLimits(max_running=1, max_waiting=max_waiting))
        self.order: list[str] = []

    def ask(self, caller: str) -> "asyncio.Task[None]":
        return asyncio.create_task(self._compile(caller))

    async def finish_all(self) -> None:
        while self.slots.num_waiting:
            self.slots.release()
            await settle()

    async def _compile(self, caller: str) -> None:
        await self.slots.acquire(caller)
        self.order.append(caller)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 10))


def test_callers_take_turns_however_many_grammars_one_of_them_has_sent() -> None:
    async def body() -> None:
        compiler = Compiler()
        tasks = [compiler.ask("flood") for _ in range(4)]
        await settle()
        tasks.append(compiler.ask("honest"))
        await settle()
        await compiler.finish_all()
        await asyncio.gather(*tasks)
        assert compiler.order == ["flood", "flood", "honest", "flood", "flood"]

    run(body())


def test_a_full_queue_refuses_the_newest_grammar_of_the_caller_with_the_most() -> None:
    async def body() -> None:
        compiler = Compiler(max_waiting=3)
        flood = [compiler.ask("flood") for _ in range(4)]
        await settle()
        honest = compiler.ask("honest")
        await settle()
        assert [task.done() for task in flood] == [True, False, False, True]
        assert isinstance(flood[3].exception(), RateLimitError)
        with pytest.raises(RateLimitError):
            await compiler.ask("flood")
        assert compiler.slots.num_waiting == 3
        await compiler.finish_all()
        await asyncio.gather(honest, *flood[:3])

    run(body())


@pytest.mark.parametrize("has_slot", [False, True])
def test_a_grammar_whose_client_left_gives_its_slot_to_the_next(has_slot: bool) -> None:
    async def body() -> None:
        compiler = Compiler()
        first, gone, last = (compiler.ask(name) for name in ("a", "b", "c"))
        await settle()
        if has_slot:
            compiler.slots.release()
        gone.cancel()
        await settle()
        if not has_slot:
            compiler.slots.release()
        await asyncio.gather(first, last)
        assert compiler.order == ["a", "c"] and compiler.slots.num_waiting == 0
        assert gone.cancelled()

    run(body())
