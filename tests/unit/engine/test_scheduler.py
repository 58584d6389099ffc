from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import RequestId
from baton_serve.engine.core.outputs import StepResult
from baton_serve.engine.core.request_table import DUE_TOKENS_PER_PROMPT_TOKEN, RequestTable
from baton_serve.engine.core.scheduler import ModelRunnerOutput, ScheduledBatch, Scheduler
from tests.unit.engine.work import (
    BLOCK_TOKENS,
    EOS,
    ROOT,
    add,
    expected_tokens,
    make_table,
    make_work,
    run_to_end,
    step,
)


@pytest.fixture
def table() -> Iterator[RequestTable]:
    table = make_table()
    yield table
    table.check_invariants()


@pytest.fixture
def scheduler(table: RequestTable) -> Scheduler:
    return Scheduler(table)


def lengths(plan: ScheduledBatch) -> dict[str, int]:
    return {chunk.sequence.request.work.request_id: chunk.length for chunk in plan.chunks}


def finish(scheduler: Scheduler, plan: ScheduledBatch, token: int = 1) -> StepResult:
    return scheduler.apply(plan, ModelRunnerOutput([token] * len(plan.rows)), 0.0)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 19))
    plans = []
    for _ in range(3):
        plans.append(scheduler.schedule(0.0))
        finish(scheduler, plans[-1])
    assert [lengths(plan) for plan in plans] == [{"a": 8}, {"a": 8}, {"a": 3}]
    assert [len(plan.rows) for plan in plans] == [0, 0, 1]


def test_decodes_come_before_prompts(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 3))
    finish(scheduler, scheduler.schedule(0.0))
    add(table, make_work("b", [2] * 30))
    assert lengths(scheduler.schedule(0.0)) == {"a": 1, "b": 7}


def test_steps_that_must_not_mix_take_turns() -> None:
    table = make_table()
    table.limits = replace(table.limits, mixes_prompts=False)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 3))
    finish(scheduler, scheduler.schedule(0.0))
    add(table, make_work("b", [2] * 17))
    plans = []
    for _ in range(5):
        plans.append(scheduler.schedule(0.0))
        finish(scheduler, plans[-1])
    # The last token of the prompt is a single one, as the next one of an answer is.
    assert [lengths(plan) for plan in plans] == [{"a": 1}, {"b": 8}, {"a": 1}, {"b": 8}, {"a": 1, "b": 1}]
    table.check_invariants()


def test_a_smaller_priority_number_runs_first(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("late", [1] * 8, priority=1))
    add(table, make_work("urgent", [2] * 8, priority=-1))
    assert lengths(scheduler.schedule(0.0)) == {"urgent": 8}


def test_nothing_to_do_is_an_empty_plan(table: RequestTable, scheduler: Scheduler) -> None:
    assert not scheduler.has_work()
    assert scheduler.schedule(0.0) == ScheduledBatch([], [])


def test_a_cached_prefix_is_not_computed_again(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 8))
    run_to_end(table, scheduler)
    add(table, make_work("b", [1] * 8 + [2]))
    assert lengths(scheduler.schedule(0.0)) == {"b": 1}
    assert scheduler.admission.num_prefix_hit_tokens == 8


def test_the_last_token_is_computed_even_when_all_blocks_are_cached(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 8))
    run_to_end(table, scheduler)
    add(table, make_work("b", [1] * 8))
    assert lengths(scheduler.schedule(0.0)) == {"b": BLOCK_TOKENS}


def test_two_running_requests_share_their_prefix(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 8 + [2]))
    for _ in range(2):
        step(table, scheduler)
    add(table, make_work("b", [1] * 8 + [3]))
    step(table, scheduler)
    a, b = table.running
    assert a.blocks[:2] == b.blocks[:2]


def test_the_latest_request_gives_way_when_memory_is_short() -> None:
    table = make_table(num_blocks=5, batched=32)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 8, max_tokens=8))
    add(table, make_work("b", [2] * 8, max_tokens=8))
    tokens = run_to_end(table, scheduler)
    assert table.num_preemptions > 0
    assert tokens == {("a", 0): expected_tokens("a", 0, 8), ("b", 0): expected_tokens("b", 0, 8)}


def test_a_preempted_request_comes_before_later_ones() -> None:
    table = make_table(num_blocks=5, batched=32)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 8, max_tokens=8))
    add(table, make_work("b", [2] * 8, max_tokens=8))
    while not table.num_preemptions:
        step(table, scheduler)
    add(table, make_work("c", [3] * 4))
    head = table.peek_waiting()
    assert head is not None
    assert head.request.work.request_id == "b"


def test_a_prefill_request_is_held_with_all_its_blocks(table: RequestTable, scheduler: Scheduler) -> None:
    work = make_work("a", list(range(1, 11)), sequences=2)
    add(table, work, "prefill")
    results = [step(table, scheduler) for _ in range(2)]
    named = [item for result in results for done in result.completed for item in done.blocks]
    assert [name for name, _ in named] == hash_blocks(ROOT, work.token_ids, BLOCK_TOKENS)
    assert results[1].held == ["a"]
    assert [(o.sequence, o.position) for o in results[1].tokens] == [(0, 0), (1, 0)]
    parent = table.requests[RequestId("a")].sequences[0]
    assert [block for _, block in named] == parent.blocks
    assert not scheduler.has_work()
    table.finish_request(parent.request)
    assert table.pool.num_free == table.pool.num_total


def test_cached_blocks_of_a_prefill_request_are_reported_at_its_first_step(
    table: RequestTable, scheduler: Scheduler
) -> None:
    add(table, make_work("a", [1] * 8))
    run_to_end(table, scheduler)
    add(table, make_work("b", [1] * 8 + [2] * 12), "prefill")
    assert [len(done.blocks) for done in step(table, scheduler).completed] == [4]


def test_blocks_of_a_prefill_request_are_never_taken_from_it() -> None:
    table = make_table(num_blocks=5, batched=4)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 4, max_tokens=20))
    step(table, scheduler)
    add(table, make_work("b", [2] * 9), "prefill")
    for _ in range(12):
        if not scheduler.has_work():
            break
        step(table, scheduler)
    assert len(table.requests[RequestId("b")].sequences[0].blocks) == 3
    assert not scheduler.has_work()
    table.cancel(RequestId("b"), None)
    assert scheduler.has_work()
    assert run_to_end_after_first(table, scheduler) == {0}


def test_sequences_of_one_request_fork_from_one_prompt(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 6, sequences=3, max_tokens=5))
    step(table, scheduler)
    assert len({s.blocks[0] for s in table.running}) == 1
    assert len({s.blocks[1] for s in table.running}) == 3
    assert len(run_to_end_after_first(table, scheduler)) == 3


def run_to_end_after_first(table: RequestTable, scheduler: Scheduler) -> set[int]:
    indexes = set()
    while scheduler.has_work():
        indexes |= {output.sequence for output in step(table, scheduler).tokens}
    return indexes


def test_more_sequences_than_slots_still_all_end() -> None:
    table = make_table(seqs=2)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 6, sequences=5, max_tokens=7))
    tokens = run_to_end(table, scheduler)
    assert tokens == {("a", i): expected_tokens("a", i, 7) for i in range(5)}


def test_an_end_of_sequence_token_stops(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 3, max_tokens=9))
    (output,) = finish(scheduler, scheduler.schedule(0.0), EOS).tokens
    assert (output.finish_reason, output.stop_token_id) == ("stop", EOS)
    assert not table.requests


def test_the_longest_length_ends_a_sequence() -> None:
    table = make_table(num_blocks=2)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 6, max_tokens=99))
    (first,) = finish(scheduler, scheduler.schedule(0.0)).tokens
    (second,) = finish(scheduler, scheduler.schedule(0.0)).tokens
    assert (first.finish_reason, second.finish_reason) == (None, "length")


