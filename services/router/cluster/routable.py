"""Decides which instances are candidates for placement: ready, not draining, circuit breaker closed, with the model and
adapter. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.placement.block_index import BlockIndex, Match
from baton_serve.services.router.placement.encode_workers import Encoder
from baton_serve.services.router.placement.policy import UNMEASURED_TOKENS_PER_S, Candidate

_NO_MATCH = Match()
MAX_BRANCHES = 2
"""Largest number of places, where a prompt parts from cached ones, that are sent to its worker.

A checkpoint there costs the end of a chunk and a copy of the recurrent states."""


class RoutableWorkers:
    """The instances that generate text and accept new requests at one moment.

    `Cluster` makes a new one when its instances change: building its groups for every request would cost too much.
    """

    def __init__(self, workers: Iterable[WorkerState]) -> None:
        self._workers = [w for w in workers if w.takes_work and w.record.pooling is None and w.record.role != "encode"]
        self._by_layout: dict[KVLayout, list[WorkerState]] = {}
        for worker in self._workers:
            self._by_layout.setdefault(worker.record.layout, []).append(worker)
        # Without any prefill or unified instance the decode instances compute the prompts.
        prefillers = [w for w in self._workers if w.record.role != "decode"] or self._workers
        self.prefill_tokens_per_s = (
            sum(w.record.load.prefill_tokens_per_s for w in prefillers) or UNMEASURED_TOKENS_PER_S
        )
        """Prefill rate in tokens per second of all instances that compute prompts together."""
        self._assumed_rates = {layout: _highest_prefill_rate(found) for layout, found in self._by_layout.items()}

    def serving(self, model: frozenset[str] | None, lora: str, *, has_images: bool = False) -> "RoutableWorkers":
        """Return those of the instances that can serve a request.

        `model` is the set of names of one model, or None if the router serves only one. `lora` is the fingerprint of an
        adapter that must be loaded, or empty. With `has_images` an instance needs a vision tower, unless it is a decode
        instance, which gets the KV of the images from a prefill instance.
        """
        if model is None and not lora and not has_images:
            return self
        workers: Iterable[WorkerState] = self._workers
        if model is not None:
            workers = [w for w in workers if serves_model(w.record, model)]
        if lora:
            workers = [w for w in workers if any(adapter.fingerprint == lora for adapter in w.record.adapters)]
        if has_images:
            workers = [w for w in workers if w.record.reads_images or w.record.role == "decode"]
        return RoutableWorkers(workers)

    def with_allowed_traffic(self, now: float) -> "RoutableWorkers":
        """Return the instances whose circuit breaker allows requests. If it allows none of a role, all instances of
        this role are returned.

        An instance whose circuit is open may still work, and is better than none.
        """
        # In nearly every call no instance has failed, and the result is `self` without any new object.
        if not any([w.circuit_breaker.failures for w in self._workers]):
            return self
        roles = {w.record.role for w in self._workers if w.circuit_breaker.allows(now)}
        return RoutableWorkers(w for w in self._workers if w.circuit_breaker.allows(now) or w.record.role not in roles)

    def candidates(
        self,
        block_hashes: Callable[[KVLayout], Sequence[BlockHash]],
        index: BlockIndex,
        now: float,
        *,
        needs_held: bool = False,
    ) -> list[Candidate]:
        """Return all instances as candidates for one request, each with the length of the prompt's prefix that it has
        cached.

        `block_hashes` returns the prompt's block hashes for a KV layout: they depend on block size and dtype. `index`
        knows the cached blocks, and `now` is the time for which the load is computed. With `needs_held` the prefix that
        each instance has reported is looked up even if all are equal.
        """
        found: list[Candidate] = []
        for layout, workers in self._by_layout.items():
            wanted = block_hashes(layout)
            matches = index.match(wanted)
            branches: tuple[int, ...] = ()
            if layout.state_bytes:
                branches = _branches(matches, layout)
                matches = index.up_to_checkpoints(wanted, matches, layout.state_blocks)
            # The second walk over the prompt is needed only for images that may have to be encoded, and to find a
            # prefix that one instance can fetch from another.
            must_walk = needs_held or _prefixes_differ(matches, workers)
            held = index.held(wanted, state_blocks=layout.state_blocks) if must_walk else {}
            assumed_rate = self._assumed_rates[layout]
            for worker in workers:
                instance = worker.record.instance
                match, held_blocks = matches.get(instance, _NO_MATCH), held.get(instance, 0)
                candidate = worker.candidate(match, now, held_blocks=held_blocks, assumed_rate=assumed_rate)
                found.append(msgspec.structs.replace(candidate, branches=branches) if branches else candidate)
        return found


def _highest_prefill_rate(workers: Iterable[WorkerState]) -> float:
    """Return the highest speed, in prompt tokens per second, that any prefill or unified instance has measured; 0 if
    there are none.

    An instance that has not computed a prompt yet is assumed to be equally fast.
    """
    return max([w.record.load.prefill_tokens_per_s for w in workers if w.record.role != "decode"], default=0.0)


def _prefixes_differ(matches: Mapping[InstanceId, Match], workers: Sequence[WorkerState]) -> bool:
    """Return whether some of the `workers` have a longer cached prefix of the prompt than others, so that one could
    fetch blocks from another.
    """
    if not matches:
        return False
    return len({matches.get(worker.record.instance, _NO_MATCH).total for worker in workers}) > 1


def _branches(matches: Mapping[InstanceId, Match], layout: KVLayout) -> tuple[int, ...]:
    """Return the numbers of tokens after which the prompt differs from prompts that some instance has cached, the
    largest first. The instance that computes the prompt need not have these blocks.
    """
    lengths = sorted({match.total for match in matches.values()}, reverse=True)
    return tuple(length * layout.block_tokens for length in lengths[:MAX_BRANCHES])


def serves_model(record: InstanceRecord, names: frozenset[str]) -> bool:
    """Return whether an instance serves a model that has one of the `names`."""
    return record.model in names or not names.isdisjoint(record.model_aliases)


def ready_encoders(
    workers: Iterable[WorkerState],
    embeddings: Callable[[KVLayout], Mapping[bytes, BlockHash]],
    index: BlockIndex,
    now: float,
) -> list[Encoder]:
    """Return the encode instances that accept images now, each with the embeddings of one prompt that it has.

    `embeddings` returns the first block hash of each image's embeddings, by the image's digest. An instance whose
    circuit breaker is open is left out: the images can be encoded elsewhere.
    """
    found: list[Encoder] = []
    for worker in workers:
        record = worker.record
        if record.role == "encode" and worker.takes_work and worker.circuit_breaker.allows(now):
            names = embeddings(record.layout).items()
            held = frozenset(digest for digest, name in names if record.instance in index.match([name]))
            load = record.load
            encoder = Encoder(
                instance=record.instance,
                layout=record.layout,
                queued_images=load.running + load.waiting + worker.unreported_images,
                # Until it has encoded an image, its speed is not known.
                queue_s=load.queued_tokens / load.prefill_tokens_per_s if load.prefill_tokens_per_s else 0.0,
                held=held,
            )
            found.append(encoder)
    return found
