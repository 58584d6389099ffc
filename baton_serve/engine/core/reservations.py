"""The decode side of a handoff, and pins for fetches by name. Pure.

reserve -> (mark_received)* -> admit, or admit_locally when the handoff failed. Whoever drives this must not free
(cancel, admit_locally) while a copy may still write to the reserved blocks.
"""

from collections.abc import Iterable, Mapping

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.outputs import NamedBlock, Reservation
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.sequence import Sequence, SequenceState
from baton_serve.engine.errors import UsageError


class Reservations:
    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def reserve(self, work: Work, now: float) -> Reservation | None:
        """Pins what is cached and allocates the rest; None: no room now."""
        table = self._table
        pool, block_tokens = table.pool, table.limits.block_tokens
        block_hashes = hash_blocks(work.root, work.token_ids, block_tokens, media=work.media)
        num_full = len(work.token_ids) // block_tokens
        prefix = pool.find(block_hashes[:num_full])
        needed = len(block_hashes) - len(prefix)
        spare = pool.num_total // 100 if table.running else 0
        if pool.num_free - pool.num_taken(prefix) - needed < spare:
            return None
        parent = table.add(work, "generate", now)
        cached = pool.take(prefix)
        fresh = pool.allocate(needed)
        assert fresh is not None
        parent.state = SequenceState.AWAITING_KV
        parent.blocks = cached + fresh
        parent.block_hashes = block_hashes[:num_full]
        missing = [NamedBlock(n, b) for n, b in zip(block_hashes[len(cached) :], fresh, strict=True)]
        parent.request.missing = dict(missing)
        return Reservation(work.request_id, block_hashes, len(cached), missing)

    def mark_received(self, request_id: RequestId, block_hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of that name."""
        blocks: list[int] = []
        parent = self._reserved(request_id)
        full = set(parent.block_hashes)
        for name in block_hashes:
            block = parent.request.missing.pop(name, None)
            if block is None:
                raise UsageError(f"request {request_id}: block {name.hex()} is not missing")
            blocks.append(block)
            if name in full:
                self._table.pool.register([name], [block])
        return blocks

    def missing_blocks(self, request_id: RequestId) -> list[int]:
        """Reserved blocks that have not been received; none for a request without a reservation."""
        request = self._table.requests.get(request_id)
        return list(request.missing.values()) if request is not None else []

    def admit(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> None:
        """All blocks are there: the sequences go on after their first tokens. Those that these tokens end, that were
        cancelled, or that have no token do not."""
        parent = self._reserved(request_id)
        request = parent.request
        if request.missing:
            raise UsageError(f"request {request_id}: {len(request.missing)} blocks have not been received")
        parent.num_computed_tokens = len(parent.token_ids)
        parent.num_registered_blocks = len(parent.block_hashes)
        request.is_first_reported = True
        wanted = {index: token for index, token in first_tokens.items() if index in request.unstarted}
        self._table.start_decoding(parent, wanted)

    def admit_locally(self, request_id: RequestId) -> None:
        """Computes the prompt here. Blocks that arrived are found again in the cache."""
        parent = self._reserved(request_id)
        parent.request.missing.clear()
        self._table.free_blocks(parent)
        self._table.enqueue(parent)

    def pin(self, block_hashes: Iterable[BlockHash]) -> list[NamedBlock]:
        """The longest cached prefix, kept until `unpin`. What lies in the host tier takes free blocks, if there are."""
        table, pool = self._table, self._table.pool
        wanted = list(block_hashes)
        prefix = pool.find(wanted)
        if pool.num_taken(prefix) <= pool.num_free:
            blocks = pool.take(prefix)
        else:
            blocks = pool.match(wanted)
            pool.share(blocks)
        pinned = [NamedBlock(name, block) for name, block in zip(wanted, blocks, strict=False)]
        for name, _ in pinned:
            table.pin_counts[name] = table.pin_counts.get(name, 0) + 1
        return pinned

    def unpin(self, block_hashes: Iterable[BlockHash]) -> None:
        table = self._table
        blocks: list[int] = []
        for name in block_hashes:
            block = table.pool.block_of(name)
            if block is None or name not in table.pin_counts:
                raise UsageError(f"block {name.hex()} is not pinned")
            table.pin_counts[name] -= 1
            if table.pin_counts[name] == 0:
                del table.pin_counts[name]
            blocks.append(block)
        table.pool.release(blocks)

    def _reserved(self, request_id: RequestId) -> Sequence:
        request = self._table.requests.get(request_id)
        if request is None or request.sequences[0].state is not SequenceState.AWAITING_KV:
            raise UsageError(f"request {request_id} holds no reservation")
        return request.sequences[0]
