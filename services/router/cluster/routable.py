"""The instances that take new work, sorted out once for each change among them, and how a request sees them. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from baton_serve.contracts.identity import BlockHash, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.layout import KVLayout
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.placement.block_index import BlockIndex, Match
from baton_serve.services.router.placement.policy import UNMEASURED_TOKENS_PER_S, Candidate

_NO_MATCH = Match()


class RoutableWorkers:
    """Those of `workers` that write text and take work."""

    def __init__(self, workers: Iterable[WorkerState]) -> None:
        self._workers = [m for m in workers if m.takes_work and m.record.pooling is None]
        self._by_layout: dict[KVLayout, list[WorkerState]] = {}
        for worker in self._workers:
            self._by_layout.setdefault(worker.record.layout, []).append(worker)
        prefillers = [m for m in self._workers if m.record.role != "decode"] or self._workers
        self.prefill_tokens_per_s = (
            sum(m.record.load.prefill_tokens_per_s for m in prefillers) or UNMEASURED_TOKENS_PER_S
        )
        """Of all that read prompts."""
        self._assumed_rates = {layout: _highest_prefill_rate(found) for layout, found in self._by_layout.items()}

    def serving(self, model: frozenset[str] | None, lora: str, *, has_images: bool = False) -> "RoutableWorkers":
        """With `model`, the names of one, its instances alone; with `lora`, those that have loaded this adapter; with
        images, those that read them or only write after what others have read."""
        if model is None and not lora and not has_images:
            return self
        workers: Iterable[WorkerState] = self._workers
        if model is not None:
            workers = [m for m in workers if serves_model(m.record, model)]
        if lora:
            workers = [m for m in workers if any(adapter.fingerprint == lora for adapter in m.record.adapters)]
        if has_images:
            workers = [m for m in workers if m.record.reads_images or m.record.role == "decode"]
        return RoutableWorkers(workers)

    def with_allowed_traffic(self, now: float) -> "RoutableWorkers":
        """An instance whose circuit is open is better than none: the others of its role decide."""
        if not any([m.circuit_breaker.failures for m in self._workers]):
            return self
        roles = {m.record.role for m in self._workers if m.circuit_breaker.allows(now)}
        return RoutableWorkers(m for m in self._workers if m.circuit_breaker.allows(now) or m.record.role not in roles)

    def candidates(
        self, block_hashes: Callable[[KVLayout], Sequence[BlockHash]], index: BlockIndex, now: float
    ) -> list[Candidate]:
        """With their cached prefix of the prompt that `block_hashes` names."""
        found: list[Candidate] = []
        for layout, workers in self._by_layout.items():
            wanted = block_hashes(layout)
            matches = index.match(wanted)
            held = index.held(wanted) if _prefixes_differ(matches, workers) else {}
            assumed_rate = self._assumed_rates[layout]
            for worker in workers:
                instance = worker.record.instance
                match, held_blocks = matches.get(instance, _NO_MATCH), held.get(instance, 0)
                found.append(worker.candidate(match, now, held_blocks=held_blocks, assumed_rate=assumed_rate))
        return found


def _highest_prefill_rate(workers: Iterable[WorkerState]) -> float:
    """Of those that read prompts, in tokens per second: an instance that has computed none may be as fast."""
    return max([m.record.load.prefill_tokens_per_s for m in workers if m.record.role != "decode"], default=0.0)


def _prefixes_differ(matches: Mapping[InstanceId, Match], workers: Sequence[WorkerState]) -> bool:
    """Whether instances could fetch something from each other: not where all have the same."""
    if not matches:
        return False
    return len({matches.get(worker.record.instance, _NO_MATCH).total for worker in workers}) > 1


def serves_model(record: InstanceRecord, block_hashes: frozenset[str]) -> bool:
    """Whether an instance's model is known under one of the names."""
    return record.model in block_hashes or not block_hashes.isdisjoint(record.model_aliases)
