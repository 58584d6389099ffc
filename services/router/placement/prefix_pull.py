"""Decides whether an instance fetches a prompt's cached prefix from another one instead of computing it. Pure.

A fetch costs a fixed latency plus its bytes divided by the link's speed. Computing costs the tokens divided by the
measured prefill rate. The fetch must be cheaper by a margin, because it also takes time of the source instance.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from statistics import median_low
from typing import Literal, Protocol

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import InstanceId

PullPolicy = Literal["auto", "always", "never"]

PULL_LATENCY_S = 0.004
"""Seconds from the decision to the first block: for the connection, and until the source's engine ends its step."""
LOCAL_BYTES_PER_S = 2e9
REMOTE_BYTES_PER_S = 1e9
"""Speeds in bytes per second, on one host and between two, until a link of either instance has been measured."""
MAX_PULL_COST_RATIO = 0.7
"""Largest time of a fetch, as a fraction of the prefill time that it saves."""
MAX_PULL_SOURCES = 4
"""Number of source instances that are compared, so that the cost of a placement does not grow with the square of the
number of instances."""


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A planned fetch of a cached prefix by one instance from another: the source, how many tokens, and the predicted
    time.
    """

    source: InstanceId
    num_tokens: int
    """Length of the prefix that `source` has."""
    missing_tokens: int
    """The part of it that the fetching instance does not have yet."""
    seconds: float
    """Predicted duration of the fetch."""


class PrefixHolder(Protocol):
    """An instance from which another one may fetch a cached prefix. It is a `policy.Candidate`, which cannot be
    imported here because `policy` imports this module.
    """

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
    """An instance that may fetch a cached prefix before it computes the rest of a prompt; also a `policy.Candidate`."""

    @property
    def own_tokens(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...


def best_holders(candidates: Iterable[PrefixHolder]) -> list[PrefixHolder]:
    """Return the instances that have reported the longest cached prefixes of the prompt, at most `MAX_PULL_SOURCES`,
    the longest first.
    """
    holders = [c for c in candidates if c.held_tokens]
    return nlargest(MAX_PULL_SOURCES, holders, key=lambda c: (c.held_tokens, c.instance)) if holders else []


def plan_pull(
    sink: PullSink, holders: Iterable[PrefixHolder], *, num_tokens: int, policy: PullPolicy = "auto"
) -> PullPlan | None:
    """Return the fetch of a cached prefix that saves `sink` the most time, or None if no fetch is worth its cost.
    `num_tokens` is the length of the prompt.

    With the policy `always`, every possible fetch counts as worth its cost; with `never`, none does.
    """
    if policy == "never":
        return None
    block_tokens = sink.layout.block_tokens
    # The last token is always computed, since its logits are needed: a block that contains it is not fetched.
    useful = (num_tokens - 1) // block_tokens * block_tokens
    plans: list[tuple[float, PullPlan]] = []
    for holder in holders:
        missing_tokens = min(useful, holder.held_tokens) - sink.own_tokens
        if holder.instance == sink.instance or holder.layout != sink.layout or missing_tokens <= 0:
            continue
        # `own_tokens` counts full cached blocks, so the difference is a whole number of blocks too. The recurrent
        # states after the prefix travel with it.
        num_bytes = missing_tokens * sink.layout.token_bytes + sink.layout.state_bytes
        seconds = PULL_LATENCY_S + num_bytes / link_speed(sink, holder)
        saved_s = missing_tokens / sink.tokens_per_s
        if policy == "always" or seconds <= MAX_PULL_COST_RATIO * saved_s:
            plan = PullPlan(holder.instance, sink.own_tokens + missing_tokens, missing_tokens, seconds)
            plans.append((saved_s - seconds, plan))
    return max(plans, key=lambda found: (found[0], found[1].source), default=(0.0, None))[1]


def link_speed(sink: PullSink, holder: PrefixHolder) -> float:
    """Return the expected speed at which `sink` fetches blocks from `holder`, in bytes per second.

    It is the speed that `sink` measured on this link, or else the one that `holder` measured in the other direction, or
    else the median of all links of both. If nothing was measured yet, it is a constant.
    """
    # Handoffs run from prefill to decode, so on the way back only the other direction has been measured. A constant of
    # 1 GB/s there made fetches look slower than computing (docs/log/placement.md).
    measured = sink.link_speeds.get(holder.instance, 0.0) or holder.link_speeds.get(sink.instance, 0.0)
    if measured > 0:
        return measured
    others = [speed for end in (sink, holder) for speed in end.link_speeds.values() if speed > 0]
    if others:
        return median_low(others)
    return LOCAL_BYTES_PER_S if sink.machine == holder.machine else REMOTE_BYTES_PER_S
