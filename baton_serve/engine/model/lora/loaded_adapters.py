"""Decides when the weights of a LoRA adapter are read again for a request, and loads and unloads adapters while the
engine runs.

An adapter that was loaded keeps its name until it is unloaded. The weights of the most recently used ones are on the
device, at most `max_cpu_loras`. Others are read again, in a thread, when a request needs them.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.instance import AdapterRecord
from baton_serve.contracts.messages import Work
from baton_serve.engine.errors import AdapterError, RequestError
from baton_serve.engine.model.lora.adapter_files import Adapter
from baton_serve.engine.model.lora.store import AdapterStore

READ_WAIT_S = 0.5
"""Longest time in seconds that an engine without other work waits for weights before it looks for new requests."""


class RunningRequest(Protocol):
    """The part of `engine.core.sequence.Request`, a running request, that `LoadedAdapters` reads."""

    @property
    def work(self) -> Work: ...


class LoadedAdapters:
    """Loads and unloads LoRA adapters while the engine runs, and reads weights from disk again that were dropped.
    Implements `core.scheduler.AdapterWeights`.

    Engine thread only, except `read`. `running` are all requests of the engine, by id.
    """

    def __init__(self, store: AdapterStore | None, running: Mapping[RequestId, RunningRequest]) -> None:
        self._store = store
        self._running = running
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._reads: dict[str, Future[Adapter]] = {}
        """Weights by fingerprint that are being read again, or were read and are in host memory."""
        self._failures: dict[str, str] = {}

    def close(self) -> None:
        """End the thread that reads adapters, without waiting for a read that has begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def records(self) -> list[AdapterRecord]:
        """Return the adapters that new requests may name; empty if LoRA is disabled."""
        return [] if self._store is None else self._store.records()

    def load(self, name: str, folder: str) -> None:
        """Read the adapter in `folder` and make it available as `name`, in place of an earlier one of this name. Raises
        `AdapterError` if it cannot be used.
        """
        self.put(self._loaded().read(name, folder))

    def read(self, name: str, folder: str) -> Adapter:
        """Read and check an adapter, for a later call of `put`. Callable from any thread, while steps run. Raises
        `AdapterError` if it cannot be used.
        """
        return self._loaded().read(name, folder, at_run_time=True)

    def put(self, adapter: Adapter) -> None:
        """Make an adapter that `read` has returned available to requests, in place of an earlier one of its name.
        Raises `AdapterError` if too many are loaded.

        Its weights stay on the device if the adapters in use leave room; otherwise they are read from disk again when a
        step needs them.
        """
        store, in_use = self._loaded(), self._in_use()
        store.register(adapter)
        # A later request for this adapter may wait. The running requests must not.
        store.keep(adapter, in_use=in_use, pinned=in_use)

    def unload(self, name: str) -> None:
        """Remove the name of an adapter, so that no new request can use it. Raises `AdapterError` for an unknown name.

        Its weights stay until `collect`. Requests with the adapter still run if its weights are on the device, also a
        request that a router is about to send.
        """
        self._loaded().unload(name)

    def collect(self) -> None:
        """Free the device memory of adapters that were unloaded and that no running request uses."""
        self._loaded().collect(self._in_use())

    def check(self, work: Work) -> None:
        """Raise `RequestError` if the adapter of a request is not loaded. If its weights are not on the device, begin
        to read them from disk.

        The read overlaps with the time in which the request waits, or in which its KV blocks are transferred.
        """
        if not work.lora:
            return
        if self._store is None or not self._store.has(work.lora):
            raise RequestError("invalid", "the LoRA adapter of this request is not loaded on this instance")
        # Weights that were read are in host memory until a step needs them, so their number is limited here.
        if not self._store.use(work.lora) and len(self._reads) < self._store.max_adapters:
            self._begin_read(work.lora)

    def use(self, fingerprint: str, in_step: Collection[str]) -> bool:
        """Return whether the weights of an adapter are on the device, so that the next step may use it. If not, begin
        to read them from disk: a later call returns True.

        `in_step` are the adapters that the step uses already; their weights are not dropped. If the read fails,
        `take_failures` reports it.
        """
        store = self._loaded()
        if store.use(fingerprint):
            return True
        self._begin_read(fingerprint)
        if (read := self._reads.get(fingerprint)) is None:
            self._failures[fingerprint] = "the LoRA adapter was unloaded before the request could run"
            return False
        if not read.done():
            return False
        try:
            adapter = read.result()
        except AdapterError as exc:
            del self._reads[fingerprint]
            self._failures[fingerprint] = str(exc)
            return False
        if not store.keep(adapter, in_use=self._in_use(), pinned=in_step):
            return False
        del self._reads[fingerprint]
        return True

    def wait(self) -> bool:
        """Wait until an adapter's weights have been read from disk, for at most `READ_WAIT_S` seconds. Return False at
        once if none are being read.
        """
        reading = [read for read in self._reads.values() if not read.done()]
        if reading:
            wait(reading, timeout=READ_WAIT_S, return_when=FIRST_COMPLETED)
        return bool(reading)

    def take_failures(self) -> Mapping[str, str]:
        """Return, by adapter fingerprint, why its weights could not be read from disk since the last call. The failures
        are forgotten: a new request tries again.
        """
        failures, self._failures = self._failures, {}
        return failures

    def _begin_read(self, fingerprint: str) -> None:
        """Begin to read the weights of an adapter from disk in the reading thread, unless that has begun already or the
        adapter was unloaded.
        """
        if fingerprint in self._reads:
            return
        # Requests that were cancelled leave weights behind that nobody takes.
        in_use = self._in_use()
        self._reads = {one: read for one, read in self._reads.items() if one in in_use or not read.done()}
        if (record := self._loaded().record_of(fingerprint)) is not None:
            self._reads[fingerprint] = self._thread.submit(self._read_again, record)

    def _read_again(self, record: AdapterRecord) -> Adapter:
        """Read the weights of a loaded adapter from disk again. Raises `AdapterError` if the files have changed since
        it was loaded.
        """
        adapter = self._loaded().read(record.name, record.path, at_run_time=record.at_run_time)
        # Cached KV and the other instances have the old weights.
        if adapter.fingerprint != record.fingerprint:
            raise AdapterError(
                f"adapter {record.name}: the files in {record.path} have changed since it was loaded: load it again"
                " with load_inplace, or restart the instances"
            )
        return adapter

    def _in_use(self) -> set[str]:
        """Return the fingerprints of the adapters that running requests use."""
        return {request.work.lora for request in self._running.values()}

    def _loaded(self) -> AdapterStore:
        if self._store is None:
            raise AdapterError("LoRA adapters are disabled; start with --enable-lora")
        return self._store
