"""Decides which artificial batches run before the first request, to compile kernels and to measure prefill and decode
speed.
"""

import time

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.request_table import RequestTable, SchedulerConfig
from baton_serve.engine.core.scheduler import Scheduler
from baton_serve.engine.errors import ModelError
from baton_serve.engine.execution.runner import ModelRunner
from baton_serve.engine.step.engine_stats import StepMeter

NUM_ANSWER_TOKENS = 4
"""Number of tokens that are decoded after each prompt."""
SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS = 32, 128
"""Lengths in tokens of measured prompts: the smallest that `StepTimeModel` counts, and a length that gives a better
estimate.
"""
MAX_LONG_PROMPT_S = 0.4
"""Longest time that the long prompt may take, in seconds, as predicted from the short one.

A slower engine starts sooner if its rate is taken from the short prompt.
"""


def measure_speed(runner: ModelRunner, num_blocks: int, limits: SchedulerConfig, *, may_be_short: bool) -> StepMeter:
    """Measure how fast the engine computes prompts and decodes, with a long prompt in its `num_blocks` free KV blocks.
    Its kernels are compiled already. Return the counted steps, with the learned rates.

    With `may_be_short` a short prompt is used if a long one would take too long. On accelerators a short prompt would
    give too low a rate.
    """
    if may_be_short:
        short = run_warm_up_batch(runner, num_blocks, limits, min(SHORT_PROMPT_TOKENS, limits.max_num_batched_tokens))
        if not should_measure_long_prompt(short.step_time_model.prefill_tokens_per_s):
            return short
    return run_warm_up_batch(runner, num_blocks, limits, min(LONG_PROMPT_TOKENS, limits.max_num_batched_tokens))


def should_measure_long_prompt(tokens_per_s: float) -> bool:
    """Return whether an engine that computes `tokens_per_s` prompt tokens per second can compute the long warm-up
    prompt without delaying its start much."""
    return tokens_per_s * MAX_LONG_PROMPT_S >= LONG_PROMPT_TOKENS


def run_warm_up_batch(runner: ModelRunner, num_blocks: int, limits: SchedulerConfig, num_tokens: int) -> StepMeter:
    """Compute test prompts with `num_tokens` tokens in all, and generate a few tokens after them, in KV blocks that no
    request owns yet. Return the counted steps, with the learned rates."""
    # No prompt may be longer than a sequence or the cache; several prompts make up the number.
    longest = max(1, min(limits.max_model_len, limits.num_tokens_alone(num_blocks - 1)) - NUM_ANSWER_TOKENS)
    return _compute(runner, num_blocks, limits, [min(num_tokens, longest)] * max(1, num_tokens // longest))


def compile_kernels(runner: ModelRunner, num_blocks: int, limits: SchedulerConfig) -> None:
    """Run batches of each kind for which Triton compiles kernels of its own: few and many prompts, of equal and of
    different lengths."""
    few, many = 2, 17
    for lengths in ([2, 3], [2] * many, [2, 3] * (many // few + 1)):
        _compute(runner, num_blocks, limits, lengths)


def _compute(runner: ModelRunner, num_blocks: int, limits: SchedulerConfig, lengths: list[int]) -> StepMeter:
    """Compute one test prompt of each of these lengths, and generate a few tokens after it. Return the counted steps,
    with the learned rates. Raises `ModelError` if logits are NaN."""
    table = RequestTable(BlockPool(num_blocks, caching=False), limits, frozenset())
    scheduler, meter = Scheduler(table), StepMeter()
    sampling = SamplingSpec(seed=0, max_tokens=NUM_ANSWER_TOKENS, temperature=0.0)
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
    # The next plans come from another request table, whose slots would match rows that the runner has cached.
    runner.forget()
    return meter
