"""The next step's plan, with its blocks on the device: what comes from the host tier joins when it is there."""

from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.scheduler import ScheduledBatch, Scheduler
from baton_serve.engine.kv.host_blocks import HostTierMemory


class StepPlanner:
    def __init__(self, scheduler: Scheduler, table: RequestTable, host: HostTierMemory) -> None:
        self._scheduler = scheduler
        self._table = table
        self._host = host

    def plan(self, now: float) -> ScheduledBatch:
        """As soon as there is something to compute."""
        self._join_loaded()
        plan = self._scheduler.schedule(now)
        self._host.move()
        if not plan.chunks and self._table.loading:
            self._host.wait(self._table.loading[0].blocks)
            self._join_loaded()
            plan = self._scheduler.schedule(now)
            self._host.move()
        self._host.before(plan.blocks(self._table.limits.block_tokens))
        return plan

    def plan_ahead(self, now: float) -> ScheduledBatch | None:
        """As `Scheduler.schedule_ahead`."""
        plan = self._scheduler.schedule_ahead(now)
        self._host.move()
        if plan is not None:
            self._host.before(plan.blocks(self._table.limits.block_tokens))
        return plan

    def _join_loaded(self) -> None:
        for sequence in list(self._table.loading):
            if self._host.are_copied(sequence.blocks):
                self._table.finish_loading(sequence)
