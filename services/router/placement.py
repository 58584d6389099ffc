"""Which instances serve a request: filter, predict, pick. A pure function of values.

The prefill instance is the one with the smallest predicted time to first token: tokens queued there plus tokens not
cached there, over its measured rate. So a cached prefix attracts work until the queue it causes costs more than
computing elsewhere. The decode instance is the least busy one with room; blocks that it already has count only as bytes
not moved.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from contracts.identity import InstanceId
from contracts.instance import Role
from contracts.layout import KVLayout

Decision = Literal["disaggregated", "decode_only", "unified", "prefill_only"]
Reason = Literal["empty_pool", "never_fits"]

HOST_TIER_CREDIT = 0.75
"""Share of a token's compute time that a block in the host tier saves: it must still be copied in."""
UNMEASURED_TOKENS_PER_S = 5000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs. `num_tokens` go into the cache before the next token: prompt, plus a replay's tokens."""

    num_tokens: int
    num_sequences: int = 1
    max_new_tokens: int = 1
    avoid: frozenset[InstanceId] = frozenset()
    """Instances that failed this request before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An instance as this request sees it. All numbers include work placed there that it has not reported yet."""

    instance: InstanceId
    role: Role
    layout: KVLayout
    free_blocks: int
    total_blocks: int
    active_sequences: int
    queued_tokens: float
    prefill_tokens_per_s: float
    cached_tokens: int = 0
    """In the device tier, of this request's tokens."""
    host_cached_tokens: int = 0

    def uncached(self, num_tokens: int) -> float:
        """Tokens to compute. The last token always is: its logits are wanted."""
        cached = self.cached_tokens + HOST_TIER_CREDIT * self.host_cached_tokens
        return max(1.0, num_tokens - cached)

    def time_to_first_token_s(self, num_tokens: int) -> float:
        rate = self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else UNMEASURED_TOKENS_PER_S
        return (self.queued_tokens + self.uncached(num_tokens)) / rate


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Instances that take new work now."""

    candidates: Sequence[Candidate]


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    disaggregation_min_tokens: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`prefill` computes the prompt, `decode` writes the answer; where one instance does both, only `decode` is set.

    `prefill_only` is for requests that end with their first token: there is nothing to hand off.
    """

    decision: Decision
    prefill: Candidate | None = None
    decode: Candidate | None = None
    predicted_ttft_s: float

    @property
    def computing(self) -> Candidate:
        """The instance that reads the prompt."""
        chosen = self.prefill or self.decode
        assert chosen is not None
        return chosen


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """`reason` never_fits: no instance could ever serve it. `message` is for the client."""

    reason: Reason
    message: str


def place(demand: Demand, cluster: ClusterView, policy: PlacementPolicy) -> Placement | NoCapacity:
    """`cluster` is a snapshot for this demand at one moment; loads in it have been aged to that moment."""
    trusted = [c for c in cluster.candidates if c.instance not in demand.avoid]
    placed = _place(demand, trusted, policy)
    if isinstance(placed, NoCapacity) and demand.avoid:
        # Better an instance that failed once than none.
        return _place(demand, cluster.candidates, policy)
    return placed


def _place(demand: Demand, candidates: Sequence[Candidate], policy: PlacementPolicy) -> Placement | NoCapacity:
    fitting = [c for c in candidates if ceil((demand.num_tokens + 1) / c.layout.block_tokens) <= c.total_blocks]
    if candidates and not fitting:
        largest = max(c.total_blocks * c.layout.block_tokens for c in candidates)
        return NoCapacity(
            "never_fits",
            f"the request needs {demand.num_tokens + 1} tokens of KV cache; the largest instance has {largest}",
        )
    options = [
        option
        for layout in dict.fromkeys(c.layout for c in fitting)
        if (option := _place_in_group(demand, [c for c in fitting if c.layout == layout], policy)) is not None
    ]
    if not options:
        return NoCapacity("empty_pool", _missing(candidates))
    return min(options, key=lambda option: option.predicted_ttft_s)


def _place_in_group(demand: Demand, group: Sequence[Candidate], policy: PlacementPolicy) -> Placement | None:
    """Instances of one layout: only these may exchange blocks."""
    prefill = _quickest(demand, (c for c in group if c.role == "prefill"))
    decode = _least_busy(demand, (c for c in group if c.role == "decode"))
    unified = _quickest(demand, (c for c in group if c.role == "unified"))
    split = _split(demand, prefill, decode, policy)
    if unified is None:
        return split
    alone = _alone("unified", unified, demand)
    return split if split is not None and split.predicted_ttft_s <= alone.predicted_ttft_s else alone


def _split(
    demand: Demand, prefill: Candidate | None, decode: Candidate | None, policy: PlacementPolicy
) -> Placement | None:
    if prefill is not None and demand.max_new_tokens == 1:
        ttft_s = prefill.time_to_first_token_s(demand.num_tokens)
        return Placement(decision="prefill_only", prefill=prefill, predicted_ttft_s=ttft_s)
    if decode is None:
        return None
    if prefill is None or decode.uncached(demand.num_tokens) < policy.disaggregation_min_tokens:
        return _alone("decode_only", decode, demand)
    ttft_s = prefill.time_to_first_token_s(demand.num_tokens)
    return Placement(decision="disaggregated", prefill=prefill, decode=decode, predicted_ttft_s=ttft_s)


def _alone(decision: Decision, candidate: Candidate, demand: Demand) -> Placement:
    ttft_s = candidate.time_to_first_token_s(demand.num_tokens)
    return Placement(decision=decision, decode=candidate, predicted_ttft_s=ttft_s)


def _quickest(demand: Demand, candidates: Iterable[Candidate]) -> Candidate | None:
    return min(
        candidates,
        key=lambda c: (c.time_to_first_token_s(demand.num_tokens), c.active_sequences, -c.free_blocks, c.instance),
        default=None,
    )


def _least_busy(demand: Demand, candidates: Iterable[Candidate]) -> Candidate | None:
    def cost(c: Candidate) -> tuple[bool, float, int, InstanceId]:
        missing = ceil(max(0, demand.num_tokens - c.cached_tokens) / c.layout.block_tokens)
        # A cached prefix weighs less than one running sequence: on single-turn traffic it must not starve the others.
        moved = missing * c.layout.block_tokens / max(1, demand.num_tokens)
        return (missing > c.free_blocks, c.active_sequences + min(1.0, moved) * 0.9, -c.free_blocks, c.instance)

    return min(candidates, key=cost, default=None)


def _missing(candidates: Sequence[Candidate]) -> str:
    roles = {c.role for c in candidates}
    if not roles:
        return "no instance is ready: the prefill, decode and unified pools are empty"
    return "no instance can write an answer: the decode and unified pools are empty"
