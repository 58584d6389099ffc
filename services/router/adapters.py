"""Which adapters the instances of a model have."""

from collections import Counter
from collections.abc import Iterable, Sequence

from contracts.instance import AdapterRecord


def most_held(of_instances: Iterable[Sequence[AdapterRecord]]) -> dict[str, AdapterRecord]:
    """By name. While an adapter is replaced instances disagree about it: the one that most of them have counts."""
    held: dict[str, Counter[str]] = {}
    records: dict[tuple[str, str], AdapterRecord] = {}
    for adapters in of_instances:
        for adapter in adapters:
            held.setdefault(adapter.name, Counter())[adapter.fingerprint] += 1
            records[adapter.name, adapter.fingerprint] = adapter
    chosen = {name: max(sorted(counts), key=counts.__getitem__) for name, counts in held.items()}
    return {name: records[name, fingerprint] for name, fingerprint in sorted(chosen.items())}
