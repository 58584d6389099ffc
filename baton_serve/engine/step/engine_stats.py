"""The engine's state in numbers, as it tells its owner."""

from baton_serve.engine.core.host_tier import HostTier
from baton_serve.engine.core.outputs import EngineStats
from baton_serve.engine.core.request_table import Roster
from baton_serve.engine.core.scheduler import Scheduler
from baton_serve.engine.core.sequence import State
from baton_serve.engine.core.step_meter import Meter


def stats_of(roster: Roster, scheduler: Scheduler, meter: Meter) -> EngineStats:
    pool = roster.pool
    waiting = [*roster.waiting(), *roster.loading]
    host = pool.host or HostTier(0)
    sequences = [s for request in roster.requests.values() for s in request.sequences]
    held = [s for s in sequences if s.state is State.HELD]
    return EngineStats(
        free_blocks=pool.num_free,
        total_blocks=pool.num_total,
        cached_blocks=pool.num_cached,
        held_blocks=sum(len(s.blocks) for s in held),
        running=len(roster.running),
        waiting=len(waiting) + len(roster.ready),
        held=len(held),
        reserved=sum(s.state is State.RESERVED for s in sequences),
        queued_tokens=sum(s.num_remaining for s in [*waiting, *roster.running] if s.num_remaining > 1),
        prefill_tokens_per_s=meter.pace.prefill_tokens_per_s,
        prefill_is_measured=not meter.pace.is_guess,
        decode_step_s=meter.pace.decode_step_s,
        preemptions=roster.num_preemptions,
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
