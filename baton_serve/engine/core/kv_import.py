"""Allocates KV blocks for a prefix that is pulled from another instance (an import), and limits how many it may take.
Pure.

The order of calls is `begin`, `receive` any number of times, `end`. The caller must not end an import while a copy may
still write to its blocks.
"""

from collections.abc import Iterable, Sequence

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.engine.core.outputs import NamedBlock
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.errors import UsageError

MAX_IMPORT_RATIO = 0.5
"""Largest fraction of the KV cache that all running imports may occupy together. Running sequences need the rest to
grow."""


class KVImports:
    """Allocates KV blocks for imports: an import fetches cached blocks from another instance into this one's prefix
    cache. It owns the blocks until the import ends. Only the engine's thread may call it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._missing: dict[RequestId, dict[BlockHash, int]] = {}

    def begin(self, import_id: RequestId, names: Sequence[BlockHash]) -> list[NamedBlock]:
        """Allocate a block for each hash of `names` after the leading ones that are cached here, as many as there is
        room for. Return these hashes with their blocks.

        The cached leading blocks are not evicted until `end`. Return an empty list if nothing is missing or no block is
        free; then `end` is not needed. Raises `UsageError` if the import id is in use.
        """
        table, pool = self._table, self._table.pool
        if import_id in table.import_blocks:
            raise UsageError(f"import {import_id} has begun already")
        prefix = pool.find(names)
        taken = sum(len(blocks) for blocks in table.import_blocks.values())
        spare = int(pool.num_total * MAX_IMPORT_RATIO) - taken - len(prefix)
        # 1 % stays free, as for new sequences: running ones must be able to grow.
        num_importable = min(spare, pool.num_free - pool.num_taken(prefix) - pool.num_total // 100)
        # A repeated hash needs only one block.
        wanted = list(dict.fromkeys(names[len(prefix) :][: max(0, num_importable)]))
        if not wanted:
            return []
        if not pool.verify(prefix):
            return self.begin(import_id, names)
        cached = pool.take(prefix)
        fresh = pool.allocate(len(wanted))
        assert fresh is not None
        table.import_blocks[import_id] = cached + fresh
        missing = [NamedBlock(name, block) for name, block in zip(wanted, fresh, strict=True)]
        self._missing[import_id] = dict(missing)
        return missing

    def receive(self, import_id: RequestId, names: Iterable[BlockHash]) -> list[int]:
        """Add the blocks of these hashes, whose KV has arrived, to the prefix cache, and return the blocks. Raises
        `UsageError` for a hash that this import does not wait for."""
        missing = self._missing.get(import_id, {})
        blocks: list[int] = []
        for name in names:
            if name not in missing:
                raise UsageError(f"import {import_id}: block {name.hex()} is not missing")
            blocks.append(missing.pop(name))
            self._table.pool.register([name], blocks[-1:])
        return blocks

    def end(self, import_id: RequestId) -> list[int]:
        """Give up the ownership of all blocks of an import; the received ones stay in the prefix cache. Return the
        blocks that were not received."""
        self._table.pool.release(self._table.import_blocks.pop(import_id, []))
        return list(self._missing.pop(import_id, {}).values())
