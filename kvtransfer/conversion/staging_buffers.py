"""Maps the tokens of a producer's blocks to places in this node's memory while a fetch runs. This module touches no
bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.kvtransfer.conversion.plan import Translation, plan, plan_states
from baton_serve.kvtransfer.errors import LocalTransferError, TransportUnavailable


@dataclass(frozen=True, slots=True)
class TokenTarget:
    """Describes one copy out of an arriving block of another layout: `count` tokens, from its token `source_token` on,
    go to this node's block number `block`, from its token `sink_token` on. With `is_state`, the three numbers count
    bytes of recurrent states, not tokens.
    """

    block: int
    source_token: int
    sink_token: int
    count: int
    is_state: bool = False


class StagedFetch:
    """One fetch from a producer of another layout. `wanted` pairs each block hash of the producer with a place: a
    number that `StagingBuffers` has reserved and that stands for the block until it is converted. `names` are the
    hashes of this node's blocks, and `parts` lists, for each block of the producer, the indexes in `names` of the
    blocks that it helps to fill.
    """

    def __init__(self, wanted: list[tuple[BlockHash, int]], parts: dict[BlockHash, list[int]], names: list[BlockHash]):
        self.wanted = wanted
        self.received: list[BlockHash] = []
        """Hashes of this node's blocks that are complete."""
        self._parts = parts
        self._names = names
        # One block of this node may need several blocks of the producer, if those are smaller.
        self._missing = [sum(index in of for of in parts.values()) for index in range(len(names))]

    def arrived(self, names: Sequence[BlockHash]) -> list[BlockHash]:
        """Record that the producer's blocks `names` have arrived and are converted. Return the hashes of this node's
        blocks that are complete now.
        """
        whole: list[BlockHash] = []
        for name in names:
            for index in self._parts[name]:
                self._missing[index] -= 1
                if not self._missing[index]:
                    whole.append(self._names[index])
        self.received += whole
        return whole


class StagingBuffers:
    """Keeps, for all fetches of a node from producers of another layout, which tokens of this node's blocks each
    arriving block fills. A number, its place, identifies the arriving block. The event loop changes the table, and
    threads that write bytes look places up.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._targets: dict[int, list[TokenTarget]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._targets)

    def begin(self, translation: Translation, wanted: Sequence[tuple[BlockHash, int]]) -> StagedFetch:
        """Register a fetch whose blocks must be converted to this node's layout. `wanted` are this node's blocks (hash,
        block number) in the order of their tokens; blocks of recurrent states come last, if they are wanted. Return the
        fetch in terms of the producer's blocks.

        Raises `LocalTransferError` if `wanted` are not the blocks that `translation` describes.
        """
        first, source = translation.first_block, translation.layout
        pieces = plan(source, self._layout, first_block=first, num_tokens=translation.num_tokens)
        num_wanted = len({piece.sink for piece in pieces})
        if len(wanted) > num_wanted and self._layout.state_blocks:
            pieces += plan_states(source, self._layout, num_tokens=translation.num_tokens)
            num_wanted += self._layout.state_blocks
        # The hashes come from the caller and the layout from the peer: check that they fit before any place is given
        # out.
        if num_wanted != len(wanted) or (pieces and pieces[-1].source >= len(translation.names)):
            raise LocalTransferError(
                f"{len(wanted)} blocks from {first} on and {len(translation.names)} of the producer's"
                f" are not those of {translation.num_tokens} tokens"
            )
        # Places are new numbers for each fetch: two fetches may want the same block at the same time.
        places: dict[int, int] = {}
        parts: dict[BlockHash, list[int]] = {}
        for piece in pieces:
            if piece.source not in places:
                places[piece.source] = self._next
                self._targets[self._next] = []
                self._next += 1
            block = wanted[piece.sink - first][1]
            target = TokenTarget(block, piece.source_token, piece.sink_token, piece.count, piece.is_state)
            self._targets[places[piece.source]].append(target)
            parts.setdefault(translation.names[piece.source], []).append(piece.sink - first)
        foreign = [(translation.names[index], place) for index, place in places.items()]
        return StagedFetch(foreign, parts, [name for name, _ in wanted])

    def targets(self, place: int) -> Sequence[TokenTarget]:
        """Return the copies to make out of the arriving block with the number `place`. Raises `TransportUnavailable` if
        its fetch has ended.
        """
        found = self._targets.get(place)
        if found is None:
            raise TransportUnavailable("the fetch has ended")
        return found

    def end(self, staged: StagedFetch) -> None:
        """Forget a fetch that `begin` registered. Call it when none of its copies runs any more."""
        for _, place in staged.wanted:
            del self._targets[place]
