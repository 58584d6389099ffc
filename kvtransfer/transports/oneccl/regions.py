"""How a parcel's blocks are cut into messages of a pair. Both ends compute the same from the announcement."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.kvtransfer.frames import Piece

MESSAGE_BYTES = 16 << 20
"""Larger ones are erratic over oneCCL's tcp provider; every call costs about 42 µs of host time on Arc."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of the producer's memory, by their offset from its first block."""

    offset: int
    size: int


def groups(pieces: Sequence[Piece], block_bytes: int, limit: int = MESSAGE_BYTES) -> list[list[Region]]:
    """Regions in the order of the pieces, neighbours in memory joined, each group of at most `limit` bytes."""
    made: list[list[Region]] = []
    room = 0
    for run in _runs(pieces, block_bytes):
        offset, left = run.offset, run.size
        while left:
            if not room:
                made.append([])
                room = limit
            step = min(left, room)
            made[-1].append(Region(offset, step))
            offset, left, room = offset + step, left - step, room - step
    return made


def _runs(pieces: Sequence[Piece], block_bytes: int) -> list[Region]:
    runs: list[Region] = []
    for piece in pieces:
        offset = piece.source * block_bytes
        if runs and runs[-1].offset + runs[-1].size == offset:
            runs[-1] = Region(runs[-1].offset, runs[-1].size + block_bytes)
        else:
            runs.append(Region(offset, block_bytes))
    return runs
