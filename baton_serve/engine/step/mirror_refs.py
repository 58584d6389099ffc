"""Decides when a block in the mirror (host memory where ranks join their parts of a block for transport) is copied and
freed.

The mirror is host memory in which the ranks put the parts of a block together for transport. A block is copied there
before it is read, and back to the devices after it was received. On hosts and with a single device, transports use the
KV cache itself, and nothing here does anything.
"""

from collections import Counter
from collections.abc import Iterable

from baton_serve.contracts.identity import RequestId
from baton_serve.engine.core.outputs import CompletedBlocks, NamedBlock
from baton_serve.engine.parallel.tp_executor import BlockCopier


class MirrorRefs:
    """Counts the requests for which transports read each block in the mirror, the copy of all ranks' KV blocks in host
    memory. A block is copied there for its first request, and its host memory is freed with the last. Only the engine's
    thread may call it."""

    def __init__(self, cache: BlockCopier) -> None:
        self._cache = cache
        self._users: Counter[int] = Counter()
        self._blocks_of: dict[RequestId, list[int]] = {}
        self._waiting: dict[RequestId, list[NamedBlock]] = {}
        """Computed blocks of requests whose ranks send their parts themselves; they are not in the mirror."""

    def publish(self, completed: Iterable[CompletedBlocks], steps_after: int | None = None) -> None:
        """Copy computed blocks of requests from the devices to the mirror in host memory, where transports read them
        until `end` is called for the request. Do nothing without a mirror.

        `steps_after` is how many steps have been launched after the last one that computed some of these blocks: the
        copies do not wait for them. None: they wait for all steps.
        """
        if not self._cache.is_mirrored:
            return
        for of_request in completed:
            if (waiting := self._waiting.get(of_request.request_id)) is not None:
                waiting.extend(of_request.blocks)
                continue
            blocks = [block for _, block in of_request.blocks]
            # shared blocks are there already
            self._cache.to_host([block for block in blocks if not self._users[block]], steps_after)
            self._users.update(blocks)
            self._blocks_of.setdefault(of_request.request_id, []).extend(blocks)

    def leave_to_ranks(self, request_id: RequestId) -> None:
        """Copy no blocks of this request to the mirror until `copy_waiting`: each rank sends its part itself."""
        self._waiting[request_id] = []

    def copy_waiting(self, request_id: RequestId) -> None:
        """Copy the computed blocks of a request to the mirror, and later ones as they are computed, because a rank
        could not send its part. Do nothing if the request has ended.
        """
        if blocks := self._waiting.pop(request_id, []):
            self.publish([CompletedBlocks(request_id, blocks)])

    def copy_to_device(self, blocks: Iterable[int]) -> None:
        """Copy blocks that transports have written to the mirror in host memory to the devices, and free their host
        memory. Do nothing without a mirror."""
        if self._cache.is_mirrored:
            blocks = list(blocks)
            self._cache.from_host(blocks)
            self._cache.forget_host(blocks)

    def end(self, request_id: RequestId) -> None:
        """Record that no transport reads the published blocks of this request any more. Free the host memory of blocks
        that no other request has published."""
        self._waiting.pop(request_id, None)
        blocks = self._blocks_of.pop(request_id, [])
        self._users.subtract(blocks)
        self.free_mirror(block for block in blocks if self._users[block] <= 0)
        self._users += Counter()  # drops entries with a count of 0

    def free_unused(self, blocks: Iterable[int]) -> None:
        """Free the memory of these blocks in the mirror. Blocks that a transport reads stay there."""
        self.free_mirror([block for block in blocks if not self._users[block]])

    def free_mirror(self, blocks: Iterable[int]) -> None:
        """Free the memory of these blocks in the mirror, which is host memory, because a transfer that was to fill them
        has failed."""
        self._cache.forget_host(blocks)

    def check_invariants(self) -> None:
        """Assert that the number of requests of each block agrees with the published blocks. Only tests call it."""
        counted = Counter(block for blocks in self._blocks_of.values() for block in blocks)
        assert +self._users == counted, "the mirror keeps blocks that nobody needs"
