"""Two ranks sum and norm through each other's inboxes, as two processes that share memory; the twin is `rms_norm`.

Triton's interpreter cuts bfloat16 off where devices round it, so that dtype is compared loosely.
"""

import mmap
import multiprocessing
from typing import Any

import pytest
import torch

from baton_serve.engine.kernels.reference import layers as reference_layers

all_reduce = pytest.importorskip("baton_serve.engine.kernels.triton.all_reduce")

WORDS, MAX_ROWS, EPS = 24, 5, 1e-6
ROUNDS = (1, 5, 2, 3)
"""Rows of each exchange."""


def _draw(seed: int, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _run(rank: int, ranks: int, inboxes: torch.Tensor, dtype: torch.dtype, results: Any) -> None:
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    counters = torch.zeros(MAX_ROWS, dtype=torch.int32)
    hidden = 4 * WORDS // dtype.itemsize
    made = all_reduce.Inboxes(rank, addresses, counters, WORDS, MAX_ROWS)
    found = []
    for number, rows in enumerate(ROUNDS):
        own = _draw(10 * number + rank, rows, hidden, dtype)
        assert made.fits(own)
        residual, weight = _draw(100 + number, rows, hidden, dtype), _draw(200, 1, hidden, dtype)[0]
        normed = all_reduce.sum_norm(own, residual, weight, EPS, made)
        found.append((normed.float().tolist(), residual.float().tolist()))
    results.put((rank, found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_ranks_have_the_norm_of_the_sum(dtype: torch.dtype) -> None:
    ranks, hidden = 2, 4 * WORDS // dtype.itemsize
    size = all_reduce.inbox_bytes(ranks, MAX_ROWS, WORDS) // all_reduce.WORD_BYTES
    shared = mmap.mmap(-1, ranks * size * all_reduce.WORD_BYTES)
    inboxes = torch.frombuffer(shared, dtype=torch.int64).view(ranks, size)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_run, args=(r, ranks, inboxes, dtype, results)) for r in range(ranks)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found[0] == found[1]
    for number, rows in enumerate(ROUNDS):
        total = sum(_draw(10 * number + rank, rows, hidden, dtype).float() for rank in range(ranks))
        residual, weight = _draw(100 + number, rows, hidden, dtype), _draw(200, 1, hidden, dtype)[0]
        normed = reference_layers.rms_norm(torch.as_tensor(total).to(dtype), weight, EPS, residual=residual)
        rtol, atol = (2e-2, 2e-2) if dtype == torch.bfloat16 else (2e-3, 1e-6)
        torch.testing.assert_close(torch.tensor(found[0][number][1]), residual.float(), rtol=rtol, atol=atol)
        torch.testing.assert_close(torch.tensor(found[0][number][0]), normed.float(), rtol=rtol, atol=atol)


def _choose(rank: int, inboxes: torch.Tensor, parts: list[list[torch.Tensor]], results: Any) -> None:
    addresses, counters = (
        torch.tensor([inbox.data_ptr() for inbox in inboxes]),
        torch.zeros(MAX_ROWS, dtype=torch.int32),
    )
    made = all_reduce.Inboxes(rank, addresses, counters, all_reduce.WORDS_PER_ARGMAX, MAX_ROWS)
    found = []
    for exchange in parts:
        out = torch.full((len(exchange[rank]),), -1, dtype=torch.int64)
        found.append(all_reduce.argmax(exchange[rank], out, made).tolist())
    results.put((rank, found))


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_find_the_largest_of_all_columns_and_of_equals_the_first(ranks: int) -> None:
    torch.manual_seed(ranks)
    columns, nan = 2500, float("nan")
    drawn = torch.randn(5, ranks * columns).bfloat16()
    equal = torch.randint(-2, 3, (3, ranks * columns)).float()
    strange = torch.full((4, ranks * columns), -1.0)
    strange[0] = -float("inf")
    strange[1, [columns + 7, 10]] = torch.tensor([nan, float("inf")])
    strange[2, [columns - 1, columns]] = torch.tensor([-0.0, 0.0])
    strange[3, -1] = 5.0
    rounds = [drawn, equal, strange, drawn[:1]]
    parts = [list(torch.split(whole, columns, dim=1)) for whole in rounds]
    size = all_reduce.inbox_bytes(ranks, MAX_ROWS, all_reduce.WORDS_PER_ARGMAX) // all_reduce.WORD_BYTES
    inboxes = torch.frombuffer(mmap.mmap(-1, ranks * size * all_reduce.WORD_BYTES), dtype=torch.int64)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (inboxes.view(ranks, size), parts, results)
    processes = [context.Process(target=_choose, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    expected = [reference_layers.argmax(w, torch.zeros(len(w), dtype=torch.int64)).tolist() for w in rounds]
    assert expected[2] == [0, ranks * columns, columns - 1, ranks * columns - 1]
    assert all(found[rank] == expected for rank in range(ranks))


def test_other_rows_are_left_to_the_library() -> None:
    inboxes = all_reduce.Inboxes(0, torch.zeros(2), torch.zeros(MAX_ROWS), WORDS, MAX_ROWS)
    assert inboxes.fits(torch.zeros(MAX_ROWS, 2 * WORDS, dtype=torch.bfloat16))
    assert not inboxes.fits(torch.zeros(MAX_ROWS + 1, 2 * WORDS, dtype=torch.bfloat16))
    assert not inboxes.fits(torch.zeros(1, 2 * WORDS + 2, dtype=torch.bfloat16))
    assert not inboxes.fits(torch.zeros(1, 2 * WORDS, dtype=torch.int16))
