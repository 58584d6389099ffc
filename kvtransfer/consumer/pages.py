"""Create the memory pages of blocks that were never written, while their bytes are still on their way.

The kernel creates a page of shared memory on the first write, which takes 0.7 µs and more for 4 KiB. A short prompt
would wait longer for its pages than for its bytes. This is an optimization only: if a page cannot be created here, the
copy creates it.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from baton_serve.kvtransfer.block_memory import BlockMemory, address_of

MADV_POPULATE_WRITE = 23
"""Advice of `madvise` since Linux 5.14: create the pages and keep their content."""


class Pages:
    """Makes the kernel allocate the physical pages of `memory`, which holds the KV blocks, before received blocks are
    copied there, so that the copies cause no page faults. A thread of its own does it. Only one thread may call the
    methods; call `close` before the memory is freed.
    """

    def __init__(self, memory: BlockMemory, make: Callable[[int, int], bool] | None = None) -> None:
        """Create no thread yet. `make(address, num_bytes)` allocates the pages of one range and returns whether that
        worked; None means `make_pages`.
        """
        view = memory.host_view
        self._start = 0 if view is None else address_of(view)
        self._block_bytes = memory.block_bytes
        self._is_made = bytearray(memory.num_blocks)
        self._asked: SimpleQueue[Sequence[int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_of_use = view is not None
        self._make = make or make_pages

    def make(self, blocks: Iterable[int]) -> None:
        """Allocate the pages of the blocks with these numbers soon, in the background. Each block is handled only once,
        since its pages stay allocated.
        """
        if not self._is_of_use:
            return
        fresh = [block for block in blocks if not self._is_made[block]]
        if not fresh:
            return
        for block in fresh:
            # Marked when it is queued: a second fetch into this block must not queue it again.
            self._is_made[block] = 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="baton-pages", daemon=True)
            self._thread.start()
        self._asked.put(fresh)

    def close(self) -> None:
        """End the thread. Pages that it has not allocated yet are allocated by the first copies into them."""
        # The thread checks this before each block, so that closing does not wait for a long list.
        self._is_of_use = False
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (blocks := self._asked.get()) is not None:
            for block in blocks:
                if not self._is_of_use:
                    return
                # After the first failure the kernel would refuse every block: stop trying.
                self._is_of_use = self._make(self._start + block * self._block_bytes, self._block_bytes)


def make_pages(address: int, num_bytes: int) -> bool:
    """Make the kernel allocate the physical pages of `num_bytes` of mapped memory from `address` on now
    (MADV_POPULATE_WRITE), so that a later copy has no page faults. Return False if the kernel is too old or cannot do
    it for this kind of memory. Other Python threads can run at the same time, because ctypes releases the GIL.
    """
    # madvise needs an address at the start of a page.
    begin = address - address % mmap.PAGESIZE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return False
    found: int = advise(ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), MADV_POPULATE_WRITE)
    return found == 0
