"""Inputs of the transfer benchmarks: block layouts, hashes and contents of blocks, and tickets to fetch them."""

import ctypes

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, new_ticket_id
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import HostMemory

MIB = 1 << 20


def layout_of(block_bytes: int) -> KVLayout:
    """Return a layout with blocks of 64 tokens. 8 MiB is the block of an 8B model (32 layers, 8 KV heads of 128,
    bf16). Raises `ValueError` if the size is not a multiple of 4 KiB."""
    if block_bytes % (2 * 2 * 64 * 16):
        raise ValueError(f"{block_bytes} bytes are not a multiple of 4 KiB")
    return KVLayout(
        fingerprint="bench",
        num_layers=block_bytes // (2 * 2 * 64 * 16),
        num_kv_heads=1,
        block_tokens=64,
        head_dim=16,
        dtype="bfloat16",
    )


def block_name(index: int) -> BlockHash:
    """Return a hash for the block with this index."""
    return BlockHash(index.to_bytes(16, "big"))


def tickets_to(address: str, count: int) -> list[Ticket]:
    """Return `count` tickets to fetch from the producer at `address`, with a timeout of one minute each."""
    return [
        Ticket(
            ticket=new_ticket_id(),
            source=InstanceId("prefill-0"),
            source_generation=Generation(1),
            source_address=address,
            sink=InstanceId("decode-0"),
            sink_generation=Generation(2),
            timeout_s=60.0,
        )
        for _ in range(count)
    ]


def fill(memory: HostMemory) -> None:
    """Write different content into each block. This also touches every page, so that no page fault is measured."""
    pattern = _pattern(memory.block_bytes)
    for index in range(memory.num_blocks):
        block = memory.block(index)
        block[:] = pattern
        block[:16] = block_name(index)


def is_filled(memory: HostMemory, num_blocks: int) -> bool:
    """Return whether each byte of the first blocks is the one that `fill` writes."""
    rest = _pattern(memory.block_bytes)[16:]
    blocks = ((i, memory.block(i)) for i in range(num_blocks))
    return all(bytes(block[:16]) == block_name(i) and bytes(block[16:]) == rest for i, block in blocks)


def _pattern(num_bytes: int) -> bytes:
    return bytes(range(256)) * (num_bytes // 256)


def clear(memory: HostMemory) -> None:
    """Write zeros to the whole memory, so that no data of an earlier transfer is found and no page fault
    is measured."""
    assert memory.host_view is not None
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.host_view))
    ctypes.memset(address, 0, memory.num_blocks * memory.block_bytes)
