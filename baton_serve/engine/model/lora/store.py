"""Keeps the names of adapters, and the weights of the most recently used ones, beside a model."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from baton_serve.contracts.instance import MAX_ADAPTERS, AdapterRecord
from baton_serve.engine.errors import AdapterError
from baton_serve.engine.model.lora.checkpoint import MERGE, Adapter, LowRank, read_adapter
from baton_serve.engine.model.rank_parts import WHOLE, RankParts


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """An adapter and the rows of a step that use it; None means all rows."""

    adapter: Adapter
    rows: Tensor | None  # int64 [count]


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """The settings of `AdapterSlots`. `run_beside` runs work in a second stream of the device, and returns a function
    that waits for it; None: the device has no second stream.
    """

    num_slots: int
    run_beside: Callable[[Callable[[], None]], Callable[[], None]] | None


class AdapterListener(Protocol):
    """Learns about the weights in an `AdapterStore`."""

    def kept(self, adapter: Adapter) -> None: ...
    def dropped(self, fingerprint: str) -> None: ...


class AdapterStore:
    """The names of adapters, and a cache of their weights on the device. Engine thread only, except `read`.

    When the model is built, it offers the products that adapters may change. Then adapters are loaded. `max_adapters`
    limits the adapters whose weights are kept. An adapter without weights keeps its name and can be read again. `dtype`
    is that of the adapters, which may differ from `model_dtype`. Without `slots`, steps with adapters use no
    captured graphs.
    """

    def __init__(
        self,
        *,
        max_rank: int,
        max_adapters: int,
        slots: SlotSettings | None,
        dtype: torch.dtype,
        model_dtype: torch.dtype,
        device: torch.device,
        parts: RankParts = WHOLE,
    ) -> None:
        self.max_rank, self.max_adapters, self.slots = max_rank, max_adapters, slots
        self.dtype, self.device = dtype, device
        self._own_dtype = "" if dtype == model_dtype else str(dtype).removeprefix("torch.")
        """Part of the fingerprints: with another dtype an adapter computes another KV."""
        self._parts = parts
        self.listener: AdapterListener | None = None
        """Learns which weights are on the device, so that other ranks have the same."""
        self._sizes: dict[str, tuple[int, int]] = {}
        self._by_name: dict[str, AdapterRecord] = {}
        self._weights: OrderedDict[str, Adapter] = OrderedDict()
        """Weights by fingerprint, the least recently used first."""

    def offer(self, module: str, *, inputs: int, outputs: int) -> None:
        """Register a module whose product adapters may change, with its numbers of inputs and outputs."""
        self._sizes[module] = (inputs, outputs)

    def read(self, name: str, folder: str, *, at_run_time: bool = False) -> Adapter:
        """Read an adapter for `put` and check that it fits the model.

        Callable from any thread. Raises `AdapterError`.
        """
        adapter = read_adapter(name, Path(folder), dtype=self.dtype, at_run_time=at_run_time)
        if adapter.rank > self.max_rank:
            raise AdapterError(
                f"adapter {name} has rank {adapter.rank}, the limit is {self.max_rank} (--max-lora-rank)"
            )
        for module, product in adapter.products.items():
            if (size := self._whole_size(module)) is None:
                raise AdapterError(f"adapter {name} changes {module}, {_why_fixed(module)}")
            if size != (product.down.shape[1], product.up.shape[0]):
                raise AdapterError(f"adapter {name}: the matrices of {module} have other sizes than this model's layer")
        # Rounded weights compute other keys and values, so instances must not exchange their blocks.
        products = {module: self._part(module, product) for module, product in adapter.products.items()}
        return replace(adapter, fingerprint=adapter.fingerprint + self._own_dtype, products=products)

    def _whole_size(self, module: str) -> tuple[int, int] | None:
        """Return the numbers of inputs and outputs of a module on all ranks, or None if adapters cannot change it."""
        size, part = self._sizes.get(module), self._parts.tensors.get(f"{module}.weight")
        if size is None or part is None:
            return size
        width = self._parts.widths[module]
        return (size[0], width) if part.dim == 0 else (width, size[1])

    def _part(self, module: str, product: LowRank) -> LowRank:
        """Return the matrices of a module with this rank's outputs, or inputs."""
        part = self._parts.tensors.get(f"{module}.weight")
        if part is None:
            return product
        if part.dim == 0:
            return LowRank(product.down, part.of(product.up).contiguous())
        return LowRank(part.of(product.down).contiguous(), product.up)

    def register(self, adapter: Adapter) -> None:
        """Add the name of an adapter, or let it name other weights. Raises `AdapterError` if there are too many."""
        if adapter.name not in self._by_name and len(self._by_name) >= MAX_ADAPTERS:
            raise AdapterError(
                f"adapter {adapter.name}: {MAX_ADAPTERS} adapters are loaded, the largest number: unload one first"
            )
        self._by_name[adapter.name] = AdapterRecord(
            name=adapter.name,
            fingerprint=adapter.fingerprint,
            path=adapter.path,
            at_run_time=adapter.at_run_time,
            base_model_name=adapter.base_model_name,
        )

    def keep(self, adapter: Adapter, *, in_use: Collection[str], pinned: Collection[str]) -> bool:
        """Copy the weights of an adapter to the device. Return False if other adapters leave no room.

        The least recently used weights make room, but weights that requests use come last, and `pinned` ones stay.
        `in_use` and `pinned` are fingerprints.
        """
        if not self.use(adapter.fingerprint):
            while len(self._weights) >= self.max_adapters:
                if (victim := self._victim(in_use, pinned)) is None:
                    return False
                self._drop(victim)
            self._weights[adapter.fingerprint] = adapter.to(self.device)
            if self.listener is not None:
                self.listener.kept(adapter)
        return True

    def _victim(self, in_use: Collection[str], pinned: Collection[str]) -> str | None:
        """Return the fingerprint of the weights to drop next, or None if all are needed."""
        named = {record.fingerprint for record in self._by_name.values()}
        # Weights without a name cannot be read again: a request that was placed before may still arrive.
        kinds = (
            (one for one in self._weights if one in named and one not in in_use),
            (one for one in self._weights if one not in named and one not in in_use),
            (one for one in self._weights if one in named and one not in pinned),
        )
        return next((one for kind in kinds for one in kind), None)

    def use(self, fingerprint: str) -> bool:
        """Return whether the weights are on the device, and mark them as used."""
        if fingerprint in self._weights:
            self._weights.move_to_end(fingerprint)
        return fingerprint in self._weights

    def unload(self, name: str) -> None:
        """Remove the name of an adapter; its weights stay until `collect`. Raises `AdapterError` for unknown names."""
        if self._by_name.pop(name, None) is None:
            raise AdapterError(f"no adapter is named {name}")

    def collect(self, in_use: Collection[str]) -> None:
        """Free the weights of adapters without a name, except those whose fingerprint is in `in_use`."""
        named = {record.fingerprint for record in self._by_name.values()}
        for fingerprint in self._weights.keys() - named - set(in_use):
            self._drop(fingerprint)

    def _drop(self, fingerprint: str) -> None:
        del self._weights[fingerprint]
        if self.listener is not None:
            self.listener.dropped(fingerprint)

    def follow(self, name: str, folder: str, fingerprint: str) -> None:
        """Keep the weights that rank 0 keeps. Raises `AdapterError` if the files have changed since it read them."""
        adapter = self.read(name, folder)
        if adapter.fingerprint != fingerprint:
            raise AdapterError(f"adapter {name}: the files in {folder} have changed while the ranks read them")
        self._weights[fingerprint] = adapter.to(self.device)

    def forget(self, fingerprint: str) -> None:
        """Free the weights that rank 0 has dropped."""
        self._weights.pop(fingerprint, None)

    def record_of(self, fingerprint: str) -> AdapterRecord | None:
        """Return an adapter with these weights that has a name, or None."""
        return next((one for one in self._by_name.values() if one.fingerprint == fingerprint), None)

    def has(self, fingerprint: str) -> bool:
        """Return whether requests can be served: the adapter has a name, or its weights are still there.

        A router may have placed a request before it knew that the adapter was unloaded.
        """
        return fingerprint in self._weights or self.record_of(fingerprint) is not None

    def records(self) -> list[AdapterRecord]:
        """Return the adapters that have a name."""
        return list(self._by_name.values())

    def weights(self, fingerprint: str) -> Adapter:
        """Return the weights of an adapter of the step, which the scheduler has found."""
        return self._weights[fingerprint]

    def rows(self, step: Iterable[tuple[str, Tensor | None]]) -> Sequence[AdapterRows]:
        """Return each adapter of a step with the rows that it applies to.

        `step` names the adapters by fingerprint. The scheduler has found the weights of each (`LoadedAdapters.use`).
        """
        return [AdapterRows(self._weights[fingerprint], rows) for fingerprint, rows in step]


def _why_fixed(module: str) -> str:
    """Return why adapters cannot change a module, and what to do instead."""
    # Whole parts are compared: a name like `experts_norm` is something else.
    parts = module.split(".")
    kinds = {"experts": "a weight of experts", "lm_head": "the head", "embed_tokens": "the embedding"}
    recurrent = ("linear_attn", "mamba", "mixer", "conv", "temporal_block")
    kinds |= dict.fromkeys(recurrent, "part of a layer with recurrent states")
    kind = next((kind for part, kind in kinds.items() if part in parts), None)
    if kind is None:
        return "which is not a linear layer of this model: load an adapter that was trained for this model"
    return f"{kind}, which adapters cannot change: {MERGE}, or train the adapter without it"
