"""What the transfer benchmarks move: shapes of blocks, their names and contents, and the tickets to fetch them with."""

import ctypes

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, new_ticket_id
from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import HostMemory

MIB = 1 << 20


def layout_of(block_bytes: int) -> KVLayout:
    """Blocks of 64 tokens; 8 MiB is the 8B shape (32 layers, 8 KV heads of 128, bf16)."""
    if block_bytes % (2 * 2 * 64 * 16):
        raise ValueError(f"{block_bytes} bytes are no multiple of 4 KiB")
    return KVLayout(
        fingerprint="bench",
        num_layers=block_bytes // (2 * 2 * 64 * 16),
        num_kv_heads=1,
        block_tokens=64,
        head_dim=16,
        dtype="bfloat16",
    )


def block_name(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def tickets_to(address: str, count: int) -> list[Ticket]:
    """`count` tickets to fetch from the producer at `address`, each with a minute."""
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
    """Every block differs, and every page is touched."""
    pattern = _pattern(memory.block_bytes)
    for index in range(memory.num_blocks):
        block = memory.block(index)
        block[:] = pattern
        block[:16] = block_name(index)


def is_filled(memory: HostMemory, num_blocks: int) -> bool:
    """Every byte of the first blocks is what `fill` writes."""
    rest = _pattern(memory.block_bytes)[16:]
    blocks = ((i, memory.block(i)) for i in range(num_blocks))
    return all(bytes(block[:16]) == block_name(i) and bytes(block[16:]) == rest for i, block in blocks)


def _pattern(num_bytes: int) -> bytes:
    return bytes(range(256)) * (num_bytes // 256)


def clear(memory: HostMemory) -> None:
    """Touches every page, so that the first transfer pays no page faults of the destination."""
    assert memory.host_view is not None
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.host_view))
    ctypes.memset(address, 0, memory.num_blocks * memory.block_bytes)
