"""Checksums of blocks where they lie on a device: sums of words times odd weights.

The sums travel behind the blocks, so no host waits for them: a sender adds a `salt` that only the announcement names,
and the receiver takes its own sums from what came. Where anything is stale, torn or zero, the salt is not what is left.
A salt's lowest bit says what was summed: 0 all of the block, 1 a sample of words from all over it, which finds blocks
that are stale, swapped or torn, and costs next to nothing.
"""

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks, index_of, is_run

PRODUCT_BYTES = 32 << 20
"""Memory for products, of neighbours that are summed up together."""
SAMPLE_WORDS = 512
"""At least so many words of 8 bytes of each block."""


def sums_of(blocks: DeviceBlocks, chosen: Sequence[int], *, sample: bool) -> list[int]:
    """Waits for the device, on this thread's own stream."""
    if not chosen:
        return []
    blocks.check(chosen)
    with blocks.on_stream():
        blocks.after_computing(chosen)
        sums = to_host(device_sums(blocks, chosen, sample=sample))
    blocks.wait()
    return [int(value) for value in sums.tolist()]


def new_salt(*, sample: bool) -> int:
    return secrets.randbits(61) * 2 + sample


def device_sums(blocks: DeviceBlocks, chosen: Sequence[int], *, sample: bool) -> Tensor:
    """int64 `[len(chosen)]` on the device, made on the current stream."""
    words = blocks.tensor.view(torch.int64)
    if sample:
        some = words[:, :: max(words.shape[1] // SAMPLE_WORDS, 1)]
        if is_run(chosen):
            some = some[chosen[0] : chosen[0] + len(chosen)]
        else:
            some = some.index_select(0, index_of(chosen, blocks.device))
        return (some * weights(some.shape[1], blocks.device)).sum(1)
    factors = weights(words.shape[1], blocks.device)
    most = max(PRODUCT_BYTES // blocks.block_bytes, 1)
    return torch.cat([(words[run.start : run.stop] * factors).sum(1) for run in _runs(chosen, most)])


def to_host(sums: Tensor) -> Tensor:
    """There when the current stream has come so far."""
    if sums.device.type == "cpu":
        return sums
    return torch.empty(sums.shape, dtype=torch.int64, pin_memory=True).copy_(sums, non_blocking=True)


def is_sample(checksum: int | None) -> bool:
    return checksum is not None and checksum % 2 == 1


_weights: dict[tuple[int, torch.device], Tensor] = {}


def weights(count: int, device: torch.device) -> Tensor:
    """int64 `[count]`: different odd numbers, of all bits. Made once for a process, and complete when returned."""
    made = _weights.get((count, device))
    if made is None:
        index = torch.arange(count, dtype=torch.int64)
        mixed = index * 2654435761 + 1442695040888963407
        made = _weights[count, device] = ((mixed ^ (mixed >> 29)) | 1).to(device)
    return made


def _runs(chosen: Sequence[int], most: int) -> list[range]:
    """Neighbours, at most `most` together."""
    runs: list[range] = []
    for block in chosen:
        if runs and runs[-1].stop == block and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs
