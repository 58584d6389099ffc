"""Keeps the adapters that are loaded beside a model, and knows which of its products they may change."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton_serve.engine.errors import AdapterError
from baton_serve.engine.model.lora.checkpoint import MERGE, Adapter, read_adapter


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """An adapter and the rows of a step that use it; None means all rows."""

    adapter: Adapter
    rows: Tensor | None  # int64 [count]


class AdapterStore:
    """The weights of adapters on the device. Engine thread only, except `read`.

    When the model is built, it offers the products that adapters may change. Then adapters are loaded. `max_adapters`
    limits the adapters whose weights are kept, including those without a name.
    """

    def __init__(self, *, max_rank: int, max_adapters: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_rank = max_rank
        self._max_adapters = max_adapters
        self._dtype = dtype
        self._device = device
        self._sizes: dict[str, tuple[int, int]] = {}
        self._by_name: dict[str, Adapter] = {}
        self._by_fingerprint: dict[str, Adapter] = {}

    def offer(self, module: str, *, inputs: int, outputs: int) -> None:
        """Register a module whose product adapters may change, with its numbers of inputs and outputs."""
        self._sizes[module] = (inputs, outputs)

    def read(self, name: str, folder: str, *, at_run_time: bool = False) -> Adapter:
        """Read an adapter for `put` and check that it fits the model.

        Callable from any thread. Raises `AdapterError`.
        """
        adapter = read_adapter(name, Path(folder), dtype=self._dtype, at_run_time=at_run_time)
        if adapter.rank > self._max_rank:
            raise AdapterError(
                f"adapter {name} has rank {adapter.rank}, the limit is {self._max_rank} (--max-lora-rank)"
            )
        for module, product in adapter.products.items():
            size = self._sizes.get(module)
            if size is None:
                raise AdapterError(f"adapter {name} changes {module}, {_why_fixed(module)}")
            if size != (product.down.shape[1], product.up.shape[0]):
                raise AdapterError(f"adapter {name}: the matrices of {module} have other sizes than this model's layer")
        return adapter

    def put(self, adapter: Adapter) -> None:
        """Add an adapter, replacing one of the same name. Raises `AdapterError` if too many are kept."""
        is_new = adapter.fingerprint not in self._by_fingerprint
        if is_new and len(self._by_fingerprint) >= self._max_adapters:
            raise AdapterError(
                f"adapter {adapter.name}: {self._max_adapters} adapters are kept already, the limit"
                " (--max-cpu-loras): unload one first"
            )
        # An adapter that is replaced stays under its fingerprint for requests that use it.
        loaded = adapter.to(self._device)
        self._by_name[adapter.name] = self._by_fingerprint[adapter.fingerprint] = loaded

    def unload(self, name: str) -> None:
        """Remove the name of an adapter; its weights stay until `collect`. Raises `AdapterError` for unknown names."""
        if self._by_name.pop(name, None) is None:
            raise AdapterError(f"no adapter is named {name}")

    def collect(self, in_use: Collection[str]) -> None:
        """Free adapters without a name, except those whose fingerprint is in `in_use`."""
        named = {adapter.fingerprint for adapter in self._by_name.values()}
        self._by_fingerprint = {key: one for key, one in self._by_fingerprint.items() if key in named or key in in_use}

    def has(self, fingerprint: str) -> bool:
        """Return whether the weights are loaded, with a name or without.

        A router may have placed a request before it knew that the adapter was unloaded.
        """
        return fingerprint in self._by_fingerprint

    def find(self, name: str) -> Adapter | None:
        """Return the adapter with this name, or None."""
        return self._by_name.get(name)

    def all(self) -> list[Adapter]:
        """Return the adapters that have a name."""
        return list(self._by_name.values())

    def rows(self, step: Iterable[tuple[str, Tensor | None]]) -> Sequence[AdapterRows]:
        """Return each adapter of a step with the rows that it applies to.

        `step` names the adapters by fingerprint.
        """
        return [AdapterRows(self._by_fingerprint[fingerprint], rows) for fingerprint, rows in step]


def _why_fixed(module: str) -> str:
    """Return why adapters cannot change a module, and what to do instead."""
    # Whole parts are compared: a name like `experts_norm` is something else.
    parts = module.split(".")
    kinds = {"experts": "a weight of experts", "lm_head": "the head", "embed_tokens": "the embedding"}
    kind = next((kind for part, kind in kinds.items() if part in parts), None)
    if kind is None:
        return "which is not a linear layer of this model: load an adapter that was trained for this model"
    return f"{kind}, which adapters cannot change: {MERGE}, or train the adapter without it"
