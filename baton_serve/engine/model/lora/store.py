"""Which adapters are loaded beside a model, and which of its products they may change."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton_serve.engine.errors import AdapterError
from baton_serve.engine.model.lora.checkpoint import Adapter, read_adapter


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of a step that an adapter changes; None: all of them."""

    adapter: Adapter
    rows: Tensor | None  # int64 [count]


class AdapterStore:
    """Forwards `offer` the products to which they can add; then adapters are loaded. Used by the engine's thread,
    `read` excepted. `max_adapters` bounds those whose weights are kept, nameless ones included."""

    def __init__(self, *, max_rank: int, max_adapters: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_rank = max_rank
        self._max_adapters = max_adapters
        self._dtype = dtype
        self._device = device
        self._sizes: dict[str, tuple[int, int]] = {}
        self._by_name: dict[str, Adapter] = {}
        self._by_fingerprint: dict[str, Adapter] = {}

    def offer(self, module: str, *, inputs: int, outputs: int) -> None:
        self._sizes[module] = (inputs, outputs)

    def read(self, name: str, folder: str, *, at_run_time: bool = False) -> Adapter:
        """From any thread: what `put` takes. Raises `AdapterError`."""
        adapter = read_adapter(name, Path(folder), dtype=self._dtype, at_run_time=at_run_time)
        if adapter.rank > self._max_rank:
            raise AdapterError(
                f"adapter {name} has rank {adapter.rank}, the limit is {self._max_rank} (--max-lora-rank)"
            )
        for module, product in adapter.products.items():
            size = self._sizes.get(module)
            if size is None:
                raise AdapterError(f"adapter {name} changes {module}, which this model does not have as a linear layer")
            if size != (product.down.shape[1], product.up.shape[0]):
                raise AdapterError(f"adapter {name}: the matrices of {module} are not those of this model's layer")
        return adapter

    def put(self, adapter: Adapter) -> None:
        """In the place of one that has this name. Raises `AdapterError` when there is no room."""
        is_new = adapter.fingerprint not in self._by_fingerprint
        if is_new and len(self._by_fingerprint) >= self._max_adapters:
            raise AdapterError(
                f"adapter {adapter.name}: {self._max_adapters} adapters are kept already, the limit"
                " (--max-cpu-loras): unload one first"
            )
        loaded = adapter.to(self._device)
        self._by_name[adapter.name] = self._by_fingerprint[adapter.fingerprint] = loaded

    def unload(self, name: str) -> None:
        """Its weights stay until `collect`. Raises `AdapterError`."""
        if self._by_name.pop(name, None) is None:
            raise AdapterError(f"no adapter is named {name}")

    def collect(self, in_use: Collection[str]) -> None:
        """Frees adapters that have no name any more and are in no request."""
        named = {adapter.fingerprint for adapter in self._by_name.values()}
        self._by_fingerprint = {key: one for key, one in self._by_fingerprint.items() if key in named or key in in_use}

    def has(self, fingerprint: str) -> bool:
        """Whether its weights are here, under a name or not: a router may have placed a request before it heard."""
        return fingerprint in self._by_fingerprint

    def find(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def all(self) -> list[Adapter]:
        return list(self._by_name.values())

    def rows(self, step: Iterable[tuple[str, Tensor | None]]) -> Sequence[AdapterRows]:
        """Of a step's inputs."""
        return [AdapterRows(self._by_fingerprint[fingerprint], rows) for fingerprint, rows in step]
