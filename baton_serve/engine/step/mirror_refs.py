"""Blocks of which several devices each hold a part travel through the host's mirror of the KV cache: there before they
are read, back after.

On hosts and on a single device, where peers read the cache itself, all of this does nothing. A block that several held
requests share is copied once and stays until the last of them ends.
"""

from collections import Counter
from collections.abc import Iterable

from baton_serve.contracts.identity import RequestId
from baton_serve.engine.core.outputs import CompletedBlocks
from baton_serve.engine.parallel.tp_leader import BlockCopier


class MirrorRefs:
    """Who needs which block in the mirror. Called by the engine, in its thread."""

    def __init__(self, cache: BlockCopier) -> None:
        self._cache = cache
        self._users: Counter[int] = Counter()
        self._blocks_of: dict[RequestId, list[int]] = {}

    def publish(self, completed: Iterable[CompletedBlocks]) -> None:
        """These blocks are computed and will be read from the mirror until `end` of their request."""
        if not self._cache.is_mirrored:
            return
        for of_request in completed:
            blocks = [block for _, block in of_request.blocks]
            self._cache.to_host([block for block in blocks if not self._users[block]])
            self._users.update(blocks)
            self._blocks_of.setdefault(of_request.request_id, []).extend(blocks)

    def copy_to_device(self, blocks: Iterable[int]) -> None:
        """A transfer has filled these in the mirror."""
        if self._cache.is_mirrored:
            blocks = list(blocks)
            self._cache.from_host(blocks)
            self._cache.forget_host(blocks)

    def end(self, request_id: RequestId) -> None:
        """Nobody reads what was published for this request any more."""
        blocks = self._blocks_of.pop(request_id, [])
        self._users.subtract(blocks)
        self.free_mirror(block for block in blocks if self._users[block] <= 0)
        self._users += Counter()  # drops what nobody uses

    def free_mirror(self, blocks: Iterable[int]) -> None:
        """A transfer that was to fill these was given up."""
        self._cache.forget_host(blocks)

    def check_invariants(self) -> None:
        counted = Counter(block for blocks in self._blocks_of.values() for block in blocks)
        assert +self._users == counted, "the mirror keeps blocks that nobody needs"
