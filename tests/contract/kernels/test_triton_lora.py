"""The products of adapters in slots: Triton's kernels against the twin, and the twin against products one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.engine.kernels import SlotRows, SlotWeights
from baton_serve.engine.kernels.reference import layers as twin
from baton_serve.engine.model.lora.slots import max_groups, sorted_rows
from tests.contract.kernels.triton_batches import DEVICE

triton_lora = pytest.importorskip("baton_serve.engine.kernels.triton.lora")

RTOL = {torch.float32: 2e-5, torch.float16: 4e-3}
if DEVICE.type != "cpu":  # the interpreter's products of bfloat16 are wrong
    RTOL[torch.bfloat16] = 2e-2


def slot_rows(slots: list[int], num_slots: int) -> SlotRows:
    array = torch.from_numpy(sorted_rows(slots, num_slots)).to(DEVICE)
    return SlotRows(array[0], array[1], array[2:, : max_groups(len(slots), num_slots)])


def add(kernels: Any, output: Tensor, x: Tensor, weights: SlotWeights, rows: SlotRows) -> None:
    low = kernels.low_rank(x, weights)
    low.fill_(float("nan"))
    kernels.shrink(low, x, weights, rows)
    kernels.expand(output, low, weights, rows)


def drawn_weights(num_slots: int, rank: int, inputs: int, ends: tuple[int, ...], dtype: torch.dtype) -> SlotWeights:
    down = torch.randn(num_slots, len(ends) * rank, inputs) / inputs**0.5
    return SlotWeights(down.to(DEVICE, dtype), torch.randn(num_slots, ends[-1], rank).to(DEVICE, dtype), ends)


def mixed(num_rows: int, num_slots: int) -> list[int]:
    return [(7 * row) % (num_slots + 1) - 1 for row in range(num_rows)]


def one_by_one(output: Tensor, x: Tensor, weights: SlotWeights, slots: list[int]) -> Tensor:
    """Row after row, part after part, in float64."""
    result, rank = output.double().clone(), weights.up.shape[2]
    for row, slot in enumerate(slots):
        for part, (start, end) in enumerate(zip((0, *weights.ends), weights.ends, strict=False)):
            if slot >= 0:
                low = weights.down[slot, part * rank : (part + 1) * rank].double() @ x[row].double()
                result[row, start:end] += weights.up[slot, start:end].double() @ low
    return result


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_slots", "rank", "inputs", "ends"),
    [
        (1, 1, 16, 64, (96,)),
        (2, 9, 16, 64, (32,)),
        (8, 8, 16, 512, (64, 96, 128)),
        (16, 3, 32, 40, (24, 300)),
        (17, 2, 16, 272, (48, 56, 64)),
        (70, 1, 16, 100, (32,)),
        (40, 5, 128, 1030, (17, 31, 49)),
    ],
)
def test_rows_of_several_adapters_and_of_none(
    num_rows: int, num_slots: int, rank: int, inputs: int, ends: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights, slots = drawn_weights(num_slots, rank, inputs, ends, dtype), mixed(num_rows, num_slots)
    x, output = torch.randn(num_rows, inputs).to(DEVICE, dtype), torch.randn(num_rows, ends[-1]).to(DEVICE, dtype)
    expected, found = output.clone(), output.clone()
    add(twin, expected, x, weights, slot_rows(slots, num_slots))
    add(triton_lora, found, x, weights, slot_rows(slots, num_slots))
    scale = expected.float().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=RTOL[dtype], atol=RTOL[dtype] * scale / 4)
    assert torch.equal(found[torch.tensor(slots) < 0], output[torch.tensor(slots) < 0])
    exact = one_by_one(output, x, weights, slots)
    torch.testing.assert_close(expected.double(), exact, rtol=RTOL[dtype], atol=RTOL[dtype] * scale / 4)


@pytest.mark.parametrize("num_rows", [5, 21])
def test_adapters_of_another_dtype_than_the_model(num_rows: int) -> None:
    weights, slots = drawn_weights(2, 16, 64, (32,), torch.float32), mixed(num_rows, 2)
    x, output = torch.randn(num_rows, 64).to(DEVICE, torch.float16), torch.randn(num_rows, 32).to(DEVICE, torch.float16)
    exact, found, expected = one_by_one(output, x, weights, slots), output.clone(), output.clone()
    add(triton_lora, found, x, weights, slot_rows(slots, 2))
    add(twin, expected, x, weights, slot_rows(slots, 2))
    torch.testing.assert_close(found, exact.half(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(expected, exact.half(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_rows", [9, 33])
def test_what_other_rows_and_unused_slots_hold_does_not_matter(num_rows: int) -> None:
    """Slots that no row uses may be overwritten at any time, and padding rows hold anything."""
    slots = [1 if row % 3 else -1 for row in range(num_rows)]
    weights = drawn_weights(3, 16, 64, (32, 48), torch.float32)
    x, output = torch.randn(num_rows, 64, device=DEVICE), torch.zeros(num_rows, 48, device=DEVICE)
    alone = output.clone()
    add(triton_lora, alone, x, weights, slot_rows(slots, 3))
    for broken in (weights.down[0], weights.down[2], weights.up[0], weights.up[2], x[::3]):
        broken.fill_(float("nan"))
    add(triton_lora, output, x, weights, slot_rows(slots, 3))
    assert torch.equal(output, alone)
    assert output[::3].count_nonzero() == 0 and output.isfinite().all() and output[1].count_nonzero() == 48


def test_columns_and_rows_of_a_larger_tensor() -> None:
    """Outputs may be columns of something wider, and slots lie apart in memory."""
    slots = mixed(5, 2)
    plain = drawn_weights(2, 16, 48, (40,), torch.float32)
    memory = torch.full((2, 5000), float("nan"), device=DEVICE)
    down, up = memory[:, : 16 * 48].view(2, 16, 48), memory[:, 900 : 900 + 640].view(2, 40, 16)
    down.copy_(plain.down), up.copy_(plain.up)
    wide, x = torch.randn(5, 100, device=DEVICE), torch.randn(5, 60, device=DEVICE)
    expected = wide.clone()
    add(twin, expected[:, :40], x[:, :48], plain, slot_rows(slots, 2))
    add(triton_lora, wide[:, :40], x[:, :48], SlotWeights(down, up, (40,)), slot_rows(slots, 2))
    torch.testing.assert_close(wide, expected, rtol=2e-5, atol=2e-5)


def test_tiles_cover_all_inputs_and_fill_the_device() -> None:
    for inputs in (16, 64, 100, 4096, 14336):
        for slots in (1, 8):
            tiles = triton_lora.shrink_tiles(processors=132, num_slots=slots, width=48, rank=16, inputs=inputs)
            assert tiles.splits * tiles.steps * tiles.step >= inputs
            assert tiles.splits == triton_lora.MAX_SPLITS or tiles.splits * tiles.step >= inputs or slots == 8
    assert 118 <= tiles.splits * 8 * 3 < 2 * 132
