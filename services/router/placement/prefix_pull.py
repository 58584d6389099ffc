"""Whether an instance had better fetch a prompt's cached prefix from another one than compute it. Pure.

The fetch costs a fixed time and its bytes over the speed of the link, as it was measured or as links of its kind are;
computing costs tokens over the measured rate. A fetch must be cheaper by a margin: it also takes time of the source.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from statistics import median_low
from typing import Literal, Protocol

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.layout import KVLayout

PullPolicy = Literal["auto", "always", "never"]

PULL_LATENCY_S = 0.004
"""From the decision to the first block: asking the source's engine between two of its steps, and the connection."""
LOCAL_BYTES_PER_S = 2e9
REMOTE_BYTES_PER_S = 1e9
"""Where no link of either end has been measured yet, inside one machine and between two."""
MAX_PULL_COST_RATIO = 0.7
"""Of the time that a fetch saves, for what it costs."""
MAX_PULL_SOURCES = 4


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The first `num_tokens` lie at `source`; `missing_tokens` of them are missing here, and take `seconds`."""

    source: InstanceId
    num_tokens: int
    missing_tokens: int
    seconds: float


class PrefixHolder(Protocol):
    """`services.router.placement.policy.Candidate`."""

    @property
    def instance(self) -> InstanceId: ...
    @property
    def machine(self) -> str: ...
    @property
    def held_tokens(self) -> int: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def link_speeds(self) -> Mapping[InstanceId, float]: ...


class PullSink(PrefixHolder, Protocol):
    @property
    def own_tokens(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...


def best_holders(candidates: Iterable[PrefixHolder]) -> list[PrefixHolder]:
    """Those worth asking: with the longest prefix that is really there."""
    holders = [c for c in candidates if c.held_tokens]
    return nlargest(MAX_PULL_SOURCES, holders, key=lambda c: (c.held_tokens, c.instance)) if holders else []


def plan_pull(
    sink: PullSink, holders: Iterable[PrefixHolder], *, num_tokens: int, policy: PullPolicy = "auto"
) -> PullPlan | None:
    """The fetch that saves most, if any is worth it (with `always`: if there is any). The last token is computed."""
    if policy == "never":
        return None
    block_tokens = sink.layout.block_tokens
    useful = (num_tokens - 1) // block_tokens * block_tokens
    plans: list[tuple[float, PullPlan]] = []
    for holder in holders:
        missing_tokens = min(useful, holder.held_tokens) - sink.own_tokens
        if holder.instance == sink.instance or holder.layout != sink.layout or missing_tokens <= 0:
            continue
        seconds = PULL_LATENCY_S + missing_tokens * sink.layout.token_bytes / link_speed(sink, holder)
        saved_s = missing_tokens / sink.tokens_per_s
        if policy == "always" or seconds <= MAX_PULL_COST_RATIO * saved_s:
            plan = PullPlan(holder.instance, sink.own_tokens + missing_tokens, missing_tokens, seconds)
            plans.append((saved_s - seconds, plan))
    return max(plans, key=lambda found: (found[0], found[1].source), default=(0.0, None))[1]


def link_speed(sink: PullSink, holder: PrefixHolder) -> float:
    """Bytes a second, as the reader measured it, or the holder the other way round, as in a handoff; else as either's
    links are in the median."""
    measured = sink.link_speeds.get(holder.instance, 0.0) or holder.link_speeds.get(sink.instance, 0.0)
    if measured > 0:
        return measured
    others = [speed for end in (sink, holder) for speed in end.link_speeds.values() if speed > 0]
    if others:
        return median_low(others)
    return LOCAL_BYTES_PER_S if sink.machine == holder.machine else REMOTE_BYTES_PER_S
