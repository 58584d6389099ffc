"""Counts steps and tokens of the engine, and reads its state for load reports; metrics are computed in
`services/instance/metrics.py`.
"""

from baton_serve.engine.core.host_tier import HostTier
from baton_serve.engine.core.outputs import EngineStats
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.scheduler import ScheduledBatch, Scheduler
from baton_serve.engine.core.sequence import SequenceState
from baton_serve.engine.core.step_time_model import StepTimeModel


class StepMeter:
    """Counts the steps and tokens of one engine, and passes the durations of the steps to its `StepTimeModel`."""

    def __init__(self, step_time_model: StepTimeModel | None = None) -> None:
        self.step_time_model = step_time_model or StepTimeModel()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0

    def record(self, plan: ScheduledBatch, seconds: float, num_generated: int) -> None:
        """Count a step with the chunks of `plan`, which took `seconds` and sampled `num_generated` tokens. A step
        without chunks is ignored."""
        if not plan.chunks:  # a step that only waited for the host tier says nothing about speed
            return
        # A chunk of one token is counted as decoding, though it can be the last token of a prompt; both cost the same.
        prompts = [chunk.length for chunk in plan.chunks if chunk.length > 1]
        num_decoding, num_prompt_tokens = len(plan.chunks) - len(prompts), sum(prompts)
        self.steps += 1
        self.prompt_tokens += num_prompt_tokens
        self.generated_tokens += num_generated
        if not prompts:
            self.step_time_model.decoded(seconds)
            return
        self.step_time_model.computed(num_prompt_tokens, seconds)
        if num_decoding:
            self.step_time_model.mixed(num_prompt_tokens, num_decoding, seconds)


def engine_stats(table: RequestTable, scheduler: Scheduler, meter: StepMeter) -> EngineStats:
    """Return the current load and the counters of an engine: `table` has its requests, `scheduler` its prefill headroom
    and cache hits, `meter` its steps."""
    pool = table.pool
    waiting = [*table.iter_waiting(), *table.loading]
    host = pool.host or HostTier(0)
    sequences = [s for request in table.requests.values() for s in request.sequences]
    held = [s for s in sequences if s.state is SequenceState.AWAITING_FETCH]
    longest = table.limits.max_model_len
    return EngineStats(
        free_blocks=pool.num_free,
        total_blocks=pool.num_total,
        longest_blocks=table.limits.num_blocks_alone(longest),
        longest_own_blocks=table.num_blocks_for(longest),
        cached_blocks=pool.num_cached,
        held_blocks=sum(len(s.kv_blocks) for s in held),
        running=len(table.running),
        waiting=len(waiting) + len(table.ready),
        held=len(held),
        reserved=sum(s.state is SequenceState.AWAITING_KV for s in sequences),
        # Sequences with one uncomputed token are decoding; only prompts count as queued.
        queued_tokens=sum(s.num_uncomputed_tokens for s in [*waiting, *table.running] if s.num_uncomputed_tokens > 1),
        prefill_tokens_per_s=meter.step_time_model.prefill_tokens_per_s,
        prefill_is_measured=not meter.step_time_model.is_warm_up_estimate,
        decode_step_s=meter.step_time_model.decode_step_s,
        preemptions=table.num_preemptions,
        prompt_tokens=meter.prompt_tokens,
        generated_tokens=meter.generated_tokens,
        prefix_query_tokens=scheduler.admission.num_prefix_query_tokens,
        prefix_hit_tokens=scheduler.admission.num_prefix_hit_tokens,
        steps=meter.steps,
        host_used_blocks=host.num_used,
        host_total_blocks=host.num_slots,
        host_hit_tokens=scheduler.admission.num_host_hit_tokens,
        host_stored_blocks=host.num_stored,
        host_loaded_blocks=host.num_loaded,
        host_damaged_blocks=host.num_damaged,
        spare_tokens_per_s=scheduler.spare_tokens_per_s(),
    )
