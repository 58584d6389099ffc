"""Executes the planned copies of KV blocks and recurrent states on all ranks; they are planned in `core`.

A checkpoint of recurrent states is put together in the host memory where blocks are whole, in the order of a single
rank, so that its bytes do not depend on the number of ranks. If that memory is a mirror, the devices keep the
checkpoint as they keep any other block: each has a part of its bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from baton_serve.engine.core.checkpoints import StateCopy
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.kv.host_blocks import HostTierMemory
from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.engine.kv.state_memory import StateMemory
from baton_serve.engine.parallel.commands import ChangeStates
from baton_serve.engine.parallel.ranks import Ranks
from baton_serve.engine.parallel.tp_executor import BlockCopier
from baton_serve.engine.step.mirror_refs import MirrorRefs


class StateCopier(Protocol):
    """The part of `StateMemory` that executes planned operations on recurrent states; on one rank or on all."""

    def execute(self, copies: Iterable[StateCopy]) -> None: ...


class TPStateCopier:
    """Executes operations on recurrent states on all ranks, from rank 0, which has the states `own`. Implements
    `StateCopier`."""

    def __init__(self, own: StateMemory, copier: BlockCopier, ranks: Ranks, mirror_refs: MirrorRefs) -> None:
        self._own, self._copier, self._ranks, self._mirror_refs = own, copier, ranks, mirror_refs

    def execute(self, copies: Iterable[StateCopy]) -> None:
        for copy in copies:
            command = ChangeStates(copy.kind, copy.slot, copy.blocks, copy.source)
            if not copy.blocks:
                self._ranks.send_command(command)
                self._own.execute([copy])
                continue
            if copy.kind == "restore":
                self._copier.to_host(copy.blocks)
            self._ranks.expect_answer(command)
            self._own.execute([copy])
            # Transports may read the blocks afterwards, and other requests overwrite them.
            self._ranks.wait()
            if copy.kind == "save":
                self._copier.from_host(copy.blocks)
            self._mirror_refs.free_unused(copy.blocks)


def make_state_copier(own: StateMemory, copier: BlockCopier, ranks: Ranks, mirror_refs: MirrorRefs) -> StateCopier:
    """Return the object that executes operations on recurrent states: `own` with a single rank, otherwise one that
    executes them on all `ranks`."""
    return own if ranks.num_ranks == 1 else TPStateCopier(own, copier, ranks, mirror_refs)


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The memory of all KV: the cache on the device, the host tier, the mirror that several ranks share, and the
    recurrent states."""

    kv: KVCache
    host: HostTierMemory
    copier: BlockCopier
    mirror_refs: MirrorRefs
    states: StateCopier

    def copy_forked_blocks(self, table: RequestTable) -> None:
        """Execute the planned copies of KV blocks and of recurrent states that further sequences of requests with n > 1
        need. Called after each step."""
        # Not later: a block that is freed before it was copied could be filled by another request.
        copies = table.take_copies()
        self.host.move()
        if copies:
            self.host.before(block for copy in copies for block in copy)
            self.copier.copy_blocks([c.source for c in copies], [c.target for c in copies])
        self.copy_states(table)

    def copy_states(self, table: RequestTable) -> None:
        """Execute the planned copies of recurrent states. Called before the next step is launched, and before anything
        else uses their blocks."""
        if copies := table.checkpoints.take_copies():
            # Blocks of new checkpoints may have to be copied to the host tier first.
            self.host.move()
            self.host.before(block for copy in copies for block in copy.blocks)
            self.states.execute(copies)
            # They come after a step that may end before them, and a sequence that restores a checkpoint frees it.
            self.kv.order.end_use(block for copy in copies for block in copy.blocks)