def test_cancelling_one_sequence_leaves_the_others(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 6, sequences=2, max_tokens=5))
    step(table, scheduler)
    table.cancel(RequestId("a"), 0)
    assert run_to_end_after_first(table, scheduler) == {1}
    assert table.pool.num_free == table.pool.num_total


def test_cancelling_before_the_first_token_removes_that_sequence(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 6, sequences=2))
    table.cancel(RequestId("a"), 0)
    assert {index for _, index in run_to_end(table, scheduler)} == {1}


def test_a_waiting_request_can_be_cancelled(table: RequestTable, scheduler: Scheduler) -> None:
    add(table, make_work("a", [1] * 6))
    table.cancel(RequestId("a"), None)
    assert not scheduler.has_work()
    assert not table.requests


def test_the_report_of_the_first_token_splits_queue_and_prefill(table: RequestTable, scheduler: Scheduler) -> None:
    table.enqueue(table.add(make_work("a", [1] * 5), "generate", 1.0))
    plan = scheduler.schedule(3.0)
    (report,) = scheduler.apply(plan, ModelRunnerOutput([1]), 7.0).first
    assert (report.queue_s, report.prefill_s, report.cached_tokens) == (2.0, 4.0, 0)


def test_short_prompts_for_other_instances_overtake_a_long_one_within_bounds(
    table: RequestTable, scheduler: Scheduler
) -> None:
    add(table, make_work("first", [1] * 8), "prefill")
    finish(scheduler, scheduler.schedule(0.0))
    add(table, make_work("long", [2] * 9), "prefill")
    add(table, make_work("short", [3] * 4), "prefill")
    assert [s.request.work.request_id for s in sorted(table.iter_waiting(), key=lambda s: s.sort_key)] == [
        "short",
        "long",
    ]
    table.num_scheduled_prompt_tokens += DUE_TOKENS_PER_PROMPT_TOKEN * 9  # so much was computed before it meanwhile
    add(table, make_work("late", [4] * 1), "prefill")
    assert [s.request.work.request_id for s in sorted(table.iter_waiting(), key=lambda s: s.sort_key)][-1] == "late"
    table.cancel(RequestId("first"), None)


def test_prompts_that_are_answered_here_come_in_their_order(table: RequestTable) -> None:
    add(table, make_work("long", [2] * 9))
    add(table, make_work("short", [3] * 4))
    assert [s.request.work.request_id for s in sorted(table.iter_waiting(), key=lambda s: s.sort_key)] == [
        "long",
        "short",
    ]


INNER: dict[str, Any] = {"num_spare_rows": 2, "checkpoint_step_tokens": 1}


def test_a_checkpoint_is_taken_where_the_router_sees_prompts_part() -> None:
    table = make_table(num_blocks=16, batched=32, state_blocks=1)
    work = structs.replace(make_work("a", list(range(1, 24))), branches=[8, 10, 400])
    add(table, work)
    scheduler = Scheduler(table)
    lengths = []
    while table.requests:
        plan = scheduler.schedule(0.0)
        lengths += [chunk.length for chunk in plan.chunks]
        finish(scheduler, plan)
    # The chunks end after 8 tokens (the hint), 12 (the interval) and 20 (the last full block).
    assert lengths[:4] == [8, 4, 8, 3]
    names = hash_blocks(ROOT, work.token_ids, BLOCK_TOKENS)
    assert [len(table.checkpoints.find(name)) for name in names] == [0, 1, 1, 0, 1, 0]


def inner_chunks(plan: ScheduledBatch) -> list[tuple[int, int, int]]:
    """Return each chunk's start, length, and the place of its inner checkpoint."""
    return [(chunk.start, chunk.length, chunk.inner) for chunk in plan.chunks]


