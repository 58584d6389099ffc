"""Where the tokens of a producer's blocks go in this node's memory, while a fetch of them runs. Touches no bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.layout import KVLayout
from baton_serve.kvtransfer.conversion.plan import Translation, plan
from baton_serve.kvtransfer.errors import LocalTransferError, TransportUnavailable


@dataclass(frozen=True, slots=True)
class TokenTarget:
    """`count` tokens of an arriving block, from `source_token` on, go to `block` here from `sink_token` on."""

    block: int
    source_token: int
    sink_token: int
    count: int


class StagedFetch:
    """One fetch: `wanted` are the producer's blocks and the places (numbers in `StagingBuffers`) they go to."""

    def __init__(self, wanted: list[tuple[BlockHash, int]], parts: dict[BlockHash, list[int]], names: list[BlockHash]):
        self.wanted = wanted
        self.received: list[BlockHash] = []
        """This node's blocks that are whole."""
        self._parts = parts
        self._names = names
        self._missing = [sum(index in of for of in parts.values()) for index in range(len(names))]

    def arrived(self, names: Sequence[BlockHash]) -> list[BlockHash]:
        """Blocks of the producer have come; returns those of this node that are whole now."""
        whole: list[BlockHash] = []
        for name in names:
            for index in self._parts[name]:
                self._missing[index] -= 1
                if not self._missing[index]:
                    whole.append(self._names[index])
        self.received += whole
        return whole


class StagingBuffers:
    """Of all running fetches of a node. Threads that place bytes look targets up."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._targets: dict[int, list[TokenTarget]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._targets)

    def begin(self, translation: Translation, wanted: Sequence[tuple[BlockHash, int]]) -> StagedFetch:
        """`wanted`: this node's blocks, in the order of their tokens. Raises `LocalTransferError` if that cannot be."""
        first, source = translation.first_block, translation.layout
        pieces = plan(source, self._layout, first_block=first, num_tokens=translation.num_tokens)
        num_wanted = len({piece.sink for piece in pieces})
        if num_wanted != len(wanted) or (pieces and pieces[-1].source >= len(translation.names)):
            raise LocalTransferError(
                f"{len(wanted)} blocks from {first} on and {len(translation.names)} of the producer's"
                f" are not those of {translation.num_tokens} tokens"
            )
        places: dict[int, int] = {}
        parts: dict[BlockHash, list[int]] = {}
        for piece in pieces:
            if piece.source not in places:
                places[piece.source] = self._next
                self._targets[self._next] = []
                self._next += 1
            block = wanted[piece.sink - first][1]
            target = TokenTarget(block, piece.source_token, piece.sink_token, piece.count)
            self._targets[places[piece.source]].append(target)
            parts.setdefault(translation.names[piece.source], []).append(piece.sink - first)
        foreign = [(translation.names[index], place) for index, place in places.items()]
        return StagedFetch(foreign, parts, [name for name, _ in wanted])

    def targets(self, place: int) -> Sequence[TokenTarget]:
        """Raises `TransportUnavailable` for a fetch that has ended."""
        found = self._targets.get(place)
        if found is None:
            raise TransportUnavailable("the fetch has ended")
        return found

    def end(self, landing: StagedFetch) -> None:
        """No copy of this fetch runs any more."""
        for _, place in landing.wanted:
            del self._targets[place]
