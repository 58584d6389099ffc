"""The states of a batch, the pace of its requests, and when a request is tried again. No input or output."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from baton_serve.services.router.batch.batch_run import MAX_UNAVAILABLE, retry_delay_s
from baton_serve.services.router.batch.line_client import LineAnswer
from baton_serve.services.router.batch.pacing import LineGate, RouterLoad, max_lines, may_start
from baton_serve.services.router.batch.records import BatchError, BatchObject, StoredBatch
from baton_serve.services.router.batch.state_machine import (
    MAX_ERRORS,
    TransitionError,
    begun,
    cancelling,
    counted,
    ended,
    finalizing,
    rejected,
)

CREATED = StoredBatch(
    owner="me",
    batch=BatchObject(
        id="batch_1",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=100,
    ),
)
BEGUN = begun(CREATED, total=5, now=2)


@pytest.mark.parametrize("outcome", ["completed", "expired", "failed"])
def test_a_batch_runs_from_validation_to_its_outcome(outcome: Any) -> None:
    stored = counted(BEGUN, completed=3, failed=2)
    assert (stored.batch.status, stored.batch.in_progress_at) == ("in_progress", 2)
    stored = finalizing(stored, outcome, output="file-2", errors=None, now=3)
    assert (stored.batch.status, stored.batch.finalizing_at) == ("finalizing", 3)
    stored = ended(stored, now=4)
    assert (stored.batch.status, getattr(stored.batch, f"{outcome}_at")) == (outcome, 4)
    assert stored.batch.output_file_id == "file-2"
    assert (stored.batch.request_counts.total, stored.batch.request_counts.completed) == (5, 3)


def test_a_cancelled_batch_is_cancelling_until_its_results_are_stored() -> None:
    stored = finalizing(BEGUN, "cancelled", output=None, errors=None, now=3)
    assert (stored.batch.status, stored.batch.cancelling_at) == ("cancelling", 3)
    assert ended(stored, now=4).batch.status == "cancelled"


def test_a_file_with_errors_fails_its_batch_and_lists_some_of_them() -> None:
    stored = rejected(CREATED, [BatchError("bad", "why", line) for line in range(999)], now=3)
    assert (stored.batch.status, stored.batch.failed_at) == ("failed", 3)
    assert stored.batch.errors is not None and len(stored.batch.errors.data) == MAX_ERRORS


def test_a_client_sees_its_cancellation_at_once_but_not_after_the_end() -> None:
    assert cancelling(BEGUN.batch, now=7).status == "cancelling"
    done = ended(finalizing(BEGUN, "completed", output=None, errors=None, now=3), now=4)
    assert cancelling(done.batch, now=7) == done.batch


def test_no_state_is_left_twice() -> None:
    done = ended(finalizing(BEGUN, "completed", output=None, errors=None, now=3), now=4)
    with pytest.raises(TransitionError):
        begun(BEGUN, total=5, now=3)
    with pytest.raises(TransitionError):
        finalizing(done, "cancelled", output=None, errors=None, now=5)
    with pytest.raises(TransitionError):
        ended(done, now=5)
    with pytest.raises(TransitionError):
        ended(replace(done, batch=replace(done.batch, status="finalizing"), outcome=None), now=5)


def load_of(*, num_instances: int = 2, num_waiting: int = 0, num_started: int = 0) -> RouterLoad:
    return RouterLoad(
        num_instances=num_instances,
        num_generating=num_instances // 2,
        num_running=num_waiting,
        num_waiting=num_waiting,
        num_started=num_started,
    )


def test_requests_of_batches_give_way_to_those_of_clients() -> None:
    assert [max_lines(load_of(), quiet_s=5.0, most=most) for most in (100, 20)] == [32, 20]
    assert max_lines(load_of(), quiet_s=0.1, most=100) == 1
    assert max_lines(load_of(num_instances=6), quiet_s=0.1, most=100) == 3
    assert max_lines(load_of(num_instances=1), quiet_s=0.1, most=100) == 1, "a batch must end"
    assert max_lines(load_of(num_instances=0), quiet_s=5.0, most=100) == 0


def test_a_client_that_returns_after_a_pause_meets_few_requests_of_batches() -> None:
    assert [max_lines(load_of(), quiet_s=quiet_s, most=100) for quiet_s in (1.0, 2.0, 3.0, 4.0, 1e9)] == [
        *(4, 8, 16, 32, 32)
    ]


def test_no_request_of_a_batch_starts_while_a_client_waits_for_its_first_token() -> None:
    def starts(held_s: float, *, num_waiting: int, num_running: int = 0) -> bool:
        return may_start(
            load_of(num_waiting=num_waiting), num_running=num_running, quiet_s=0.0, held_s=held_s, most=100
        )

    assert starts(0.0, num_waiting=0)
    assert not starts(0.9, num_waiting=1)
    assert starts(1.0, num_waiting=1), "a batch must end although clients always wait"
    assert not starts(1.0, num_waiting=1, num_running=1)


def test_a_request_between_two_looks_counts_as_traffic() -> None:
    load, now = load_of(num_instances=1), 0.0

    async def scenario() -> None:
        nonlocal load, now
        gate, stop = LineGate(lambda: load, most=100, clock=lambda: now), asyncio.Event()
        assert await gate.enter(stop) and await gate.enter(stop)
        load = load_of(num_instances=1, num_started=1)
        waiting = asyncio.create_task(gate.enter(stop))
        await asyncio.sleep(0)
        gate.leave()
        await asyncio.sleep(0)
        assert not waiting.done(), "one request runs, which is all that is allowed beside clients"
        gate.leave()
        assert await waiting
        now = 10.0
        assert await gate.enter(stop), "the client's request is long over"
        stop.set()
        assert not await gate.enter(stop)
        assert gate.num_running == 2

    asyncio.run(scenario())


def test_a_free_place_goes_to_the_owner_with_the_fewest_requests() -> None:
    async def scenario() -> None:
        load, stop = load_of(num_instances=1), asyncio.Event()
        gate = LineGate(lambda: load, most=4, clock=lambda: 100.0)
        for _ in range(4):
            assert await gate.enter(stop, "one"), "an owner alone gets all places"
        many = [asyncio.create_task(gate.enter(stop, "one")) for _ in range(10)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(gate.enter(stop, "two")) for _ in range(3)]
        await asyncio.sleep(0)
        for number in (1, 2):
            gate.leave("one")
            await few[number - 1]
            assert not any(task.done() for task in many)
        gate.leave("one")
        await asyncio.wait([*many, few[2]], return_when=asyncio.FIRST_COMPLETED)
        assert not few[2].done(), "two places are the half of this owner"
        assert gate.num_running == 4
        few[2].cancel()
        gate.leave("two")
        await asyncio.wait([task for task in many if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        assert sum(task.done() for task in many) == 2, "an owner that waits no more keeps no place free"
        stop.set()
        assert sum(await asyncio.gather(*many)) == 2

    asyncio.run(scenario())


def test_limits_are_waited_for_and_errors_are_final() -> None:
    def answer(status: int, retry_after_s: float | None = None) -> LineAnswer:
        return LineAnswer(status, b"{}", "r", retry_after_s)

    assert [retry_delay_s(answer(status), 1) for status in (200, 400, 404, 500, 504)] == [None] * 5
    assert retry_delay_s(answer(429, 7.0), 1000) == 60.0
    assert retry_delay_s(answer(429, 7.0), 1) == 7.0
    assert retry_delay_s(answer(503), 1) == 0.5
    assert retry_delay_s(answer(503), MAX_UNAVAILABLE) is None
