import asyncio
from collections.abc import Awaitable

import pytest

from baton_serve.contracts.messages import Work
from baton_serve.engine.core.outputs import Reservation
from baton_serve.engine.errors import RequestError
from baton_serve.services.decode.block_queue import BlockQueue
from baton_serve.services.instance.errors import RequestFailed
from tests.unit.instance.fakes import FakeEngine, InlineCalls, run, settle, work


def full_engine() -> FakeEngine:
    engine = FakeEngine()
    engine.free_blocks = 0
    return engine


def get(line: BlockQueue, work: Work, within_s: float = 60.0) -> Awaitable[Reservation]:
    return line.reserve(work, within_s=within_s)


def ask(line: BlockQueue, *works: Work) -> "list[asyncio.Task[Reservation]]":
    return [asyncio.ensure_future(get(line, w)) for w in works]


def test_those_that_fit_are_granted_in_order_of_arrival() -> None:
    async def test() -> None:
        engine = full_engine()
        line = BlockQueue(InlineCalls(engine), max_waiting=8)
        first, second = ask(line, work("a"), work("b"))
        await settle()
        engine.free_blocks = 2
        line.on_free_blocks(2)
        await settle()
        assert first.done() and not second.done()
        engine.free_blocks = 3
        line.on_free_blocks(3)
        await settle()
        assert second.done()
        assert len(line) == 0

    run(test())


def test_a_smaller_priority_goes_first() -> None:
    async def test() -> None:
        engine = full_engine()
        line = BlockQueue(InlineCalls(engine), max_waiting=8)
        low, high = ask(line, work("a", priority=5), work("b", priority=-1))
        await settle()
        engine.free_blocks = 2
        line.on_free_blocks(2)
        await settle()
        assert high.done() and not low.done()
        low.cancel()
        await settle()
        assert len(line) == 0

    run(test())


def test_one_that_gives_up_makes_way_for_the_next() -> None:
    async def test() -> None:
        engine = full_engine()
        line = BlockQueue(InlineCalls(engine), max_waiting=8)
        first, second = ask(line, work("a"), work("b"))
        await settle()
        engine.free_blocks = 2
        first.cancel()
        await settle()
        assert second.done() and second.result().request_id == "b"

    run(test())


def test_an_impossible_request_does_not_stop_the_line() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.error = RequestError("too_long", "never fits")
        line = BlockQueue(InlineCalls(engine), max_waiting=8)
        first, second = ask(line, work("a"), work("b"))
        await settle()
        assert isinstance(first.exception(), RequestError)
        assert second.result().request_id == "b"

    run(test())


def test_a_line_that_is_too_long_refuses() -> None:
    async def test() -> None:
        line = BlockQueue(InlineCalls(full_engine()), max_waiting=1)
        (first,) = ask(line, work("a"))
        await settle()
        with pytest.raises(RequestFailed) as caught:
            await get(line, work("b"))
        assert caught.value.code == "overloaded"
        first.cancel()
        await settle()

    run(test())


def test_blocks_freed_after_a_shortage_are_noticed_even_below_the_first_refusal() -> None:
    async def test() -> None:
        engine = full_engine()
        engine.free_blocks, engine.blocks_per_request = 5, 6
        line = BlockQueue(InlineCalls(engine), max_waiting=8)
        (waiting,) = ask(line, work("a"))
        await settle()
        line.on_free_blocks(1)
        engine.blocks_per_request = 3
        engine.free_blocks = 4
        line.on_free_blocks(4)
        await settle()
        assert waiting.done()

    run(test())


def test_blocks_freed_before_a_refusal_arrives_are_noticed() -> None:
    """The two events arrive at once if this thread was busy; an idle engine sends no further event."""

    async def test() -> None:
        engine = full_engine()
        line = BlockQueue(InlineCalls(engine), max_waiting=8)
        (waiting,) = ask(line, work("a"))
        await asyncio.sleep(0)  # it has asked
        engine.free_blocks = 2
        line.on_free_blocks(2)
        await settle()
        assert waiting.done()

    run(test())


def test_an_engine_error_fails_the_waiting_requests_and_the_next_one_tries_again() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.error = ZeroDivisionError()
        line = BlockQueue(InlineCalls(engine), max_waiting=8)
        first, second = ask(line, work("a"), work("b"))
        await settle()
        assert isinstance(first.exception(), ZeroDivisionError)
        assert second.result().request_id == "b"

    run(test())


def test_one_that_finds_no_room_in_time_fails_and_makes_way() -> None:
    async def test() -> None:
        engine = full_engine()
        line = BlockQueue(InlineCalls(engine), max_waiting=8)
        first = asyncio.ensure_future(get(line, work("a"), within_s=0.01))
        (second,) = ask(line, work("b"))
        await settle()
        engine.free_blocks = 2
        with pytest.raises(RequestFailed, match="not enough free KV blocks"):
            await first
        await settle()
        assert second.result().request_id == "b"

    run(test())
