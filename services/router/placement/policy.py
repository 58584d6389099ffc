"""Which instances serve a request: filter, predict, pick. A pure function of values.

The prefill instance is the one with the smallest predicted time to first token: tokens queued there plus tokens not
cached there, over its measured rate. Under load, tokens to compute weigh more than tokens queued: those who come next
wait for them too. So a cached prefix attracts work until the queue it causes costs more than computing elsewhere. The
decode instance is the least busy one with room; blocks that it already has count only as bytes not moved. A prefix
that another instance has is fetched from there where that is cheaper (`pulls`).
That is the policy `prefix`; the others are there to compare with.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import msgspec

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import Role
from baton_serve.contracts.layout import KVLayout, obstacle
from baton_serve.services.router.placement.prefix_pull import PullPlan, PullPolicy, best_holders, plan_pull
from baton_serve.services.router.placement.spread import spread

Decision = Literal["disaggregated", "decode_only", "unified", "prefill_only"]
Reason = Literal["empty_pool", "never_fits"]
PolicyName = Literal["prefix", "least_loaded", "round_robin", "random"]

HOST_TIER_SAVING_RATIO = 0.75
"""Share of a token's compute time that a block in the host tier saves: it must still be copied in."""
UNMEASURED_TOKENS_PER_S = 5000.0
TTFT_SLO_MARGIN = 0.9
"""Part of a promised time to the first token that prefill may need before those who write are slowed down for it."""
FOLLOWERS_PER_QUEUED_PROMPT = 2.0
MAX_FOLLOWERS = 4.0
"""Bounds what a cached prefix may cost: a queue of at most 1 + this times the tokens that it saves."""
EVICTION_WEIGHT = 0.25
MAX_TURNOVER_RATIO = 5.0
"""A prompt evicts as much as it stores. Where more than the mean is stored, what goes is younger, and worth more."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs. `num_tokens` go into the cache before the next token: prompt, plus a replay's tokens."""

    num_tokens: int
    num_sequences: int = 1
    max_new_tokens: int = 1
    avoided: frozenset[InstanceId] = frozenset()
    """Instances that failed this request before."""
    preferred_decode: InstanceId | None = None
    """Where blocks of this request have arrived already."""
    itl_s: float | None = None
    """The longest time between tokens that was promised."""
    ttft_s: float | None = None
    """What is left of the time to the first token that was promised."""
    has_images: bool = False
    """No decode instance computes the prompt: those have no vision tower."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
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
    turnover: float = 0.0
    """Tokens computed there of late, in sizes of its cache: what is cached there lives the shorter the greater."""
    machine: str = ""
    """Equal for instances that can share memory."""
    held_tokens: int = 0
    """Of this request's, in any tier and known to be there: what others can fetch."""
    link_speeds: Mapping[InstanceId, float] = {}
    """Bytes a second that this instance measured when it fetched from others."""
    pull: PullPlan | None = None
    """What it fetches before it computes."""
    next_step_s: float = 0.0
    """Predicted time of a decode step with one sequence more; 0: not measured."""
    rate_uncertainty: float = 1.0
    step_uncertainty: float = 1.0
    """So many times as fast it may be, for all that is known: it has computed no prompts, or no steps, of late."""
    spare_tokens_per_s: float = 0.0
    """Of prompts that it computes beside those who write there, as fast as each of them was promised; 0: not at all."""

    def uncached(self, num_tokens: int) -> float:
        """Tokens to compute. The last token always is: its logits are wanted."""
        missing = num_tokens - self.cached_tokens - HOST_TIER_SAVING_RATIO * self.host_cached_tokens
        if self.pull is not None:
            missing -= self.pull.missing_tokens
        return max(1.0, missing)

    @property
    def queue_s(self) -> float:
        return self.queued_tokens / self.tokens_per_s if self.queued_tokens else 0.0

    @property
    def own_tokens(self) -> int:
        return self.cached_tokens + self.host_cached_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else UNMEASURED_TOKENS_PER_S

    def time_to_first_token_s(self, num_tokens: int, *, harm: float = 0.0) -> float:
        """With `harm`: plus what later prompts lose, in times that this one takes."""
        rate = self.tokens_per_s
        wait_s = self.queued_tokens / rate
        if self.pull is not None:
            wait_s = max(wait_s, self.pull.seconds)  # while those before it are computed
        return wait_s + (1.0 + harm) * self.uncached(num_tokens) / rate


class ClusterView(msgspec.Struct, frozen=True):
    """Instances that take new work now. `turn` grows by one with each view: whose turn it is."""

    candidates: Sequence[Candidate]
    turn: int = 0


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """`least_loaded` looks at queues alone, `round_robin` and `random` at nothing."""

    disaggregation_min_tokens: int = 32
    name: PolicyName = "prefix"
    pull: PullPolicy = "auto"


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """`prefill` computes the prompt, `decode` writes the answer; where one instance does both, only `decode` is set.

    `prefill_only` is for requests that end with their first token: there is nothing to hand off.
    """

    decision: Decision
    prefill: Candidate | None = None
    decode: Candidate | None = None
    predicted_ttft_s: float
    other_ttft_s: float = 0.0
    """Where a prefill and a decode instance could each have read the prompt: of the one that does not."""
    shortest_queue_s: float = 0.0
    """Of all instances that could have read the prompt: 0 means that one is idle."""

    @property
    def predicted_itl_s(self) -> float:
        return self.decode.next_step_s if self.decode is not None else 0.0

    @property
    def final_worker(self) -> Candidate:
        """The instance that reads the prompt."""
        chosen = self.prefill or self.decode
        assert chosen is not None
        return chosen


