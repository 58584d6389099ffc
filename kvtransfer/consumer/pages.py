"""Pages of blocks that nobody has written yet, made while their bytes are still awaited.

The kernel makes a page of shared memory when it is first written: 0.7 µs and more for 4 KiB, which a copy of a short
prompt would wait for longer than for its bytes. Only a matter of speed: what cannot be made is left to the copies.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from baton_serve.kvtransfer.memory import BlockMemory, address_of

MADV_POPULATE_WRITE = 23
"""Linux 5.14. Contents stay as they are."""


class Pages:
    """Of one memory. Its methods belong to one thread; `close` it before the memory."""

    def __init__(self, memory: BlockMemory, make: Callable[[int, int], bool] | None = None) -> None:
        """`make`: of so many bytes from an address on; `make_pages`."""
        view = memory.host_view
        self._start = 0 if view is None else address_of(view)
        self._block_bytes = memory.block_bytes
        self._is_made = bytearray(memory.num_blocks)
        self._asked: SimpleQueue[Sequence[int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_of_use = view is not None
        self._make = make or make_pages

    def make(self, blocks: Iterable[int]) -> None:
        """Soon, in a thread of this object. Each block once: then its pages are there."""
        if not self._is_of_use:
            return
        fresh = [block for block in blocks if not self._is_made[block]]
        if not fresh:
            return
        for block in fresh:
            self._is_made[block] = 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="baton-pages", daemon=True)
            self._thread.start()
        self._asked.put(fresh)

    def close(self) -> None:
        """What has not been made yet is not made any more."""
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
                self._is_of_use = self._make(self._start + block * self._block_bytes, self._block_bytes)


def make_pages(address: int, num_bytes: int) -> bool:
    """Where these bytes lie. Other Python threads run meanwhile. False: not by this kernel, or not of this memory."""
    begin = address - address % mmap.PAGESIZE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return False
    found: int = advise(ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), MADV_POPULATE_WRITE)
    return found == 0
