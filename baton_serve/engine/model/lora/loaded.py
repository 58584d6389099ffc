"""An engine's adapters as its owner sees them."""

from collections.abc import Mapping
from typing import Protocol

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.instance import AdapterRecord
from baton_serve.contracts.messages import Work
from baton_serve.engine.errors import AdapterError, RequestError
from baton_serve.engine.model.lora.checkpoint import Adapter
from baton_serve.engine.model.lora.store import AdapterStore


class RunningRequest(Protocol):
    """`engine.core.sequence.Request`."""

    @property
    def work(self) -> Work: ...


class LoadedAdapters:
    """`running`: all requests of the engine, by id."""

    def __init__(self, store: AdapterStore | None, running: Mapping[RequestId, RunningRequest]) -> None:
        self._store = store
        self._running = running

    def records(self) -> list[AdapterRecord]:
        """Those that requests may name."""
        loaded = [] if self._store is None else self._store.all()
        return [
            AdapterRecord(name=one.name, fingerprint=one.fingerprint, path=one.path, at_run_time=one.at_run_time)
            for one in loaded
        ]

    def load(self, name: str, folder: str) -> None:
        """In the place of one that has this name. Raises `AdapterError`."""
        self.put(self._loaded().read(name, folder))

    def read(self, name: str, folder: str) -> Adapter:
        """From any thread, while steps run: what `put` takes at run time. Raises `AdapterError`."""
        return self._loaded().read(name, folder, at_run_time=True)

    def put(self, adapter: Adapter) -> None:
        """In the place of one that has this name. Raises `AdapterError`."""
        self.collect()
        self._loaded().put(adapter)

    def unload(self, name: str) -> None:
        """Requests that have it go on, and those that are placed but not yet here may come until `collect`. Raises
        `AdapterError`."""
        self._loaded().unload(name)

    def collect(self) -> None:
        """Frees what has no name any more and is in no request."""
        self._loaded().collect({request.work.lora for request in self._running.values()})

    def check(self, work: Work) -> None:
        """Raises `RequestError`."""
        if work.lora and (self._store is None or not self._store.has(work.lora)):
            raise RequestError("invalid", "its adapter is not loaded on this instance")

    def _loaded(self) -> AdapterStore:
        if self._store is None:
            raise AdapterError("adapters are served only with --enable-lora")
        return self._store
