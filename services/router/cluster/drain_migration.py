"""Chooses the instance that takes over the most used KV blocks of a draining one.

One instance of the same pool fetches all of them, because a prefix is useful only where all of its blocks are. It does
not fetch the blocks that it has already, and other instances may fetch prefixes from it later.
"""

import logging
from collections.abc import Iterable

from baton_serve.contracts.identity import TicketId, new_ticket_id
from baton_serve.contracts.messages import HotBlocks, MigrateIn, MigrationTickets, Ticket
from baton_serve.services.router.cluster.worker_state import WorkerState

logger = logging.getLogger(__name__)

MAX_MIGRATION_RATIO = 0.5
"""Largest fraction of the target's free blocks that is filled; the rest keeps room for its own requests and cache."""


def migrate(leaving: WorkerState, hot: HotBlocks, workers: Iterable[WorkerState]) -> None:
    """Ask another instance of the same pool to fetch the blocks `hot` of the draining instance `leaving`, and answer
    `leaving`, which has sent `hot`.
    """
    if hot.generation != leaving.record.generation:
        return
    found = pick_target(leaving, hot, workers)
    if found is not None:
        target, adopt = found
        num_blocks = len(adopt.names)
        logger.info(
            "drain migration: %s fetches %d KV blocks from %s", target.record.instance, num_blocks, hot.instance
        )
        target.send(adopt)
    # An answer without tickets lets the draining instance stop immediately instead of waiting for a fetch.
    leaving.send(MigrationTickets([found[1].ticket.ticket] if found is not None else []))


def pick_target(
    leaving: WorkerState, hot: HotBlocks, workers: Iterable[WorkerState]
) -> tuple[WorkerState, MigrateIn] | None:
    """Choose the instance that takes over the blocks `hot` of `leaving`.

    It has the same role and KV layout and the most free blocks. Return it with its `MigrateIn` message, or None if no
    instance qualifies.
    """
    record = leaving.record
    qualified = [
        w
        for w in workers
        if w is not leaving and w.takes_work and w.record.role == record.role and w.record.layout == record.layout
    ]
    target = max(qualified, key=lambda w: (w.record.load.free_blocks, w.record.instance), default=None)
    if target is None:
        return None
    # The hottest blocks come first and parents before children, so the first ones form complete prefixes.
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
    return target, MigrateIn(ticket=ticket, names=names)
