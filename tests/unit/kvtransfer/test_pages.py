import ctypes
import resource
import threading

import pytest

from baton_serve.kvtransfer.block_memory import HostMemory, address_of
from baton_serve.kvtransfer.consumer.pages import MADV_POPULATE_WRITE, Pages, make_pages

BLOCK = 1 << 18
PAGES = BLOCK // resource.getpagesize()


@pytest.fixture
def memory() -> HostMemory:
    memory = HostMemory(8, BLOCK)
    if ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(0), ctypes.c_size_t(0), MADV_POPULATE_WRITE):
        pytest.skip("this kernel makes no pages in advance")
    return memory


def faults(memory: HostMemory, block: int) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.block(block)[:] = b"x" * BLOCK
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_blocks_whose_pages_were_made_are_written_without_a_fault(memory: HostMemory) -> None:
    assert make_pages(address_of(memory.block(2)), 2 * BLOCK)
    made, other = faults(memory, 2) + faults(memory, 3), faults(memory, 5)
    assert other >= PAGES > 2 * made


def test_contents_stay_as_they_are(memory: HostMemory) -> None:
    memory.block(1)[:] = b"y" * BLOCK
    assert make_pages(address_of(memory.block(0)), 3 * BLOCK)
    assert memory.block(1) == b"y" * BLOCK
    assert memory.block(0) == bytes(BLOCK)


def test_each_block_is_asked_for_once(memory: HostMemory) -> None:
    asked: list[int] = []
    made = threading.Semaphore(0)

    def make(address: int, num_bytes: int) -> bool:
        asked.append((address - address_of(memory.block(0))) // BLOCK)
        made.release()
        return True

    pages = Pages(memory, make)
    for blocks in ([2, 3], [3, 4], [2, 4], [7]):
        pages.make(blocks)
    assert all(made.acquire(timeout=5) for _ in range(4))
    pages.close()
    assert asked == [2, 3, 4, 7]


def test_where_it_is_of_no_use_it_is_tried_once(memory: HostMemory) -> None:
    asked: list[int] = []
    made = threading.Semaphore(0)

    def make(address: int, num_bytes: int) -> bool:
        asked.append(address)
        made.release()
        return False

    pages = Pages(memory, make)
    pages.make([0, 1, 2])
    assert made.acquire(timeout=5)
    pages.close()
    assert len(asked) == 1


def test_after_its_end_it_makes_nothing(memory: HostMemory) -> None:
    pages = Pages(memory)
    pages.close()
    pages.make([0])
    pages.close()
    assert faults(memory, 0) >= PAGES
