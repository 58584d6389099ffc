"""Decides whether a LoRA adapter is accepted (`--max-lora-rank`, modules), and which adapter's weights are dropped from
the device for another's (LRU, `--max-cpu-loras`).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from baton_serve.contracts.instance import MAX_ADAPTERS, AdapterRecord
from baton_serve.engine.errors import AdapterError
from baton_serve.engine.model.lora.adapter_files import MERGE, Adapter, LowRank, read_adapter
from baton_serve.engine.model.rank_parts import WHOLE, RankParts


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """A LoRA adapter of a step, and the rows (tokens) of the step that use it; None means all rows."""

    adapter: Adapter
    rows: Tensor | None  # int64 [count]


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """The settings of `AdapterSlots`. `run_beside` runs a function in a second stream of the device, and returns a
    function that makes the main stream wait for it; None: the device has no second stream.
    """

    num_slots: int
    run_beside: Callable[[Callable[[], None]], Callable[[], None]] | None


class AdapterListener(Protocol):
    """Is notified when an `AdapterStore` has copied an adapter's weights to the device, or has freed them."""

    def kept(self, adapter: Adapter) -> None: ...
    def dropped(self, fingerprint: str) -> None: ...


class AdapterStore:
    """The names of loaded LoRA adapters, and a cache of their weights on the device. Engine thread only, except `read`.

    First the model registers its linear layers by `offer`; then adapters are loaded. `max_adapters` limits the adapters
    whose weights are on the device; others keep their names and are read from disk again. `dtype` is that of the
    adapters, which may differ from `model_dtype`. Without `slots`, steps with adapters use no captured graphs.
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
        """Register a linear layer of the model that adapters may change, by its full name, with its numbers of inputs
        and outputs on this rank.
        """
        self._sizes[module] = (inputs, outputs)

    def read(self, name: str, folder: str, *, at_run_time: bool = False) -> Adapter:
        """Read an adapter from `folder` into host memory and check that it fits the model. Return this rank's part of
        it.

        Callable from any thread. Raises `AdapterError` if it cannot be used.
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
        """Return the numbers of inputs and outputs of a linear layer, counted over all ranks; None if adapters cannot
        change it.
        """
        size, part = self._sizes.get(module), self._parts.tensors.get(f"{module}.weight")
        if size is None or part is None:
            return size
        width = self._parts.widths[module]
        return (size[0], width) if part.dim == 0 else (width, size[1])

    def _part(self, module: str, product: LowRank) -> LowRank:
        """Return this rank's part of an adapter's matrices for a linear layer that is divided over ranks by its outputs
        or inputs.
        """
        part = self._parts.tensors.get(f"{module}.weight")
        if part is None:
            return product
        if part.dim == 0:
            return LowRank(product.down, part.of(product.up).contiguous())
        return LowRank(part.of(product.down).contiguous(), product.up)

    def register(self, adapter: Adapter) -> None:
        """Make an adapter known by its name, in place of an earlier one of this name. Raises `AdapterError` if there
        are too many names.
        """
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
        """Copy the weights of an adapter to the device, if they are not there. Return False if the weights of other
        adapters leave no room.

        The least recently used weights are dropped first. Weights of `in_use`, the adapters of running requests, come
        last; `pinned` ones are never dropped. Both are fingerprints.
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
        """Return the fingerprint of the adapter whose weights are dropped next from the device; None if all are needed.
        For the arguments see `keep`.
        """
        named = {record.fingerprint for record in self._by_name.values()}
        # Weights without a name cannot be read again: a request that was placed before may still arrive.
        kinds = (
            (one for one in self._weights if one in named and one not in in_use),
            (one for one in self._weights if one not in named and one not in in_use),
            (one for one in self._weights if one in named and one not in pinned),
        )
        return next((one for kind in kinds for one in kind), None)

    def use(self, fingerprint: str) -> bool:
        """Return whether the weights of an adapter are on the device, and mark them as the most recently used ones."""
        if fingerprint in self._weights:
            self._weights.move_to_end(fingerprint)
        return fingerprint in self._weights

    def unload(self, name: str) -> None:
        """Remove the name of an adapter. Its weights stay on the device until `collect`. Raises `AdapterError` for
        unknown names.
        """
        if self._by_name.pop(name, None) is None:
            raise AdapterError(f"no adapter is named {name}")

    def collect(self, in_use: Collection[str]) -> None:
        """Free the weights of unloaded adapters, except those whose fingerprint is in `in_use`."""
        named = {record.fingerprint for record in self._by_name.values()}
        for fingerprint in self._weights.keys() - named - set(in_use):
            self._drop(fingerprint)

    def _drop(self, fingerprint: str) -> None:
        del self._weights[fingerprint]
        if self.listener is not None:
            self.listener.dropped(fingerprint)

    def follow(self, name: str, folder: str, fingerprint: str) -> None:
        """On ranks other than 0: read an adapter from `folder` and keep this rank's part on the device, because rank 0
        keeps its own. Raises `AdapterError` if the files have another fingerprint than rank 0 has read.
        """
        adapter = self.read(name, folder)
        if adapter.fingerprint != fingerprint:
            raise AdapterError(f"adapter {name}: the files in {folder} have changed while the ranks read them")
        self._weights[fingerprint] = adapter.to(self.device)

    def forget(self, fingerprint: str) -> None:
        """On ranks other than 0: free the weights of an adapter that rank 0 has dropped."""
        self._weights.pop(fingerprint, None)

    def record_of(self, fingerprint: str) -> AdapterRecord | None:
        """Return a loaded adapter that has a name and these weights; None if there is none."""
        return next((one for one in self._by_name.values() if one.fingerprint == fingerprint), None)

    def has(self, fingerprint: str) -> bool:
        """Return whether requests with this adapter can be served: it has a name, or its weights are still on the
        device.

        A router may have placed a request before it knew that the adapter was unloaded.
        """
        return fingerprint in self._weights or self.record_of(fingerprint) is not None

    def records(self) -> list[AdapterRecord]:
        """Return all adapters that have a name, that is, were loaded and not unloaded."""
        return list(self._by_name.values())

    def weights(self, fingerprint: str) -> Adapter:
        """Return the adapter with this fingerprint, whose weights must be on the device (see `use`)."""
        return self._weights[fingerprint]

    def rows(self, step: Iterable[tuple[str, Tensor | None]]) -> Sequence[AdapterRows]:
        """Return the adapters of a step with their weights and the rows of the step that use them.

        `step` names the adapters by fingerprint. Their weights must be on the device: the scheduler has made sure of it
        (`LoadedAdapters.use`).
        """
        return [AdapterRows(self._weights[fingerprint], rows) for fingerprint, rows in step]


def _why_fixed(module: str) -> str:
    """Return the part of an error message that says why adapters cannot change a module, and what to do instead."""
    # Whole parts are compared: a name like `experts_norm` is something else.
    parts = module.split(".")
    kinds = {"experts": "a weight of experts", "lm_head": "the head", "embed_tokens": "the embedding"}
    recurrent = ("linear_attn", "mamba", "mixer", "conv", "temporal_block")
    kinds |= dict.fromkeys(recurrent, "part of a layer with recurrent states")
    kind = next((kind for part, kind in kinds.items() if part in parts), None)
    if kind is None:
        return "which is not a linear layer of this model: load an adapter that was trained for this model"
    return f"{kind}, which adapters cannot change: {MERGE}, or train the adapter without it"
