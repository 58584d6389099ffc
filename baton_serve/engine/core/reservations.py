"""The decode side of a handoff, and pins for fetches by name. Pure.

reserve -> (mark_received)* -> admit, or admit_locally when the handoff failed. Whoever drives this must not free
(cancel, admit_locally) while a copy may still write to the reserved blocks.
"""

from collections.abc import Iterable, Mapping

from baton_serve.contracts.block_hash import block_names
from baton_serve.contracts.identity import BlockName, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.outputs import NamedBlock, Reservation
from baton_serve.engine.core.request_table import Roster
from baton_serve.engine.core.sequence import Sequence, State
from baton_serve.engine.errors import UsageError


class Reservations:
    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def reserve(self, work: Work, now: float) -> Reservation | None:
        """Pins what is cached and allocates the rest; None: no room now."""
        roster = self._roster
        pool, block_tokens = roster.pool, roster.limits.block_tokens
        names = block_names(work.root, work.token_ids, block_tokens, media=work.media)
        num_full = len(work.token_ids) // block_tokens
        prefix = pool.find(names[:num_full])
        needed = len(names) - len(prefix)
        spare = pool.num_total // 100 if roster.running else 0
        if pool.num_free - pool.num_taken(prefix) - needed < spare:
            return None
        trunk = roster.enrol(work, "generate", now)
        cached = pool.take(prefix)
        fresh = pool.allocate(needed)
        assert fresh is not None
        trunk.state = State.RESERVED
        trunk.blocks = cached + fresh
        trunk.names = names[:num_full]
        missing = [NamedBlock(n, b) for n, b in zip(names[len(cached) :], fresh, strict=True)]
        trunk.request.missing = dict(missing)
        return Reservation(work.request_id, names, len(cached), missing)

    def mark_received(self, request_id: RequestId, names: Iterable[BlockName]) -> list[int]:
        """The blocks of that name."""
        blocks: list[int] = []
        trunk = self._reserved(request_id)
        full = set(trunk.names)
        for name in names:
            block = trunk.request.missing.pop(name, None)
            if block is None:
                raise UsageError(f"request {request_id}: block {name.hex()} is not missing")
            blocks.append(block)
            if name in full:
                self._roster.pool.register([name], [block])
        return blocks

    def missing_blocks(self, request_id: RequestId) -> list[int]:
        """Reserved blocks that have not been received; none for a request without a reservation."""
        request = self._roster.requests.get(request_id)
        return list(request.missing.values()) if request is not None else []

    def admit(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> None:
        """All blocks are there: the sequences go on after their first tokens. Those that these tokens end, that were
        cancelled, or that have no token do not."""
        trunk = self._reserved(request_id)
        request = trunk.request
        if request.missing:
            raise UsageError(f"request {request_id}: {len(request.missing)} blocks have not been received")
        trunk.num_computed = len(trunk.token_ids)
        trunk.num_registered = len(trunk.names)
        request.is_first_reported = True
        wanted = {index: token for index, token in first_tokens.items() if index in request.to_start}
        self._roster.start_sequences(trunk, wanted)

    def admit_locally(self, request_id: RequestId) -> None:
        """Computes the prompt here. Blocks that arrived are found again in the cache."""
        trunk = self._reserved(request_id)
        trunk.request.missing.clear()
        self._roster.free_blocks(trunk)
        self._roster.enqueue(trunk)

    def pin(self, names: Iterable[BlockName]) -> list[NamedBlock]:
        """The longest cached prefix, kept until `unpin`. What lies in the host tier takes free blocks, if there are."""
        roster, pool = self._roster, self._roster.pool
        wanted = list(names)
        prefix = pool.find(wanted)
        if pool.num_taken(prefix) <= pool.num_free:
            blocks = pool.take(prefix)
        else:
            blocks = pool.match(wanted)
            pool.share(blocks)
        pinned = [NamedBlock(name, block) for name, block in zip(wanted, blocks, strict=False)]
        for name, _ in pinned:
            roster.pins[name] = roster.pins.get(name, 0) + 1
        return pinned

    def unpin(self, names: Iterable[BlockName]) -> None:
        roster = self._roster
        blocks: list[int] = []
        for name in names:
            block = roster.pool.block_of(name)
            if block is None or name not in roster.pins:
                raise UsageError(f"block {name.hex()} is not pinned")
            roster.pins[name] -= 1
            if roster.pins[name] == 0:
                del roster.pins[name]
            blocks.append(block)
        roster.pool.release(blocks)

    def _reserved(self, request_id: RequestId) -> Sequence:
        request = self._roster.requests.get(request_id)
        if request is None or request.sequences[0].state is not State.RESERVED:
            raise UsageError(f"request {request_id} holds no reservation")
        return request.sequences[0]
