"""Which adapters the instances of a model have, and which an instance that joins lacks."""

from collections import Counter
from collections.abc import Iterable, Sequence

from baton_serve.contracts.instance import AdapterRecord, InstanceRecord


def most_common_adapters(of_instances: Iterable[Sequence[AdapterRecord]]) -> dict[str, AdapterRecord]:
    """By name. While an adapter is replaced instances disagree about it: the one that most of them have counts."""
    held: dict[str, Counter[str]] = {}
    records: dict[tuple[str, str], AdapterRecord] = {}
    for adapters in of_instances:
        for adapter in adapters:
            held.setdefault(adapter.name, Counter())[adapter.fingerprint] += 1
            records[adapter.name, adapter.fingerprint] = adapter
    chosen = {name: max(sorted(counts), key=counts.__getitem__) for name, counts in held.items()}
    return {name: records[name, fingerprint] for name, fingerprint in sorted(chosen.items())}


def missing_adapters(newcomer: InstanceRecord, others: Iterable[InstanceRecord]) -> list[AdapterRecord]:
    """What others of its model were told to load while they ran, and it has not, not even by another folder."""
    if newcomer.pooling is not None:
        return []
    names = {newcomer.model, *newcomer.model_aliases}
    same = [other for other in others if other.model in names or not names.isdisjoint(other.model_aliases)]
    held = {adapter.name for adapter in newcomer.adapters}
    found = most_common_adapters([[adapter for adapter in other.adapters if adapter.at_run_time] for other in same])
    return [adapter for name, adapter in found.items() if name not in held]