def test_a_step_goes_on_behind_the_checkpoint_at_the_end_of_a_prompt() -> None:
    table = make_table(num_blocks=40, batched=64, state_blocks=1, checkpoint_tokens=400, **INNER)
    scheduler = Scheduler(table)
    for name in "abc":
        add(table, make_work(name, [ord(name)] * 19))
    first = scheduler.schedule(0.0)
    # The step has rows for two of them. The third one's chunk ends at its checkpoint.
    assert inner_chunks(first) == [(0, 19, 16), (0, 19, 16), (0, 16, 0)]
    assert [chunk.inner_row for chunk in first.chunks] == [4, 5, -1]
    assert [row.sequence.request.work.request_id for row in first.rows] == ["a", "b"]
    finish(scheduler, first)
    saved = [(copy.kind, copy.slot) for copy in table.checkpoints.take_copies() if copy.kind == "save"]
    assert saved == [("save", 4), ("save", 5), ("save", first.chunks[2].sequence.slot)]
    for name in "abc":
        last_full = hash_blocks(ROOT, [ord(name)] * 16, BLOCK_TOKENS)[-1]
        assert len(table.checkpoints.find(last_full)) == 1


def test_a_chunk_has_one_inner_checkpoint() -> None:
    table = make_table(num_blocks=40, batched=64, state_blocks=1, checkpoint_tokens=8, **INNER)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 27))
    steps = []
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        steps += inner_chunks(plan)
        finish(scheduler, plan)
    # The places are 8, 16 and 24.
    assert steps == [(0, 16, 8), (16, 11, 8)]


def test_a_checkpoint_between_the_steps_of_kernels_ends_its_chunk() -> None:
    table = make_table(
        num_blocks=40, batched=5, state_blocks=1, checkpoint_tokens=400, num_spare_rows=1, checkpoint_step_tokens=4
    )
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 11))
    steps = []
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        steps += inner_chunks(plan)
        finish(scheduler, plan)
    assert steps == [(0, 5, 0), (5, 3, 0), (8, 3, 0)]


def test_long_chunks_end_where_the_next_one_can_have_an_inner_checkpoint() -> None:
    table = make_table(
        num_blocks=40, batched=37, state_blocks=1, checkpoint_tokens=400, num_spare_rows=1, checkpoint_step_tokens=4
    )
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 51))
    first = scheduler.schedule(0.0)
    finish(scheduler, first)
    assert inner_chunks(first) + inner_chunks(scheduler.schedule(0.0)) == [(0, 36, 0), (36, 15, 12)]


@pytest.mark.parametrize(
    ("num_stages", "batched", "unfinished", "expected"),
    [
        (1, 8192, 600, 8192),
        # Little work goes in steps that are worth their launch, and more of it in more tokens each.
        (2, 8192, 600, 512),
        (2, 8192, 8192, 1024),
        (4, 8192, 8192, 512),
        # Whole tiles of products.
        (2, 8192, 8200, 1152),
        # Much work goes in so many steps that filling the stages takes a small part of the time.
        (2, 8192, 65536, 2048),
        (4, 8192, 65536, 1024),
        # A small limit is divided once, so that a step is not too small for a device.
        (2, 2048, 65536, 1024),
        (2, 24, 100, 12),
        (4, 3, 100, 1),
    ],
)
def test_stages_share_the_prompt_tokens_of_a_step(
    num_stages: int, batched: int, unfinished: int, expected: int
) -> None:
    limits = replace(make_table(batched=batched).limits, num_stages=num_stages)
    assert limits.prompt_tokens_for(unfinished) == expected
    assert limits.max_prompt_tokens >= expected


def test_the_largest_step_of_a_pipeline() -> None:
    limits = replace(make_table(seqs=256, batched=8192).limits, num_stages=2)
    assert limits.max_step_tokens == 2048 + 256
    assert replace(limits, keeps_images_whole=True).max_step_tokens == 8192
    assert replace(limits, num_stages=1).max_step_tokens == 8192


