"""Runs made-up prompts through scheduler and runner before any request: allocates, compiles, and measures. Raises
`ModelError` for a model that computes no numbers."""

import time

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import SamplingParams
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.request_table import RequestTable, SchedulerConfig
from baton_serve.engine.core.scheduler import Scheduler
from baton_serve.engine.errors import ModelError
from baton_serve.engine.execution.runner import ModelRunner
from baton_serve.engine.step.engine_stats import StepMeter

NUM_ANSWER_TOKENS = 4
SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS = 32, 128
"""Prompts that are measured: the fewest that a meter takes, and as many as say more."""
MAX_LONG_PROMPT_S = 0.4
"""So long may a long prompt take, at the short one's speed: else the short one's speed is the measure."""


def measure_speed(runner: ModelRunner, num_blocks: int, limits: SchedulerConfig, *, may_be_short: bool) -> StepMeter:
    """How fast an engine is that has been exercised. `may_be_short`: its speed hardly depends on a prompt's length."""
    if may_be_short:
        short = run_warm_up_batch(runner, num_blocks, limits, min(SHORT_PROMPT_TOKENS, limits.max_num_batched_tokens))
        if not should_measure_long_prompt(short.step_time_model.prefill_tokens_per_s):
            return short
    return run_warm_up_batch(runner, num_blocks, limits, min(LONG_PROMPT_TOKENS, limits.max_num_batched_tokens))


def should_measure_long_prompt(tokens_per_s: float) -> bool:
    """Whether a start should wait for the longer prompt."""
    return tokens_per_s * MAX_LONG_PROMPT_S >= LONG_PROMPT_TOKENS


def run_warm_up_batch(runner: ModelRunner, num_blocks: int, limits: SchedulerConfig, num_tokens: int) -> StepMeter:
    """Computes prompts of `num_tokens` in all, and a few tokens after them, in blocks that nobody owns yet."""
    longest = max(1, min(limits.max_model_len, (num_blocks - 1) * limits.block_tokens) - NUM_ANSWER_TOKENS)
    return _compute(runner, num_blocks, limits, [min(num_tokens, longest)] * max(1, num_tokens // longest))


def compile_kernels(runner: ModelRunner, num_blocks: int, limits: SchedulerConfig) -> None:
    """Batches of every kind that kernels are compiled for: few and many prompts, of equal and different lengths."""
    few, many = 2, 17
    for lengths in ([2, 3], [2] * many, [2, 3] * (many // few + 1)):
        _compute(runner, num_blocks, limits, lengths)


def _compute(runner: ModelRunner, num_blocks: int, limits: SchedulerConfig, lengths: list[int]) -> StepMeter:
    table = RequestTable(BlockPool(num_blocks, caching=False), limits, frozenset())
    scheduler, meter = Scheduler(table), StepMeter()
    sampling = SamplingParams(seed=0, max_tokens=NUM_ANSWER_TOKENS, temperature=0.0)
    for number, length in enumerate(lengths):
        work = Work(
            request_id=RequestId(f"warm-up-{number}"),
            token_ids=[0] * length,
            num_prompt_tokens=length,
            sampling=sampling,
            root=BlockHash(bytes(16)),
        )
        table.enqueue(table.add(work, "generate", 0.0))
    while scheduler.has_work():
        started = time.perf_counter()
        plan = scheduler.schedule(0.0)
        sampled = runner.run(plan)
        for failure in sampled.failed.values():
            raise ModelError(failure.message)
        meter.record(plan, time.perf_counter() - started, len(plan.rows))
        scheduler.apply(plan, sampled, 0.0)
    runner.forget()
    return meter
