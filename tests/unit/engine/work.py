"""Requests and request tables for tests of the engine's pure core."""

from typing import Any

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.host_tier import HostTier
from baton_serve.engine.core.outputs import StepResult
from baton_serve.engine.core.request_table import RequestTable, SchedulerConfig
from baton_serve.engine.core.sampling_rules import uniform
from baton_serve.engine.core.scheduler import ModelRunnerOutput, ScheduledBatch, Scheduler
from baton_serve.engine.core.sequence import Mode

ROOT = BlockHash(b"root".ljust(16, b"\0"))
BLOCK_TOKENS = 4
EOS = 0


def make_work(
    request_id: str,
    tokens: list[int],
    *,
    max_tokens: int = 4,
    priority: int = 0,
    sequences: int = 1,
    itl_s: float | None = None,
) -> Work:
    return Work(
        request_id=RequestId(request_id),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=SamplingSpec(seed=0, max_tokens=max_tokens),
        root=ROOT,
        sequences=list(range(sequences)),
        priority=priority,
        itl_s=itl_s,
    )


def make_table(
    num_blocks: int = 16,
    *,
    seqs: int = 4,
    batched: int = 8,
    caching: bool = True,
    host_slots: int = 0,
    **others: Any,
) -> RequestTable:
    """`others` are more limits."""
    limits = SchedulerConfig(
        block_tokens=BLOCK_TOKENS,
        max_model_len=num_blocks * BLOCK_TOKENS,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        **{"checkpoint_tokens": 12, **others},
    )
    pool = BlockPool(num_blocks + 1, caching=caching, host=HostTier(host_slots) if host_slots else None)
    return RequestTable(pool, limits, frozenset({EOS}))


def add(table: RequestTable, work: Work, mode: Mode = "generate") -> None:
    table.enqueue(table.add(work, mode, 0.0))


def made_up_token(request_id: str, index: int, position: int) -> int:
    """Any function of (request, sequence, position): 1..9, so never the end of sequence."""
    return 1 + int(9 * uniform(sum(request_id.encode()), index, position))


def made_up_tokens(plan: ScheduledBatch) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        [
            made_up_token(row.sequence.request.work.request_id, row.index, row.sequence.num_generated)
            for row in plan.rows
        ]
    )


def step(table: RequestTable, scheduler: Scheduler) -> StepResult:
    """One step with made-up tokens."""
    plan = scheduler.schedule(0.0)
    result = scheduler.apply(plan, made_up_tokens(plan), 0.0)
    table.take_copies()
    table.check_invariants()
    return result


class AheadSteps:
    """Steps as an engine takes them that launches the next one before this one's tokens are known."""

    def __init__(self) -> None:
        self.launched: tuple[ScheduledBatch, StepResult] | None = None
        self.num_ahead = 0

    def step(self, table: RequestTable, scheduler: Scheduler) -> StepResult:
        plan, advanced = self.launched or _launch(scheduler, scheduler.schedule(0.0))
        following = None
        if all(chunk.sequence.request.mode != "prefill" for chunk in plan.chunks):
            following = scheduler.schedule_ahead(0.0)
        self.launched = None if following is None else _launch(scheduler, following)
        self.num_ahead += following is not None
        table.check_invariants()
        result = scheduler.apply(plan, made_up_tokens(plan), 0.0, advanced=advanced)
        table.take_copies()
        table.check_invariants()
        return result


def _launch(scheduler: Scheduler, plan: ScheduledBatch) -> tuple[ScheduledBatch, StepResult]:
    return plan, scheduler.advance(plan)


def run_to_end(table: RequestTable, scheduler: Scheduler, *, most_steps: int = 500) -> dict[tuple[str, int], list[int]]:
    """Run until the work is done, and return the tokens by request and sequence. Fails after `most_steps`."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for _ in range(most_steps):
        if not scheduler.has_work():
            return tokens
        for output in step(table, scheduler).tokens:
            reported = tokens.setdefault((output.request_id, output.sequence), [])
            assert output.position == len(reported)
            reported += output.token_ids
    raise AssertionError("the work does not end")


def expected_tokens(request_id: str, index: int, count: int) -> list[int]:
    return [made_up_token(request_id, index, position) for position in range(count)]
