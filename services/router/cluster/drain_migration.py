"""Who takes over the hottest blocks of an instance that leaves. Pure.

One instance of its pool gets all of them: a prefix is of use only where all of it is. What it has already it does not
fetch; others may fetch from it later.
"""

from collections.abc import Iterable

from baton_serve.contracts.identity import TicketId, new_ticket_id
from baton_serve.contracts.messages import Adopt, HotBlocks, Ticket
from baton_serve.services.router.cluster.worker_state import WorkerState

MAX_MIGRATION_RATIO = 0.5
"""Of the heir's free blocks: its own cache is worth something too."""


def pick_target(
    leaving: WorkerState, hot: HotBlocks, workers: Iterable[WorkerState]
) -> tuple[WorkerState, Adopt] | None:
    """The heir and what to tell it; None: there is nobody."""
    record = leaving.record
    qualified = [
        m
        for m in workers
        if m is not leaving and m.takes_work and m.record.role == record.role and m.record.layout == record.layout
    ]
    target = max(qualified, key=lambda m: (m.record.load.free_blocks, m.record.instance), default=None)
    if target is None:
        return None
    names = hot.names[: int(target.record.load.free_blocks * MAX_MIGRATION_RATIO)]
    if not names:
        return None
    ticket = Ticket(
        ticket=TicketId(new_ticket_id()),
        source=record.instance,
        source_generation=record.generation,
        source_address=record.transfer_address,
        sink=target.record.instance,
        sink_generation=target.record.generation,
        timeout_s=hot.timeout_s,
    )
    return target, Adopt(ticket=ticket, names=names)
