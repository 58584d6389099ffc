"""The engine's state in numbers, as it tells its owner."""

from baton_serve.engine.core.host_tier import HostTier
from baton_serve.engine.core.outputs import EngineStats
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.scheduler import Scheduler
from baton_serve.engine.core.sequence import SequenceState
from baton_serve.engine.core.step_meter import StepMeter


def engine_stats(table: RequestTable, scheduler: Scheduler, meter: StepMeter) -> EngineStats:
    pool = table.pool
    waiting = [*table.waiting(), *table.loading]
    host = pool.host or HostTier(0)
    sequences = [s for request in table.requests.values() for s in request.sequences]
    held = [s for s in sequences if s.state is SequenceState.AWAITING_FETCH]
    return EngineStats(
        free_blocks=pool.num_free,
        total_blocks=pool.num_total,
        cached_blocks=pool.num_cached,
        held_blocks=sum(len(s.blocks) for s in held),
        running=len(table.running),
        waiting=len(waiting) + len(table.ready),
        held=len(held),
        reserved=sum(s.state is SequenceState.AWAITING_KV for s in sequences),
        queued_tokens=sum(s.num_uncomputed_tokens for s in [*waiting, *table.running] if s.num_uncomputed_tokens > 1),
        prefill_tokens_per_s=meter.step_time_model.prefill_tokens_per_s,
        prefill_is_measured=not meter.step_time_model.is_warm_up_estimate,
        decode_step_s=meter.step_time_model.decode_step_s,
        preemptions=table.num_preemptions,
        prompt_tokens=meter.prompt_tokens,
        generated_tokens=meter.generated_tokens,
        prefix_query_tokens=scheduler.num_prefix_query_tokens,
        prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        steps=meter.steps,
        host_used_blocks=host.num_used,
        host_total_blocks=host.num_slots,
        host_hit_tokens=scheduler.num_host_hit_tokens,
        host_stored_blocks=host.num_stored,
        host_loaded_blocks=host.num_loaded,
        spare_tokens_per_s=scheduler.spare_tokens_per_s(),
    )
