"""Chooses the instances of a request: prefill and decode worker or one alone, by cached prefix, predicted TTFT and
load. Pure.

The policy `prefix` works like this. The prefill instance is the one with the smallest predicted time to first token:
the tokens queued there plus the prompt's tokens that are not cached there, divided by its measured rate. Under load,
tokens to compute weigh more than tokens that are queued, because requests that come later have to wait for them too.
So a cached prefix attracts requests until the queue that this causes costs more than computing the prefix elsewhere.
The decode instance is the least busy one with enough free blocks; blocks that it has already count only as bytes that
need not be transferred. If another instance has a longer prefix than the chosen one, the prefix is fetched from there
where that is cheaper than computing it (`prefix_pull`). The other policies exist for comparison.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import msgspec

from baton_serve.contracts.block_layout import KVLayout, obstacle
from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import Role
from baton_serve.contracts.media import MediaSpan
from baton_serve.services.router.placement.encode_workers import Encoder, assign_images
from baton_serve.services.router.placement.prefix_pull import PullPlan, PullPolicy, best_holders, plan_pull


def spread(number: int) -> int:
    """Return a number of 64 bits that looks random and depends on `number` alone.

    This is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    mask = (1 << 64) - 1
    # The constants are those of SplitMix64. Without the multiplications by odd numbers, consecutive turns would give
    # neighbouring values, and the policy `random` would take instances in order.
    mixed = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


Decision = Literal["disaggregated", "decode_only", "unified", "prefill_only", "prefill_fallback"]
Reason = Literal["empty_pool", "never_fits"]
PolicyName = Literal["prefix", "least_loaded", "round_robin", "random"]
DecodeFallback = Literal["prefill", "fail"]
"""Whether prefill instances generate while no decode or unified instance is ready, or requests fail."""

