"""How a parcel is cut into ZeroMQ frames."""

import pytest

from baton_serve.kvtransfer.transports.zeromq import frame_step

MIB = 1 << 20


@pytest.mark.parametrize(
    ("parcel", "block", "step"),
    [
        (32 * MIB, 8 * MIB, 8 * MIB),  # a block to a frame
        (16 * MIB, 256 << 10, 8 * MIB),  # many whole blocks to a frame
        (9 * MIB, 3 * MIB, 6 * MIB),  # no block is cut without need
        (4 * MIB, 4 * MIB, 2 * MIB),  # half is placed while the other half comes
        (1 * MIB, 256 << 10, 1 * MIB),
        (64 * MIB, 64 * MIB, 8 * MIB),
    ],
)
def test_frames_are_large_and_of_whole_blocks_where_they_can_be(parcel: int, block: int, step: int) -> None:
    assert frame_step(parcel, block, 8 * MIB) == step