class NoCapacity(msgspec.Struct, frozen=True):
    """`reason` never_fits: no instance could ever serve it. `message` is for the client."""

    reason: Reason
    message: str


_Pools = dict[Role, list[Candidate]]


def place(demand: Demand, cluster: ClusterView, policy: PlacementPolicy) -> Placement | NoCapacity:
    """`cluster` is a snapshot for this demand at one moment; loads in it have been aged to that moment."""
    if demand.avoided:
        trusted = [c for c in cluster.candidates if c.instance not in demand.avoided]
        placed = _place(demand, ClusterView(trusted, cluster.turn), policy)
        if not isinstance(placed, NoCapacity):
            return placed
    # Better an instance that failed once than none.
    return _place(demand, cluster, policy)


def _place(demand: Demand, cluster: ClusterView, policy: PlacementPolicy) -> Placement | NoCapacity:
    candidates = cluster.candidates
    fitting = [c for c in candidates if demand.num_tokens < c.total_blocks * c.layout.block_tokens]
    if candidates and not fitting:
        largest = max(c.total_blocks * c.layout.block_tokens for c in candidates)
        return NoCapacity(
            "never_fits",
            f"the request needs {demand.num_tokens + 1} tokens of KV cache; the largest instance has {largest}",
        )
    layouts = dict.fromkeys([c.layout for c in fitting])
    groups = [fitting] if len(layouts) == 1 else [_group(fitting, layout) for layout in layouts]
    best: Placement | None = None
    for group in groups:
        option = _place_in_group(demand, group, policy, cluster.turn)
        if option is not None and (best is None or option.predicted_ttft_s < best.predicted_ttft_s):
            best = option
    return best or NoCapacity("empty_pool", _no_capacity_message(candidates, demand))


def _group(candidates: Sequence[Candidate], layout: KVLayout) -> list[Candidate]:
    """Instances of one layout, and those that could hand blocks to them."""
    return [c for c in candidates if c.layout == layout or (c.role == "prefill" and obstacle(c.layout, layout) is None)]


def _place_in_group(demand: Demand, group: Sequence[Candidate], policy: PlacementPolicy, turn: int) -> Placement | None:
    """Of instances that may exchange blocks."""
    pick_prefill, pick_decode = _PICKS[policy.name]
    pools: _Pools = {"prefill": [], "decode": [], "unified": []}
    for candidate in _with_pulls(demand, group, policy):
        pools[candidate.role].append(candidate)
    prefill, unified = pick_prefill(demand, pools["prefill"], turn), pick_prefill(demand, pools["unified"], turn)
    decode = None
    if demand.preferred_decode is not None:
        decode = next((c for c in pools["decode"] if c.instance == demand.preferred_decode), None)
    decode = decode or pick_decode(demand, pools["decode"], turn)
    option = _place_split(demand, prefill, decode, policy, pools)
    if unified is None:
        return option
    alone = _on_one_worker("unified", unified, demand, pools)
    return alone if option is None or alone.predicted_ttft_s < option.predicted_ttft_s else option


def _with_pulls(demand: Demand, group: Sequence[Candidate], policy: PlacementPolicy) -> Sequence[Candidate]:
    """Those that read prompts, with what each had better fetch from another one before it computes."""
    if policy.name != "prefix" or policy.pull == "never" or not (holders := best_holders(group)):
        return group
    tokens = demand.num_tokens
    plans = [
        plan_pull(c, holders, num_tokens=tokens, policy=policy.pull) if c.role != "decode" else None for c in group
    ]
    return [c if plan is None else msgspec.structs.replace(c, pull=plan) for c, plan in zip(group, plans, strict=True)]


def _place_split(
    demand: Demand, prefill: Candidate | None, decode: Candidate | None, policy: PlacementPolicy, pools: _Pools
) -> Placement | None:
    if prefill is not None and demand.max_new_tokens == 1:
        return _prefill_on("prefill_only", prefill, None, demand, pools)
    if decode is None or (prefill is None and demand.has_images):
        return None
    min_tokens = 0 if demand.has_images else policy.disaggregation_min_tokens
    if prefill is None or decode.uncached(demand.num_tokens) < min_tokens:
        return _on_one_worker("decode_only", decode, demand, pools)
    disaggregated = _prefill_on("disaggregated", prefill, decode, demand, pools)
    local_ttft_s = _local_ttft_s(decode, demand)
    is_soon = demand.ttft_s is not None and disaggregated.predicted_ttft_s <= TTFT_SLO_MARGIN * demand.ttft_s
    if local_ttft_s < disaggregated.predicted_ttft_s and not is_soon:
        alone, other_s = _on_one_worker("decode_only", decode, demand, pools), disaggregated.predicted_ttft_s
        return msgspec.structs.replace(alone, predicted_ttft_s=local_ttft_s, other_ttft_s=other_s)
    return disaggregated if local_ttft_s == inf else msgspec.structs.replace(disaggregated, other_ttft_s=local_ttft_s)


def _local_ttft_s(decode: Candidate, demand: Demand) -> float:
    """Time to the first token where the prompt is computed beside the answers that are written there, in chunks that
    keep what their requests were promised; inf: where nothing was promised, answers are not slowed down."""
    if demand.itl_s is None or demand.has_images or not decode.spare_tokens_per_s:
        return inf
    return (decode.queued_tokens + decode.uncached(demand.num_tokens)) / decode.spare_tokens_per_s


def _on_one_worker(decision: Decision, candidate: Candidate, demand: Demand, pools: _Pools) -> Placement:
    return Placement(
        decision=decision,
        decode=candidate,
        predicted_ttft_s=candidate.time_to_first_token_s(demand.num_tokens),
        shortest_queue_s=min([c.queue_s for c in pools[candidate.role]]),
    )


def _prefill_on(
    decision: Decision, prefill: Candidate, decode: Candidate | None, demand: Demand, pools: _Pools
) -> Placement:
    return Placement(
        decision=decision,
        prefill=prefill,
        decode=decode,
        predicted_ttft_s=prefill.time_to_first_token_s(demand.num_tokens),
        shortest_queue_s=min([c.queue_s for c in pools["prefill"]]),
    )


def _lowest_ttft(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Candidate | None:
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    num_tokens = demand.num_tokens
    queued = turnover = 0.0
    for c in candidates:
        queued += c.queued_tokens
        turnover += c.turnover
    followers = _expected_followers(queued / len(candidates), num_tokens) if queued else 0.0
    turnover /= len(candidates)

    def cost(c: Candidate) -> tuple[float, int, int, InstanceId]:
        evicted = EVICTION_WEIGHT * (min(MAX_TURNOVER_RATIO, c.turnover / turnover) - 1.0) if turnover else 0.0
        cost_s = c.time_to_first_token_s(num_tokens, harm=followers + evicted)
        return (cost_s, c.active_sequences, -c.free_blocks, c.instance)

    return min(candidates, key=cost)


def _expected_followers(queued_tokens: float, num_tokens: int) -> float:
    """How many prompts of this one's size will wait for it: as many as wait on average now (Little's law).

    The factor and the bound were found by replaying a trace: docs/log/placement.md.
    """
    return min(MAX_FOLLOWERS, FOLLOWERS_PER_QUEUED_PROMPT * queued_tokens / max(1, num_tokens))


def _least_busy(demand: Demand, candidates: Iterable[Candidate], turn: int) -> Candidate | None:
    num_tokens = demand.num_tokens

    def cost(c: Candidate) -> tuple[bool, float, int, InstanceId]:
        block_tokens = c.layout.block_tokens
        missing = ceil(max(0, num_tokens - c.cached_tokens) / block_tokens)
        # A cached prefix weighs less than one running sequence: on single-turn traffic it must not starve the others.
        moved = missing * block_tokens / max(1, num_tokens)
        return (missing > c.free_blocks, c.active_sequences + min(1.0, moved) * 0.9, -c.free_blocks, c.instance)

    return min(candidates, key=cost, default=None)


def _least_loaded(demand: Demand, candidates: Iterable[Candidate], turn: int) -> Candidate | None:
    return min(
        candidates, key=lambda c: (c.queued_tokens, c.active_sequences, -c.free_blocks, c.instance), default=None
    )


def _round_robin(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Candidate | None:
    return sorted(candidates, key=lambda c: c.instance)[turn % len(candidates)] if candidates else None


def _at_random(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Candidate | None:
    # A hash of the turn instead of a generator: `place` stays pure. Prefill and decode are drawn independently.
    is_decode = bool(candidates) and candidates[0].role == "decode"
    return _round_robin(demand, candidates, spread(turn * 2 + is_decode) * len(candidates) >> 64)


_Pick = Callable[[Demand, Sequence[Candidate], int], Candidate | None]
_PICKS: dict[PolicyName, tuple[_Pick, _Pick]] = {
    "prefix": (_lowest_ttft, _least_busy),
    "least_loaded": (_least_loaded, _least_loaded),
    "round_robin": (_round_robin, _round_robin),
    "random": (_at_random, _at_random),
}
"""Who reads the prompt, and who writes the answer, of instances with one role and layout."""


def _no_capacity_message(candidates: Sequence[Candidate], demand: Demand) -> str:
    roles = {c.role for c in candidates}
    if not roles:
        return "no instance is ready: the prefill, decode and unified pools are empty"
    if demand.has_images and not roles - {"decode"}:
        return "no instance is ready that reads images: prefill and unified instances of such a model do"
    return "no instance can write an answer: the decode and unified pools are empty"