HOST_TIER_SAVING_RATIO = 0.75
"""Part of a token's prefill time that is saved if its block lies in the host tier; the rest is for copying it in."""
UNMEASURED_TOKENS_PER_S = 5000.0
"""Prefill rate, in tokens per second, that is assumed of an instance which has not measured one yet."""
TTFT_SLO_MARGIN = 0.9
"""If disaggregated prefill is predicted to take at most this fraction of the remaining TTFT SLO, it is used even where
the decode instance would be faster, because a prompt slows down the sequences that are decoding there."""
FOLLOWERS_PER_QUEUED_PROMPT = 2.0
"""Later prompts that a prompt is assumed to delay, for each prompt of its size that is queued per instance now."""
MAX_FOLLOWERS = 4.0
"""Largest number of later prompts that a prompt is assumed to delay.

It bounds the queue that a cached prefix may attract to 1 + `MAX_FOLLOWERS` times the tokens that the prefix saves.
Without it a common prefix could cause an unlimited queue in a pool of two.
"""
EVICTION_WEIGHT = 0.25
MAX_TURNOVER_RATIO = 5.0
"""Cost of the evictions that a prompt causes, and the largest ratio of an instance's turnover to the mean that counts.

A prompt evicts as many blocks as it stores. On an instance that stores more than the mean, the evicted blocks are
younger, and it is more likely that they would have been used again. Without this term new conversations all go to the
few instances that have a common system prompt, and evict each other's blocks there.
"""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Describes what one attempt of a request needs for its placement: tokens, SLO, and instances to avoid or to
    prefer.
    """

    num_tokens: int
    """Tokens whose KV must exist before the next token: the prompt, and in a replay the tokens generated so far."""
    num_sequences: int = 1
    max_new_tokens: int = 1
    avoided: frozenset[InstanceId] = frozenset()
    """Instances that failed this request; they are taken only if no other instance can serve it."""
    preferred_decode: InstanceId | None = None
    """The decode instance that has received blocks of this request in an earlier attempt."""
    itl_s: float | None = None
    """ITL SLO in seconds; None if the request has none."""
    ttft_s: float | None = None
    """Rest of the TTFT SLO in seconds; None if the request has none."""
    source_tokens: int = 0
    """Positions of a source, with which `num_tokens` and the cached prefix begin. It is never pulled."""
    has_images: bool = False
    """The prompt has images, so a decode instance cannot compute it: it has no vision tower."""
    media: Sequence[MediaSpan] = ()
    files: Sequence[Sequence[bytes]] = ()
    """The digests of the spans of each file that an encode instance could encode."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that may serve a given request, with its load and with how much of the request's prompt it has
    cached.

    All numbers include work that this router has placed there and that the instance has not reported yet.
    """

    instance: InstanceId
    role: Role
    layout: KVLayout
    free_blocks: int
    total_blocks: int
    active_sequences: int
    queued_tokens: float
    prefill_tokens_per_s: float
    cached_tokens: int = 0
    """Tokens of this request's cached prefix in the device tier."""
    host_cached_tokens: int = 0
    """Tokens that the host tier adds to that prefix."""
    turnover: float = 0.0
    """Tokens computed there recently, divided by the tokens that its cache holds.

    The larger it is, the sooner a cached block is evicted.
    """
    embedding_layout: KVLayout | None = None
    """Layout of the embeddings of images that it can fetch (`InstanceRecord.embedding_layout`)."""
    can_generate: bool = False
    """True if it is a prefill instance that can also generate answers (`InstanceRecord.can_generate`)."""
    machine: str = ""
    """Name of the host; equal for instances that can share memory."""
    held_tokens: int = 0
    """Tokens of this request's prefix that others can fetch: reported by the instance, in any tier."""
    link_speeds: Mapping[InstanceId, float] = {}
    """Bytes per second that this instance measured when it fetched blocks, by source instance."""
    pull: PullPlan | None = None
    """Prefix that this instance would fetch from another one before it computes the rest."""
    next_step_s: float = 0.0
    """Predicted duration of a decode step with one more sequence, in seconds; 0 if unknown."""
    rate_uncertainty: float = 1.0
    step_uncertainty: float = 1.0
    """Factors, at least 1, by which prefill and decode may be faster than measured. They grow while it is idle."""
    branches: tuple[int, ...] = ()
    """`Work.branches` if the prompt is computed here; it is empty for models without recurrent states."""
    spare_tokens_per_s: float = 0.0
    """Prompt tokens per second that it can compute without missing the ITL SLO of a sequence that is decoding there.

    It is 0 without any headroom, and if one of those sequences has no ITL SLO.
    """

    def uncached(self, num_tokens: int) -> float:
        """Return how many of a request's `num_tokens` tokens must be computed on this instance. Tokens cached in the
        host tier count in part.

        It is at least 1, since the last token is always computed: its logits are needed.
        """
        missing = num_tokens - self.cached_tokens - HOST_TIER_SAVING_RATIO * self.host_cached_tokens
        if self.pull is not None:
            missing -= self.pull.missing_tokens
        return max(1.0, missing)

    @property
    def queue_s(self) -> float:
        """The predicted time in seconds until the instance has computed the prompts that are queued there."""
        return self.queued_tokens / self.tokens_per_s if self.queued_tokens else 0.0

    @property
    def own_tokens(self) -> int:
        """The number of tokens of this request's prefix that are cached on the instance, in both tiers."""
        return self.cached_tokens + self.host_cached_tokens

    @property
    def tokens_per_s(self) -> float:
        """The instance's prefill rate in tokens per second, or `UNMEASURED_TOKENS_PER_S` if it is not known."""
        return self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else UNMEASURED_TOKENS_PER_S

    def time_to_first_token_s(self, num_tokens: int, *, harm: float = 0.0) -> float:
        """Return the predicted time to the first token in seconds if a prompt of `num_tokens` tokens is computed on
        this instance.

        With `harm` the result is a cost: it also includes the delay that this prompt causes to later prompts, which is
        `harm` times its computation.
        """
        rate = self.tokens_per_s
        wait_s = self.queued_tokens / rate
        if self.pull is not None:
            # The fetch overlaps with the prompts that are queued before this one.
            wait_s = max(wait_s, self.pull.seconds)
        return wait_s + (1.0 + harm) * self.uncached(num_tokens) / rate


class ClusterView(msgspec.Struct, frozen=True):
    """The instances that accept new requests at one moment, each as a candidate for a given request."""

    candidates: Sequence[Candidate]
    turn: int = 0
    """Number of the view, which grows by one each time: the state of the policies `round_robin` and `random`."""
    allows_prefill_fallback: bool = False
    """True if prefill instances may generate answers when the view has no decode or unified instance."""
    is_asleep: bool = False
    """True if an instance that could serve the request sleeps."""
    encoders: Sequence[Encoder] = ()
    """Encode instances, for a prompt with images."""


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """The router's settings for placement, the choice of instances for a request."""

    disaggregation_min_tokens: int = 32
    """Prompts with fewer uncached tokens are computed on the decode instance."""
    name: PolicyName = "prefix"
    """`least_loaded` considers queues alone; `round_robin` and `random` ignore load. See the module for `prefix`."""
    pull: PullPolicy = "auto"
    """Setting of `prefix_pull`: whether to fetch cached prefixes from other instances."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Names the instances chosen for one request, and what is predicted for it there.

    `prefill` computes the prompt and `decode` generates; if one instance does both, only `decode` is set. The decision
    "prefill_only" is for requests that end with their first token, so that nothing is handed off. With
    "prefill_fallback" `decode` is a prefill instance, because no decode or unified instance is ready.
    """

    decision: Decision
    prefill: Candidate | None = None
    decode: Candidate | None = None
    predicted_ttft_s: float
    other_ttft_s: float = 0.0
    """Predicted TTFT, in seconds, of the alternative that was not chosen: prefill on the decode instance instead of
    disaggregated, or the other way round. It is 0 if only one of them was possible."""
    misses_handoff: bool = False
    """One instance computes the prompt, though it is long enough for disaggregation and both pools have instances:
    no prefill instance can hand off blocks to a decode instance that has room for the prompt."""
    encoding: Mapping[InstanceId, tuple[bytes, ...]] = {}
    """Digests of the images that each encode instance encodes; all others are encoded where the prompt is computed."""
    shortest_queue_s: float = 0.0
    """Queueing time in seconds at the least busy instance that could have computed the prompt; 0 if one is idle."""

    @property
    def predicted_itl_s(self) -> float:
        """The predicted inter-token latency in seconds; 0 if it is unknown or nothing is decoded."""
        return self.decode.next_step_s if self.decode is not None else 0.0

    @property
    def handoff_is_due(self) -> bool:
        """True if this placement needs a KV handoff, or would need one that no two instances can do."""
        return self.decision == "disaggregated" or self.misses_handoff

    @property
    def final_worker(self) -> Candidate:
        """The instance that computes the prompt: `prefill` if there is one, otherwise `decode`."""
        chosen = self.prefill or self.decode
        assert chosen is not None
        return chosen


class NoCapacity(msgspec.Struct, frozen=True):
    """Says that placement has found no instance for a request, and why."""

    reason: Reason
    """`empty_pool`: an instance may come later. `never_fits`: the request is too long for every instance."""
    message: str
    """Text for the client."""


_Pools = dict[Role, list[Candidate]]


def place(demand: Demand, cluster: ClusterView, policy: PlacementPolicy) -> Placement | NoCapacity:
    """Choose the instances for `demand` by their predicted TTFT or the policy of the settings. Return the placement, or
    the reason why there is none.

    `cluster` is a snapshot made for this demand. Instances in `demand.avoided` are used only if nothing else works.
    """
    # Decided before avoided instances are left out: a decode instance that failed this request once is still ready.
    if cluster.allows_prefill_fallback and any(c.role != "prefill" for c in cluster.candidates):
        cluster = msgspec.structs.replace(cluster, allows_prefill_fallback=False)
    if demand.avoided:
        trusted = [c for c in cluster.candidates if c.instance not in demand.avoided]
        placed = _place(demand, msgspec.structs.replace(cluster, candidates=trusted), policy)
        if not isinstance(placed, NoCapacity):
            return placed
    # An instance that failed once may work now, and without it the request would certainly fail.
    return _place(demand, cluster, policy)


def _place(demand: Demand, cluster: ClusterView, policy: PlacementPolicy) -> Placement | NoCapacity:
    """Return the placement with the smallest predicted TTFT. Instances are divided into groups that can exchange KV
    blocks, and the best placement of each group is compared.
    """
    candidates = cluster.candidates
    # Strictly less: the next token needs a place in the cache too.
    fitting = [c for c in candidates if demand.num_tokens < c.total_blocks * c.layout.block_tokens]
    if candidates and not fitting:
        largest = max(c.total_blocks * c.layout.block_tokens for c in candidates)
        return NoCapacity(
            "never_fits",
            f"the request needs {demand.num_tokens + 1} tokens of KV cache, but the largest instance has {largest}; "
            "shorten the prompt",
        )
    # A dict keeps the order of the candidates, which a set would not: equal inputs must give equal placements.
    layouts = dict.fromkeys([c.layout for c in fitting])
    groups = [fitting] if len(layouts) == 1 else [_group(fitting, layout) for layout in layouts]
    best: Placement | None = None
    for group in groups:
        option = _place_in_group(demand, group, policy, cluster)
        if option is not None and (best is None or option.predicted_ttft_s < best.predicted_ttft_s):
            best = option
    if best is None:
        return NoCapacity("empty_pool", _no_capacity_message(candidates, demand, is_asleep=cluster.is_asleep))
    if cluster.encoders:
        final = best.final_worker
        # Blocks that are only expected there do not exist yet, so they save no encoding.
        cached_tokens, layout = final.held_tokens, final.embedding_layout
        if cached_tokens < demand.source_tokens:
            # A part of a source's KV is of no use.
            cached_tokens = 0
        encoding = assign_images(demand.media, demand.files, cluster.encoders, layout, cached_tokens=cached_tokens)
        best = msgspec.structs.replace(best, encoding=encoding)
    is_miss = _misses_handoff(best, demand, policy, candidates, groups)
    return msgspec.structs.replace(best, misses_handoff=True) if is_miss else best


def _misses_handoff(
    best: Placement,
    demand: Demand,
    policy: PlacementPolicy,
    candidates: Sequence[Candidate],
    groups: Sequence[Sequence[Candidate]],
) -> bool:
    """Return whether `best` computes a prompt on one instance only because no prefill instance can hand off blocks to a
    decode instance. `groups` are the instances that can exchange blocks.
    """
    if best.decode is None or best.prefill is not None or demand.max_new_tokens == 1:
        return False
    if best.decode.uncached(demand.num_tokens) < policy.disaggregation_min_tokens:
        return False
    # With both roles in one group a handoff was possible, and one instance was chosen because it is faster.
    pools = {"prefill", "decode"}
    return pools <= {c.role for c in candidates} and not any(pools <= {c.role for c in group} for group in groups)


def _group(candidates: Sequence[Candidate], layout: KVLayout) -> list[Candidate]:
    """Return the instances with this KV layout, and the prefill instances that can hand off blocks to that layout."""
    return [c for c in candidates if c.layout == layout or (c.role == "prefill" and obstacle(c.layout, layout) is None)]


def _place_in_group(
    demand: Demand, group: Sequence[Candidate], policy: PlacementPolicy, cluster: ClusterView
) -> Placement | None:
    """Return the best placement on the instances of one group, which can exchange KV blocks, or None if there is
    none.
    """
    pick_prefill, pick_decode = _PICKS[policy.name]
    turn = cluster.turn
    pools: _Pools = {"prefill": [], "decode": [], "unified": []}
    for candidate in _with_pulls(demand, group, policy):
        pools[candidate.role].append(candidate)
    prefill, unified = pick_prefill(demand, pools["prefill"], turn), pick_prefill(demand, pools["unified"], turn)
    decode = None
    # Blocks that arrived in an earlier attempt need not be transferred again, so load is not compared.
    if demand.preferred_decode is not None:
        decode = next((c for c in pools["decode"] if c.instance == demand.preferred_decode), None)
    decode = decode or pick_decode(demand, pools["decode"], turn)
    option = _place_split(demand, prefill, decode, policy, pools)
    # Without an option the request needs more than its first token, and `place` has checked that all candidates are
    # prefill instances. Those of earlier versions refuse `Generate` messages.
    if option is None and cluster.allows_prefill_fallback:
        generating = pick_prefill(demand, [c for c in pools["prefill"] if c.can_generate], turn)
        return None if generating is None else _on_one_worker("prefill_fallback", generating, demand, pools)
    if unified is None:
        return option
    alone = _on_one_worker("unified", unified, demand, pools)
    return alone if option is None or alone.predicted_ttft_s < option.predicted_ttft_s else option


def _with_pulls(demand: Demand, group: Sequence[Candidate], policy: PlacementPolicy) -> Sequence[Candidate]:
    """Return the instances of a group with plans to fetch cached prefixes: a prefill or unified instance has a plan
    (`pull`) if fetching a prefix from another instance is worth it.
    """
    # A pull counts the blocks of tokens, and the cached prefix begins with those of the source.
    if demand.source_tokens or policy.name != "prefix" or policy.pull == "never":
        return group
    if not (holders := best_holders(group)):
        return group
    tokens = demand.num_tokens
    plans = [
        plan_pull(c, holders, num_tokens=tokens, policy=policy.pull) if c.role != "decode" else None for c in group
    ]
    return [c if plan is None else msgspec.structs.replace(c, pull=plan) for c, plan in zip(group, plans, strict=True)]


def _place_split(
    demand: Demand, prefill: Candidate | None, decode: Candidate | None, policy: PlacementPolicy, pools: _Pools
) -> Placement | None:
    """Return a placement on the given prefill and decode instance, or on one of them alone. Return None if these cannot
    serve the request.
    """
    if prefill is not None and demand.max_new_tokens == 1:
        return _prefill_on("prefill_only", prefill, None, demand, pools)
    if decode is None or (prefill is None and demand.has_images):
        return None
    # A prompt with images always goes to a prefill instance, however short: the decode instance cannot compute it.
    min_tokens = 0 if demand.has_images else policy.disaggregation_min_tokens
    if prefill is None or decode.uncached(demand.num_tokens) < min_tokens:
        return _on_one_worker("decode_only", decode, demand, pools)
    disaggregated = _prefill_on("disaggregated", prefill, decode, demand, pools)
    local_ttft_s = _local_ttft_s(decode, demand)
    is_soon = demand.ttft_s is not None and disaggregated.predicted_ttft_s <= TTFT_SLO_MARGIN * demand.ttft_s
    if local_ttft_s < disaggregated.predicted_ttft_s and not is_soon:
        # `_on_one_worker` predicts with the full prefill rate, of which the sequences' ITL SLOs leave only a part.
        alone, other_s = _on_one_worker("decode_only", decode, demand, pools), disaggregated.predicted_ttft_s
        return msgspec.structs.replace(alone, predicted_ttft_s=local_ttft_s, other_ttft_s=other_s)
    return disaggregated if local_ttft_s == inf else msgspec.structs.replace(disaggregated, other_ttft_s=local_ttft_s)


def _local_ttft_s(decode: Candidate, demand: Demand) -> float:
    """Return the predicted TTFT in seconds if the decode instance computes the prompt itself, in chunks that keep the
    ITL SLOs of its running sequences.

    Return inf if the request has no ITL SLO or the instance has no headroom: a prompt would slow down its sequences.
    """
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
    """Return the instance with the lowest cost: its predicted TTFT, and the expected harm to later prompts. Return None
    without candidates. `turn` is not used.
    """
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    num_tokens = demand.num_tokens
    queued = turnover = 0.0
    # One loop instead of two generators: this runs for every request and every instance.
    for c in candidates:
        queued += c.queued_tokens
        turnover += c.turnover
    followers = _expected_followers(queued / len(candidates), num_tokens) if queued else 0.0
    turnover /= len(candidates)

    def cost(c: Candidate) -> tuple[float, int, int, InstanceId]:
        evicted = EVICTION_WEIGHT * (min(MAX_TURNOVER_RATIO, c.turnover / turnover) - 1.0) if turnover else 0.0
        # Ties go to the instance with fewer sequences, then to the one with more free blocks, then by id, so that equal
        # inputs give equal placements.
        cost_s = c.time_to_first_token_s(num_tokens, harm=followers + evicted)
        return (cost_s, c.active_sequences, -c.free_blocks, c.instance)

    return min(candidates, key=cost)


def _expected_followers(queued_tokens: float, num_tokens: int) -> float:
    """Return how many later prompts of the same size the placed prompt is expected to delay. `queued_tokens` is the
    mean number of tokens queued per instance.

    By Little's law that is the number of prompts that wait on average now. The factor and the bound come from replaying
    a trace (docs/log/placement.md, "what a cached prefix is worth").
    """
    return min(MAX_FOLLOWERS, FOLLOWERS_PER_QUEUED_PROMPT * queued_tokens / max(1, num_tokens))


def _least_busy(demand: Demand, candidates: Iterable[Candidate], turn: int) -> Candidate | None:
    """Return the instance that has room for the request and the fewest running sequences, and among equal ones the one
    that needs the fewest blocks for it. Return None without candidates. `turn` is not used.
    """
    num_tokens = demand.num_tokens

    def cost(c: Candidate) -> tuple[bool, float, int, InstanceId]:
        block_tokens = c.layout.block_tokens
        missing = ceil(max(0, num_tokens - c.cached_tokens) / block_tokens)
        # A cached prefix weighs less than one running sequence. Otherwise traffic whose requests share only a system
        # prompt would all go to the first instance that has it.
        moved = missing * block_tokens / max(1, num_tokens)
        return (missing > c.free_blocks, c.active_sequences + min(1.0, moved) * 0.9, -c.free_blocks, c.instance)

    return min(candidates, key=cost, default=None)


def _least_loaded(demand: Demand, candidates: Iterable[Candidate], turn: int) -> Candidate | None:
    """Return the instance with the fewest queued tokens, and among equal ones the one with the fewest sequences. Return
    None without candidates. `demand` and `turn` are not used.
    """
    return min(
        candidates, key=lambda c: (c.queued_tokens, c.active_sequences, -c.free_blocks, c.instance), default=None
    )


def _round_robin(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Candidate | None:
    return sorted(candidates, key=lambda c: c.instance)[turn % len(candidates)] if candidates else None


def _at_random(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Candidate | None:
    # A hash of the turn instead of a random generator keeps `place` pure. The role is part of the hashed number, so
    # that the choices of the prefill and of the decode instance are independent.
    is_decode = bool(candidates) and candidates[0].role == "decode"
    return _round_robin(demand, candidates, spread(turn * 2 + is_decode) * len(candidates) >> 64)


_Pick = Callable[[Demand, Sequence[Candidate], int], Candidate | None]
_PICKS: dict[PolicyName, tuple[_Pick, _Pick]] = {
    "prefix": (_lowest_ttft, _least_busy),
    "least_loaded": (_least_loaded, _least_loaded),
    "round_robin": (_round_robin, _round_robin),
    "random": (_at_random, _at_random),
}
"""For each policy, how it picks the prefill and the decode instance among candidates of one role and layout."""


def _no_capacity_message(candidates: Sequence[Candidate], demand: Demand, *, is_asleep: bool) -> str:
    """Return the error message for the client that says which pool has no ready instance."""
    if is_asleep:
        return "the model sleeps: an operator must wake it up (POST /wake_up)"
    roles = {c.role for c in candidates}
    if not roles:
        return "no instance is ready: the prefill, decode and unified pools are empty"
    if demand.has_images and not roles - {"decode"}:
        return "no instance is ready that can encode images: start a prefill or unified instance of a vision model"
    return "no instance is ready that can decode: the decode and unified pools are empty"
