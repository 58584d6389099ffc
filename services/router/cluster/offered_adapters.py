"""Decides which LoRA adapters the router offers, and which ones a new instance must load."""

from collections import Counter
from collections.abc import Iterable, Sequence

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.instance import AdapterRecord, InstanceRecord
from baton_serve.contracts.messages import LoadAdapter
from baton_serve.services.router.cluster.worker_state import WorkerState


def most_common_adapters(of_instances: Iterable[Sequence[AdapterRecord]]) -> dict[str, AdapterRecord]:
    """Return the LoRA adapters that several instances have loaded, by name.

    While an adapter is being replaced, instances have different versions of it: the version that most of them have is
    returned.
    """
    held: dict[str, Counter[str]] = {}
    records: dict[tuple[str, str], AdapterRecord] = {}
    for adapters in of_instances:
        for adapter in adapters:
            held.setdefault(adapter.name, Counter())[adapter.fingerprint] += 1
            records[adapter.name, adapter.fingerprint] = adapter
    # Sorting the fingerprints first makes `max` deterministic when two versions are equally common.
    chosen = {name: max(sorted(counts), key=counts.__getitem__) for name, counts in held.items()}
    return {name: records[name, fingerprint] for name, fingerprint in sorted(chosen.items())}


def missing_adapters(newcomer: InstanceRecord, others: Iterable[InstanceRecord]) -> list[AdapterRecord]:
    """Return the adapters that other instances of the model have loaded over HTTP and that `newcomer` lacks.

    An adapter of the same name counts as present, even if it was loaded from another folder.
    """
    if newcomer.pooling is not None or newcomer.role == "encode":
        return []
    names = {newcomer.model, *newcomer.model_aliases}
    same = [other for other in others if other.model in names or not names.isdisjoint(other.model_aliases)]
    held = {adapter.name for adapter in newcomer.adapters}
    found = most_common_adapters([[adapter for adapter in other.adapters if adapter.at_run_time] for other in same])
    return [adapter for name, adapter in found.items() if name not in held]


def load_missing_adapters(newcomer: WorkerState, others: Iterable[InstanceRecord]) -> None:
    """Send `LoadAdapter` to a new instance for each LoRA adapter that other instances of its model have loaded over
    HTTP.
    """
    for adapter in missing_adapters(newcomer.record, others):
        request_id = RequestId(f"join-{newcomer.record.instance}-{adapter.name}")
        newcomer.send(LoadAdapter(request_id=request_id, name=adapter.name, path=adapter.path))
