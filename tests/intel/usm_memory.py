"""Blocks in genuine SYCL unified shared memory, and a peer whose blocks lie there.

`python -m tests.intel.usm_memory …` is `tests.contract.transports_peer` with such memory. dpctl gives the memory; on
Intel's OpenCL CPU device all three kinds can be addressed by the host.
"""

import ctypes
import sys

import dpctl
import dpctl.memory

from tests.contract import transports_peer
from tests.contract.transports_pair import LAYOUT, NUM_BLOCKS


class UsmMemory:
    """`kind`: MemoryUSMHost, MemoryUSMShared or MemoryUSMDevice."""

    shared_fd = None

    def __init__(self, num_blocks: int, block_bytes: int, kind: str = "MemoryUSMHost") -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        queue = dpctl.SyclQueue("opencl:cpu:0", property="in_order")
        self._usm = getattr(dpctl.memory, kind)(num_blocks * block_bytes, queue=queue)
        self.usm_type = self._usm.get_usm_type()
        array = (ctypes.c_uint8 * (num_blocks * block_bytes)).from_address(self._usm._pointer)
        self.host_view: memoryview | None = memoryview(array).cast("B")

    def block(self, index: int) -> memoryview:
        assert self.host_view is not None
        return self.host_view[index * self.block_bytes : (index + 1) * self.block_bytes]

    def close(self) -> None:
        self.host_view = None


if __name__ == "__main__":
    transports_peer.main(sys.argv[1:], UsmMemory(NUM_BLOCKS, LAYOUT.block_bytes))
