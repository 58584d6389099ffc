"""Computes the checksums of blocks in a device's memory on the device.

The sums travel behind the blocks, so that no host waits for them. The sender adds a `salt`, which only the announcement
contains, and the receiver subtracts its own sums of the bytes that arrived. If anything is stale, torn or zero, the
result is not the salt. The lowest bit of the salt states what was summed: 0 means the whole block; 1 means a sample of
words from all parts of it, which finds stale, swapped or torn blocks and costs almost nothing.
"""

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks, index_of, is_run

PRODUCT_BYTES = 32 << 20
"""Largest memory in bytes for the products of words and weights; more blocks are summed one group after the other."""
SAMPLE_WORDS = 512
"""Smallest number of sampled words (8 bytes each) of a block."""


def sums_of(blocks: DeviceBlocks, chosen: Sequence[int], *, sample: bool) -> list[int]:
    """Compute the checksums of the blocks with the numbers `chosen` on the device, on this thread's own stream, and
    wait for them. With `sample`, each covers only a sample of the block's bytes. No salt (see `new_salt`) is added.
    """
    if not chosen:
        return []
    blocks.check(chosen)
    with blocks.on_stream():
        blocks.after_computing(chosen)
        sums = to_host(device_sums(blocks, chosen, sample=sample))
    blocks.wait()
    return [int(value) for value in sums.tolist()]


def new_salt(*, sample: bool) -> int:
    """Return a random number (salt) that a sender adds to the checksums of a parcel and announces separately; the
    receiver gets it back by subtracting its own checksums. The lowest bit of the salt is `sample`: whether the
    checksums cover only a sample of the bytes.
    """
    return secrets.randbits(61) * 2 + sample


def device_sums(blocks: DeviceBlocks, chosen: Sequence[int], *, sample: bool) -> Tensor:
    """Queue the computation of the checksums of the blocks with the numbers `chosen` on the current stream. Return them
    as int64 `[len(chosen)]` on the device, complete when the stream gets there. With `sample`, each covers only a
    sample of the block's bytes.
    """
    words = blocks.tensor.view(torch.int64)
    if sample:
        # Words from all parts of the block, so that a block that arrived only in part is noticed.
        some = words[:, :: max(words.shape[1] // SAMPLE_WORDS, 1)]
        if is_run(chosen):
            some = some[chosen[0] : chosen[0] + len(chosen)]
        else:
            some = some.index_select(0, index_of(chosen, blocks.device))
        return (some * weights(some.shape[1], blocks.device)).sum(1)
    # Blocks are summed in groups of neighbours: the products of all blocks together would need as much memory as the
    # blocks.
    factors = weights(words.shape[1], blocks.device)
    most = max(PRODUCT_BYTES // blocks.block_bytes, 1)
    return torch.cat([(words[run.start : run.stop] * factors).sum(1) for run in _runs(chosen, most)])


def to_host(sums: Tensor) -> Tensor:
    """Queue a copy of the device's checksums `sums` to pinned host memory on the current stream, and return the copy.
    Read it only after the stream has finished the copying.
    """
    if sums.device.type == "cpu":
        return sums
    return torch.empty(sums.shape, dtype=torch.int64, pin_memory=True).copy_(sums, non_blocking=True)


def is_sample(checksum: int | None) -> bool:
    """Return whether the announced checksum of a device's block covers only a sample of its bytes; False without a
    checksum.
    """
    return checksum is not None and checksum % 2 == 1


_weights: dict[tuple[int, torch.device], Tensor] = {}
"""Weights by their number and device; made once for a process."""


def weights(count: int, device: torch.device) -> Tensor:
    """Return `count` different odd 64-bit numbers, int64 `[count]` on `device`. A checksum is the sum of a block's
    words times these weights. The copy to the device is complete on return.
    """
    made = _weights.get((count, device))
    if made is None:
        index = torch.arange(count, dtype=torch.int64)
        # Odd factors have an inverse modulo 2**64, so a change of a single word always changes the sum.
        mixed = index * 2654435761 + 1442695040888963407
        made = _weights[count, device] = ((mixed ^ (mixed >> 29)) | 1).to(device)
    return made


def _runs(chosen: Sequence[int], most: int) -> list[range]:
    """Divide the block numbers `chosen` into ranges of consecutive numbers, each of at most `most` blocks."""
    runs: list[range] = []
    for block in chosen:
        if runs and runs[-1].stop == block and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs
