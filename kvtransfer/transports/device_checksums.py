"""Checksums of blocks in memory of a device: sums of words times odd weights, computed on the device.

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
    """Compute the checksums of the blocks `chosen` on the device, and return them without a salt. Wait for the device,
    on this thread's own stream. With `sample`, a checksum covers a sample of the bytes only.
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
    """Return a random number that a sender adds to its checksums. Its lowest bit is `sample`: whether the checksums
    cover a sample of the bytes only.
    """
    return secrets.randbits(61) * 2 + sample


def device_sums(blocks: DeviceBlocks, chosen: Sequence[int], *, sample: bool) -> Tensor:
    """Queue the computation of the checksums of the blocks `chosen` on the current stream. Return them as int64
    `[len(chosen)]` on the device.
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
    """Return a copy in pinned host memory. It is complete when the current stream has reached this point."""
    if sums.device.type == "cpu":
        return sums
    return torch.empty(sums.shape, dtype=torch.int64, pin_memory=True).copy_(sums, non_blocking=True)


def is_sample(checksum: int | None) -> bool:
    """Return whether a checksum of a device's block covers a sample only."""
    return checksum is not None and checksum % 2 == 1


_weights: dict[tuple[int, torch.device], Tensor] = {}
"""Weights by their number and device; made once for a process."""


def weights(count: int, device: torch.device) -> Tensor:
    """Return `count` different odd 64-bit numbers by which a checksum multiplies the words of a block, int64 `[count]`.
    They are complete on the device when returned.
    """
    made = _weights.get((count, device))
    if made is None:
        index = torch.arange(count, dtype=torch.int64)
        # Odd factors have an inverse modulo 2**64, so a change of a single word always changes the sum.
        mixed = index * 2654435761 + 1442695040888963407
        made = _weights[count, device] = ((mixed ^ (mixed >> 29)) | 1).to(device)
    return made


def _runs(chosen: Sequence[int], most: int) -> list[range]:
    """Return runs of neighbouring blocks, of at most `most` blocks each."""
    runs: list[range] = []
    for block in chosen:
        if runs and runs[-1].stop == block and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs
