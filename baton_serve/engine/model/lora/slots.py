"""Decides into which slot for captured graphs a LoRA adapter's weights are copied again; `store.py` decides which
adapters stay on the device.

A graph reads which slot each row uses, so the same graph serves any adapters. A slot is overwritten when a step needs
an adapter that has none. The device copies in the order of its queue, so running steps still read the old content.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine.kernels import GROUP_ROWS, SlotRows, SlotWeights, adapter_kernels, no_work
from baton_serve.engine.kernels.reference import layers as twin
from baton_serve.engine.model.lora.adapter_files import Adapter
from baton_serve.engine.model.lora.products import OutputSlice
from baton_serve.engine.model.lora.store import SlotSettings

SMALLEST_RANK = 16
"""Matrix units multiply by at least as many columns; slots of a lower rank are padded."""
MAX_CHECK_DIFFERENCE = 0.05
"""Largest difference from the twin that `AdapterSlots.check` accepts, relative to the largest number."""
NUM_ROW_ARRAYS = 5
"""Rows of the array that `sorted_rows` returns."""


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """A fused product that LoRA adapters may change: the linear layers whose outputs it joins, and its number of
    inputs.
    """

    parts: tuple[OutputSlice, ...]
    inputs: int


class SlotTable:
    """Decides which LoRA adapter is in which slot of device memory. A new one replaces the least recently used one."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(reversed(range(num_slots)))
        self._slots: dict[str, int] = {}
        """By fingerprint, the least recently used first."""

    def assign(self, adapters: Sequence[str]) -> dict[str, int]:
        """Give each adapter of a step a slot. Return the adapters, by fingerprint, that got a new one, into which their
        weights must be written.

        The caller makes sure that a step has no more adapters than there are slots.
        """
        wanted = dict.fromkeys(adapters)
        missing = [adapter for adapter in wanted if adapter not in self._slots]
        for adapter in wanted:
            if adapter in self._slots:  # used now, so the others give way first
                self._slots[adapter] = self._slots.pop(adapter)
        for adapter in missing:
            self._slots[adapter] = self._free.pop() if self._free else self._slots.pop(next(iter(self._slots)))
        return {adapter: self._slots[adapter] for adapter in missing}

    def slot_of(self, adapter: str) -> int:
        """Return the slot of an adapter, by fingerprint. Raises `KeyError` if it has none."""
        return self._slots[adapter]


class AdapterSlots:
    """Device memory for the matrices of several LoRA adapters, one slot each, from which captured graphs read. Engine
    thread only.

    Adapters may change the fused products `products` of all layers; their rank is at most `max_rank`. `find` returns a
    loaded adapter by its fingerprint.
    """

    def __init__(
        self,
        products: Sequence[AdaptedProduct],
        find: Callable[[str], Adapter],
        settings: SlotSettings,
        *,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots = settings.num_slots
        self._products, self._find = products, find
        # Kernels cover the rank with tiles of powers of two.
        self._rank = max(SMALLEST_RANK, 1 << (max_rank - 1).bit_length())
        self._table = SlotTable(num_slots)
        self._kernels = adapter_kernels(device)
        self._run_beside = settings.run_beside
        size = sum(self._rank * (len(one.parts) * one.inputs + one.parts[-1].end) for one in products)
        self._memory = torch.zeros((num_slots, size), dtype=dtype, device=device)
        self._weights: list[SlotWeights] = []
        start = 0
        for one in products:
            rank, outputs = len(one.parts) * self._rank, one.parts[-1].end
            middle, end = start + rank * one.inputs, start + rank * one.inputs + outputs * self._rank
            down = self._memory[:, start:middle].view(num_slots, rank, one.inputs)
            up = self._memory[:, middle:end].view(num_slots, outputs, self._rank)
            self._weights.append(SlotWeights(down, up, tuple(part.end for part in one.parts)))
            start = end

    @property
    def uses_two_streams(self) -> bool:
        """True if adapters' products run in a second stream, at the same time as the model's own products."""
        return self._run_beside is not None

    def use_one_stream(self) -> None:
        """Run adapters' products in the main stream from now on, for devices whose graphs cannot contain two
        streams.
        """
        self._run_beside = None

    def product(self, number: int, x: Tensor, rows: SlotRows, compute: Callable[[], Tensor]) -> Tensor:
        """Return the output of `compute` plus the products of the LoRA adapters. `compute` computes the model's own
        product number `number` of `x` [num_tokens, inputs]; `rows` has the adapter slot of each token.
        """
        weights = self._weights[number]
        low = self._kernels.low_rank(x, weights)
        join = self._beside(lambda: self._kernels.shrink(low, x, weights, rows))
        output = compute()
        join()
        self._kernels.expand(output, low, weights, rows)
        return output

    def add_beside(self, number: int, output: Tensor, x: Tensor, rows: SlotRows) -> Callable[[], None]:
        """Begin to add the products of the LoRA adapters with `x`, for product number `number`, to `output`
        [num_tokens, outputs].

        Call the returned function before `output` is used; until then, keep `x` unchanged.
        """
        weights = self._weights[number]
        low = self._kernels.low_rank(x, weights)

        def add() -> None:
            self._kernels.shrink(low, x, weights, rows)
            self._kernels.expand(output, low, weights, rows)

        return self._beside(add)

    def _beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` in the second stream, or immediately without one. Return a function that makes the main stream
        wait for it.
        """
        if self._run_beside is not None:
            return self._run_beside(work)
        work()
        return no_work

    def assign(self, adapters: Sequence[str]) -> list[int]:
        """Return the slot of each adapter in `adapters`, which are fingerprints; -1 for "", which means no adapter.

        The weights of adapters that have no slot yet are written into one.
        """
        for adapter, slot in self._table.assign([one for one in adapters if one]).items():
            self._write(slot, self._find(adapter))
        return [self._table.slot_of(one) if one else -1 for one in adapters]

    def slots_of(self, adapters: Sequence[tuple[str, NDArray[np.int64] | None]], num_rows: int) -> NDArray[np.int64]:
        """Return the adapter slot of each token of a step, int64 [num_rows]; -1 for none. `adapters` are fingerprints
        with the rows of the step that use them, as in `StepArrays`; None: all rows.
        """
        slots = np.full(num_rows, -1, dtype=np.int64)
        for slot, (_, rows) in zip(self.assign([name for name, _ in adapters]), adapters, strict=True):
            slots[slice(None) if rows is None else rows] = slot
        return slots

    def view(self, array: Tensor, num_rows: int) -> SlotRows:
        """Return the arrays that `sorted_rows` made for `num_rows` tokens, and that are on the device now, in the form
        that kernels take.
        """
        return SlotRows(array[0, :num_rows], array[1, :num_rows], array[2:, : max_groups(num_rows, self.num_slots)])

    @torch.inference_mode()
    def check(self) -> None:
        """Compare the kernels that add adapters' products with plain torch on random numbers, once for each shape of a
        product. Call it before the first adapter is written. Raises `RuntimeError` if the results differ.
        """
        generator = torch.Generator(self._memory.device).manual_seed(0)
        shapes = {(weights.down.shape, weights.ends): weights for weights in self._weights}
        for weights in shapes.values():
            inputs, outputs = weights.down.shape[2], weights.ends[-1]
            weights.down.normal_(generator=generator).div_(inputs**0.5)
            weights.up.normal_(generator=generator)
            for num_rows in (GROUP_ROWS // 2 + 1, 3 * GROUP_ROWS + 5):
                x = weights.down.new_empty((num_rows, inputs)).normal_(generator=generator)
                slots = [row % (self.num_slots + 1) - 1 for row in range(num_rows)]
                rows = self.view(torch.from_numpy(sorted_rows(slots, self.num_slots)).to(x.device), num_rows)
                expected, found = (x.new_zeros((num_rows, outputs)) for _ in range(2))
                for kernels, output in ((twin, expected), (self._kernels, found)):
                    low = kernels.low_rank(x, weights)
                    kernels.shrink(low, x, weights, rows)
                    kernels.expand(output, low, weights, rows)
                difference = (found - expected).abs().max() / expected.abs().max()
                if not difference <= MAX_CHECK_DIFFERENCE:
                    raise RuntimeError(f"the kernels of adapters differ from plain torch by {difference:.2g}")
        self._memory.zero_()

    @torch.inference_mode()
    def _write(self, slot: int, adapter: Adapter) -> None:
        """Overwrite a slot with the weights of an adapter. The copies wait in the device's queue for the steps that
        were launched before, which may read the old content.
        """
        self._memory[slot].zero_()
        for product, weights in zip(self._products, self._weights, strict=True):
            for number, part in enumerate(product.parts):
                matrices = adapter.products.get(part.module)
                if matrices is None:
                    continue
                rank, first = matrices.down.shape[0], number * self._rank
                weights.down[slot, first : first + rank] = matrices.down
                weights.up[slot, part.start : part.end, :rank] = matrices.up


def max_groups(num_rows: int, num_slots: int) -> int:
    """Return the largest number of groups into which `sorted_rows` divides `num_rows` tokens with at most `num_slots`
    different adapters.
    """
    return min(num_rows, num_slots + num_rows // GROUP_ROWS)


def sorted_rows(slots: Sequence[int] | NDArray[np.int64], num_slots: int) -> NDArray[np.int64]:
    """Return the arrays of `SlotRows` for a step whose tokens have these adapter slots, int64 [NUM_ROW_ARRAYS,
    num_tokens]: the slots, the tokens sorted by slot, and the slot, first position and end of each group.
    """
    array = np.zeros((NUM_ROW_ARRAYS, len(slots)), dtype=np.int64)
    array[0] = slots
    # Rows without an adapter come last, behind the end of the last slot.
    keys = np.where(array[0] < 0, num_slots, array[0])
    array[1] = np.argsort(keys, kind="stable")
    starts = np.searchsorted(np.sort(keys), np.arange(num_slots + 1)).tolist()
    groups = [
        (slot, first, min(first + GROUP_ROWS, starts[slot + 1]))
        for slot in range(num_slots)
        for first in range(starts[slot], starts[slot + 1], GROUP_ROWS)
    ]
    array[2] = -1
    array[2:, : len(groups)] = np.array(groups, dtype=np.int64).reshape(-1, 3).T
    return array
