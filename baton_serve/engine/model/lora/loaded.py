"""The adapters of an engine, as its owner sees them."""

from collections.abc import Mapping
from typing import Protocol

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.instance import AdapterRecord
from baton_serve.contracts.messages import Work
from baton_serve.engine.errors import AdapterError, RequestError
from baton_serve.engine.model.lora.checkpoint import Adapter
from baton_serve.engine.model.lora.store import AdapterStore


class RunningRequest(Protocol):
    """The part of `engine.core.sequence.Request` that is used here."""

    @property
    def work(self) -> Work: ...


class LoadedAdapters:
    """Loads and unloads adapters.

    Engine thread only, except `read`. `running` are all requests of the engine, by id.
    """

    def __init__(self, store: AdapterStore | None, running: Mapping[RequestId, RunningRequest]) -> None:
        self._store = store
        self._running = running

    def records(self) -> list[AdapterRecord]:
        """Return the adapters that new requests may use."""
        loaded = [] if self._store is None else self._store.all()
        return [
            AdapterRecord(name=one.name, fingerprint=one.fingerprint, path=one.path, at_run_time=one.at_run_time)
            for one in loaded
        ]

    def load(self, name: str, folder: str) -> None:
        """Load an adapter, replacing one of the same name. Raises `AdapterError`."""
        self.put(self._loaded().read(name, folder))

    def read(self, name: str, folder: str) -> Adapter:
        """Read an adapter for `put`. Callable from any thread, while steps run. Raises `AdapterError`."""
        return self._loaded().read(name, folder, at_run_time=True)

    def put(self, adapter: Adapter) -> None:
        """Add an adapter that `read` has returned, replacing one of the same name. Raises `AdapterError`."""
        # Adapters that nothing uses any more must not count against the limit.
        self.collect()
        self._loaded().put(adapter)

    def unload(self, name: str) -> None:
        """Remove the name of an adapter. Its weights stay until `collect`. Raises `AdapterError`.

        Running requests go on, and requests that a router has placed but not sent yet can still arrive.
        """
        self._loaded().unload(name)

    def collect(self) -> None:
        """Free adapters that have no name any more and that no request uses."""
        self._loaded().collect({request.work.lora for request in self._running.values()})

    def check(self, work: Work) -> None:
        """Raise `RequestError` if the adapter of a request is not loaded."""
        if work.lora and (self._store is None or not self._store.has(work.lora)):
            raise RequestError("invalid", "the LoRA adapter of this request is not loaded on this instance")

    def _loaded(self) -> AdapterStore:
        if self._store is None:
            raise AdapterError("LoRA adapters are disabled; start with --enable-lora")
        return self._store
