"""The instances that take new work, sorted out once for each change among them, and how a request sees them. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from baton_serve.contracts.identity import BlockName, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.layout import KVLayout
from baton_serve.services.router.cluster.worker_state import Member
from baton_serve.services.router.placement.block_index import BlockIndex, Match
from baton_serve.services.router.placement.policy import UNMEASURED_TOKENS_PER_S, Candidate

_NO_MATCH = Match()


class Takers:
    """Those of `members` that write text and take work."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = [m for m in members if m.takes_work and m.record.pooling is None]
        self._by_layout: dict[KVLayout, list[Member]] = {}
        for member in self._members:
            self._by_layout.setdefault(member.record.layout, []).append(member)
        readers = [m for m in self._members if m.record.role != "decode"] or self._members
        self.prefill_tokens_per_s = sum(m.record.load.prefill_tokens_per_s for m in readers) or UNMEASURED_TOKENS_PER_S
        """Of all that read prompts."""
        self._hoped_rates = {layout: _fastest(found) for layout, found in self._by_layout.items()}

    def of(self, model: frozenset[str] | None, lora: str, *, has_images: bool = False) -> "Takers":
        """With `model`, the names of one, its instances alone; with `lora`, those that have loaded this adapter; with
        images, those that read them or only write after what others have read."""
        if model is None and not lora and not has_images:
            return self
        members: Iterable[Member] = self._members
        if model is not None:
            members = [m for m in members if serves(m.record, model)]
        if lora:
            members = [m for m in members if any(adapter.fingerprint == lora for adapter in m.record.adapters)]
        if has_images:
            members = [m for m in members if m.record.reads_images or m.record.role == "decode"]
        return Takers(members)

    def sound(self, now: float) -> "Takers":
        """An instance whose circuit is open is better than none: the others of its role decide."""
        if not any([m.circuit.failures for m in self._members]):
            return self
        roles = {m.record.role for m in self._members if m.circuit.allows(now)}
        return Takers(m for m in self._members if m.circuit.allows(now) or m.record.role not in roles)

    def candidates(
        self, names: Callable[[KVLayout], Sequence[BlockName]], index: BlockIndex, now: float
    ) -> list[Candidate]:
        """With their cached prefix of the prompt that `names` names."""
        found: list[Candidate] = []
        for layout, members in self._by_layout.items():
            wanted = names(layout)
            matches = index.match(wanted)
            held = index.held(wanted) if _differ(matches, members) else {}
            hoped_rate = self._hoped_rates[layout]
            for member in members:
                instance = member.record.instance
                match, held_blocks = matches.get(instance, _NO_MATCH), held.get(instance, 0)
                found.append(member.candidate(match, now, held_blocks=held_blocks, hoped_rate=hoped_rate))
        return found


def _fastest(members: Iterable[Member]) -> float:
    """Of those that read prompts, in tokens per second: an instance that has computed none may be as fast."""
    return max([m.record.load.prefill_tokens_per_s for m in members if m.record.role != "decode"], default=0.0)


def _differ(matches: Mapping[InstanceId, Match], members: Sequence[Member]) -> bool:
    """Whether instances could fetch something from each other: not where all have the same."""
    if not matches:
        return False
    return len({matches.get(member.record.instance, _NO_MATCH).total for member in members}) > 1


def serves(record: InstanceRecord, names: frozenset[str]) -> bool:
    """Whether an instance's model is known under one of the names."""
    return record.model in names or not names.isdisjoint(record.model_aliases)
