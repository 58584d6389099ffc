"""The next step's plan, with its blocks on the device: what comes from the host tier joins when it is there."""

from baton_serve.engine.core.request_table import Roster
from baton_serve.engine.core.scheduler import Plan, Scheduler
from baton_serve.engine.kv.host_blocks import HostBlocks


class Planner:
    def __init__(self, scheduler: Scheduler, roster: Roster, host: HostBlocks) -> None:
        self._scheduler = scheduler
        self._roster = roster
        self._host = host

    def plan(self, now: float) -> Plan:
        """As soon as there is something to compute."""
        self._join_loaded()
        plan = self._scheduler.schedule(now)
        self._host.move()
        if not plan.chunks and self._roster.loading:
            self._host.wait(self._roster.loading[0].blocks)
            self._join_loaded()
            plan = self._scheduler.schedule(now)
            self._host.move()
        self._host.before(plan.blocks(self._roster.limits.block_tokens))
        return plan

    def plan_ahead(self, now: float) -> Plan | None:
        """As `Scheduler.schedule_ahead`."""
        plan = self._scheduler.schedule_ahead(now)
        self._host.move()
        if plan is not None:
            self._host.before(plan.blocks(self._roster.limits.block_tokens))
        return plan

    def _join_loaded(self) -> None:
        for sequence in list(self._roster.loading):
            if self._host.are_there(sequence.blocks):
                self._roster.loaded(sequence)
