"""Products pause while another process has the turn, and no longer."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from baton_serve.engine.kernels.cpu.attention import CpuAttention
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.linear import PackedLinear, has_packed_linear, pack
from baton_serve.engine.kernels.cpu.time_slicing import yield_to_processes
from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec

ROWS, WIDTH = 4, 8
Compute = Callable[[], object]


def _library() -> ctypes.CDLL | None:
    try:
        return load_kernels()
    except KernelsUnavailableError:
        return None


LIBRARY = _library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="needs a compiler")


@pytest.fixture
def words() -> "Iterator[ctypes.Array[ctypes.c_int64]]":
    made = (ctypes.c_int64 * (ROWS * WIDTH))()
    assert yield_to_processes(ctypes.addressof(made), ROWS, WIDTH)
    yield made
    assert yield_to_processes(0, 0, 0)


def _attention() -> Compute:
    assert LIBRARY is not None
    meta = AttentionMetadata(
        query_starts=torch.tensor([0, 4], dtype=torch.int32),
        context_lens=torch.tensor([4], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slots=torch.empty(0, dtype=torch.int64),
        max_query_len=4,
        max_context_len=4,
    )
    backend, cache, query = CpuAttention(LIBRARY), torch.zeros(1, 2, 1, 16, 32), torch.zeros(4, 1, 32)
    return lambda: backend.attend(query, cache, meta, AttentionSpec(1.0))


def _product(rows: int, inputs: int) -> Compute:
    assert LIBRARY is not None
    if not has_packed_linear(LIBRARY):
        pytest.skip("needs a CPU with bf16 dot products")
    product, matrix = PackedLinear(LIBRARY), pack(LIBRARY, [torch.zeros(64, inputs, dtype=torch.bfloat16)], None)
    return lambda: product(torch.zeros(rows, inputs, dtype=torch.bfloat16), matrix)


WORK: dict[str, Callable[[], Compute]] = {
    "attention": _attention,
    "few rows": lambda: _product(1, 64),
    "many rows": lambda: _product(100, 64),
    "many inputs": lambda: _product(100, 2176),
}


@pytest.mark.parametrize("kind", WORK)
def test_work_waits_until_the_turn_is_given_back(kind: str, words: "ctypes.Array[ctypes.c_int64]") -> None:
    compute = WORK[kind]()
    compute()
    words[2 * WIDTH] = time.monotonic_ns() + 60_000_000_000
    is_done = threading.Event()

    def live() -> None:
        compute()
        is_done.set()

    thread = threading.Thread(target=live)
    thread.start()
    assert not is_done.wait(0.03)
    words[2 * WIDTH] = 0
    thread.join()
    assert is_done.is_set()


def test_a_turn_that_nobody_ends_ends_by_itself(words: "ctypes.Array[ctypes.c_int64]") -> None:
    until = time.monotonic_ns() + 20_000_000
    words[WIDTH] = until
    WORK["attention"]()()
    assert time.monotonic_ns() >= until


def test_other_words_of_a_row_stop_nobody(words: "ctypes.Array[ctypes.c_int64]") -> None:
    words[1] = time.monotonic_ns() + 3_600_000_000_000
    WORK["attention"]()()
