"""Reserves KV blocks on a decode worker for a handoff, without those already cached, and pins blocks that other
instances fetch. Pure.

The order of calls is `reserve`, `mark_received` any number of times, then `admit`, or `admit_locally` if the handoff
failed. The caller must not free blocks (cancel, `admit_locally`) while a copy may still write to them.
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
    """Reserves KV blocks for prompts that other instances compute, and protects cached blocks from eviction while other
    instances fetch them. Only the engine's thread may call it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def reserve(self, work: Work, now: float) -> Reservation | None:
        """Reserve all KV blocks of a request's prompt: use the cached ones, and allocate the others.

        The result's `missing` lists the allocated blocks, whose KV must be received. It is None if too few blocks are
        free now. Raises `RequestError` if the request id is in use.
        """
        table = self._table
        pool, block_tokens = table.pool, table.limits.block_tokens
        block_hashes = hash_blocks(work.root, work.token_ids, block_tokens, media=work.media)
        num_full = len(work.token_ids) // block_tokens
        # Only full blocks are in the cache; the partly filled last one is always fetched.
        prefix = pool.find(block_hashes[:num_full])
        num_reused = len(prefix)
        # The states after the last token are needed too. They are cached if this prompt was here before.
        state_hashes = table.checkpoints.hashes(block_hashes[-1])
        states = table.checkpoints.find(block_hashes[-1])
        source_hashes, source = table.sources.hashes(work), table.sources.find(work)
        prefix += states + source
        # With cache groups, the blocks of full attention are followed by those of layers with a window.
        names = table.windows.names_of(block_hashes, len(work.token_ids))
        of_attention = set(block_hashes)
        window_hashes = [name for name in names if name not in of_attention]
        prefix += pool.find(window_hashes)
        reused = set(prefix.names)
        names = [*source_hashes, *names, *state_hashes]
        wanted = [name for name in names if name not in reused]
        # Keep 1 % free for the growth of running sequences.
        spare = pool.num_total // 100 if table.running else 0
        if pool.num_free - pool.num_taken(prefix) - len(wanted) < spare:
            return None
        if not pool.verify(prefix):
            return self.reserve(work, now)
        parent = table.add(work, "generate", now)
        cached = pool.take(prefix)
        fresh = pool.allocate(len(wanted))
        assert fresh is not None
        parent.state = SequenceState.AWAITING_KV
        block_of = dict(zip([*prefix.names, *wanted], cached + fresh, strict=True))
        parent.blocks = [block_of[name] for name in block_hashes]
        table.windows.give_received(parent, len(work.token_ids), [block_of[name] for name in window_hashes])
        parent.checkpoint_blocks = [block_of[name] for name in state_hashes]
        # The prefill instance fills them: no step here runs an encoder.
        parent.source_blocks = [block_of[name] for name in source_hashes]
        parent.block_hashes = block_hashes[:num_full]
        missing = [NamedBlock(n, b) for n, b in zip(wanted, fresh, strict=True)]
        parent.request.missing = dict(missing)
        return Reservation(work.request_id, names, num_reused, missing)

    def mark_received(self, request_id: RequestId, block_hashes: Iterable[BlockHash]) -> list[int]:
        """Record that the KV of these hashes has arrived, and return their blocks. From now on other prompts can share
        the full ones.

        Raises `UsageError` for a hash that the reservation does not wait for.
        """
        blocks: list[int] = []
        parent = self._reserved(request_id)
        kv = self._table.windows.names_of(parent.block_hashes, len(parent.token_ids))
        full = {*kv, *self._table.sources.hashes(parent.request.work)}
        for name in block_hashes:
            block = parent.request.missing.pop(name, None)
            if block is None:
                raise UsageError(f"request {request_id}: block {name.hex()} is not missing")
            blocks.append(block)
            if name in full:
                self._table.pool.register([name], [block])
        return blocks

    def missing_blocks(self, request_id: RequestId) -> list[int]:
        """Return the blocks of a reservation whose KV has not arrived; empty for a request without a reservation."""
        request = self._table.requests.get(request_id)
        return list(request.missing.values()) if request is not None else []

    def admit(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> None:
        """Start to decode a reserved request. `first_tokens` are the tokens that the prefill worker has sampled, by
        sequence index.

        Call it when all blocks have been received; otherwise it raises `UsageError`. A sequence is not started if its
        first token ends it, if it was cancelled, or if it has no first token.
        """
        parent = self._reserved(request_id)
        request = parent.request
        if request.missing:
            raise UsageError(f"request {request_id}: {len(request.missing)} blocks have not been received")
        parent.num_computed_tokens = len(parent.token_ids)
        parent.num_registered_blocks = len(parent.block_hashes)
        # The prefill instance has reported the first token already.
        request.is_first_reported = True
        wanted = {index: token for index, token in first_tokens.items() if index in request.unstarted}
        self._table.start_decoding(parent, wanted)

    def admit_locally(self, request_id: RequestId) -> None:
        """Queue a reserved request, whose handoff has failed, so that its prompt is computed on this instance. Blocks
        that have arrived are found in the prefix cache."""
        parent = self._reserved(request_id)
        parent.request.missing.clear()
        self._table.free_blocks(parent)
        self._table.enqueue(parent)

    def pin(self, block_hashes: Iterable[BlockHash]) -> list[NamedBlock]:
        """Keep the leading cached blocks of these hashes from eviction until `unpin`, and return them. Blocks in the
        host tier are copied to the device and included if enough blocks are free for that."""
        table, pool = self._table, self._table.pool
        wanted = list(block_hashes)
        prefix = pool.find(wanted)
        if pool.num_taken(prefix) <= pool.num_free:
            if not pool.verify(prefix):
                return self.pin(wanted)
            blocks = pool.take(prefix)
        else:
            # Without free blocks for the host tier's part, pin only what is on the device.
            blocks = pool.match(wanted)
            pool.share(blocks)
        pinned = [NamedBlock(name, block) for name, block in zip(wanted, blocks, strict=False)]
        for name, _ in pinned:
            table.pin_counts[name] = table.pin_counts.get(name, 0) + 1
        return pinned

    def unpin(self, block_hashes: Iterable[BlockHash]) -> None:
        """Allow the eviction of the blocks of these hashes again. Raises `UsageError` for a hash that is not pinned."""
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
        """Return the first sequence of a request, which owns its reserved blocks. Raises `UsageError` if the request
        has no reservation."""
        request = self._table.requests.get(request_id)
        if request is None or request.sequences[0].state is not SequenceState.AWAITING_KV:
            raise UsageError(f"request {request_id} has no reservation")
        return request.sequences[0]