def test_a_long_prompt_is_divided_for_all_stages() -> None:
    table = make_table(num_blocks=2100, batched=8192, num_stages=2)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 8192))
    launched = []
    # Before any of them is finished, and all equally long although less and less of the prompt is left.
    while (plan := scheduler.schedule_ahead(0.0)) is not None:
        launched.append(plan)
        scheduler.advance(plan)
    assert [lengths(plan) for plan in launched] == [{"a": 1024}] * 8


def test_waiting_prompts_count_for_the_size_of_the_steps_of_stages() -> None:
    table = make_table(num_blocks=2100, batched=8192, num_stages=2)
    scheduler = Scheduler(table)
    for name in "abcdefgh":
        add(table, make_work(name, [ord(name)] * 2048))
    assert lengths(scheduler.schedule(0.0)) == {"a": 2048}


def test_steps_of_stages_stay_as_large_until_no_prompt_is_left() -> None:
    """Smaller ones behind a large one gain nothing, since the stages wait for the largest, and cost more launches."""
    table = make_table(num_blocks=5000, seqs=9, batched=8192, num_stages=2)
    scheduler, launched = Scheduler(table), list[ScheduledBatch]()
    for number in range(8):
        add(table, make_work(str(number), [number] * 2048))
    while (plan := scheduler.schedule_ahead(0.0)) is not None:
        launched.append(plan)
        scheduler.advance(plan)
    assert [lengths(plan) for plan in launched] == [{str(number): 2048} for number in range(8)]
    for number in range(8):
        table.cancel(RequestId(str(number)), None)
    assert not lengths(scheduler.schedule(0.0))
    # A prompt alone is divided for all stages again.
    add(table, make_work("later", [9] * 2048))
    assert lengths(scheduler.schedule(0.0)) == {"later": 512}


def test_stages_with_a_small_limit_get_prompts() -> None:
    table = make_table(batched=16, num_stages=2)
    scheduler = Scheduler(table)
    add(table, make_work("a", [1] * 20))
    assert lengths(scheduler.schedule(0.0)) == {"a": 8}


def test_one_step_computes_a_prompt_whose_tokens_all_see_each_other() -> None:
    table = make_table(num_blocks=40, batched=20, has_bidirectional_prompts=True)
    scheduler = Scheduler(table)
    for name, length in (("a", 9), ("b", 9), ("c", 16)):
        add(table, make_work(name, [ord(name)] * length))
    steps = []
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        steps.append(lengths(plan))
        finish(scheduler, plan)
    # No chunk of a prompt fills a step that has no room for all of it.
    assert steps == [{"a": 9, "b": 9}, {"a": 1, "b": 1, "c": 16}, {"a": 1, "b": 1, "c": 1}]
    table.check_invariants()


def test_tokens_after_a_prompt_that_sees_itself_are_computed_in_chunks() -> None:
    """Of a replay, only the prompt must be in one step."""
    table = make_table(num_blocks=40, batched=12, has_bidirectional_prompts=True)
    scheduler = Scheduler(table)
    work = structs.replace(make_work("a", [1] * 30, max_tokens=30), num_prompt_tokens=10)
    add(table, work)
    steps = []
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        steps.append(lengths(plan))
        finish(scheduler, plan)
    assert steps == [{"a": 12}, {"a": 12}, {"a": 6}]


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 4), (10, 8), (13, 8)])
def test_a_prompt_that_sees_itself_never_leaves_a_single_token(length: int, cached: int) -> None:
    """Kernels compute a single token as one of an answer, with its window."""
    table = make_table(num_blocks=40, batched=20, has_bidirectional_prompts=True)
    scheduler = Scheduler(table)
    for name in "ab":
        add(table, make_work(name, [1] * length, max_tokens=1))
        plan = scheduler.schedule(0.0)
        finish(scheduler, plan)
    assert lengths(plan) == {"b": length - cached}
