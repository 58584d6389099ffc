"""Blocks that come from another instance to be cached here, before anybody computes with them. Pure.

begin -> (receive)* -> end. Whoever drives this must not end while a copy may still write to the blocks.
"""

from collections.abc import Iterable, Sequence

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.engine.core.outputs import NamedBlock
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.errors import UsageError

MAX_IMPORT_RATIO = 0.5
"""Of the cache, for all imports together: running sequences need room to grow."""


class KVImports:
    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._missing: dict[RequestId, dict[BlockHash, int]] = {}

    def begin(self, import_id: RequestId, names: Sequence[BlockHash]) -> list[NamedBlock]:
        """Blocks to be filled with what follows the cached prefix of `names`, as far as there is room; the prefix is
        kept meanwhile. Empty: there is nothing to bring, or no room, and nothing to end."""
        table, pool = self._table, self._table.pool
        if import_id in table.import_blocks:
            raise UsageError(f"import {import_id} has begun already")
        prefix = pool.find(names)
        taken = sum(len(blocks) for blocks in table.import_blocks.values())
        spare = int(pool.num_total * MAX_IMPORT_RATIO) - taken - len(prefix)
        num_importable = min(spare, pool.num_free - pool.num_taken(prefix) - pool.num_total // 100)
        wanted = list(dict.fromkeys(names[len(prefix) :][: max(0, num_importable)]))
        if not wanted:
            return []
        cached = pool.take(prefix)
        fresh = pool.allocate(len(wanted))
        assert fresh is not None
        table.import_blocks[import_id] = cached + fresh
        missing = [NamedBlock(name, block) for name, block in zip(wanted, fresh, strict=True)]
        self._missing[import_id] = dict(missing)
        return missing

    def receive(self, import_id: RequestId, names: Iterable[BlockHash]) -> list[int]:
        """These hold their content now. Returns their blocks."""
        missing = self._missing.get(import_id, {})
        blocks: list[int] = []
        for name in names:
            if name not in missing:
                raise UsageError(f"import {import_id}: block {name.hex()} is not missing")
            blocks.append(missing.pop(name))
            self._table.pool.register([name], blocks[-1:])
        return blocks

    def end(self, import_id: RequestId) -> list[int]:
        """All of it is free, and what was received is cached. Returns the blocks that nothing came for."""
        self._table.pool.release(self._table.import_blocks.pop(import_id, []))
        return list(self._missing.pop(import_id, {}).values())
