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

LATENCY_S = 0.004
"""From the decision to the first block: asking the source's engine between two of its steps, and the connection."""
LOCAL_BYTES_PER_S = 2e9
REMOTE_BYTES_PER_S = 1e9
"""Where no link of either end has been measured yet, inside one machine and between two."""
LARGEST_PRICE = 0.7
"""Of the time that a fetch saves, for what it costs."""
MAX_SOURCES = 4


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The first `num_tokens` lie at `source`; `brings` of them are missing here, and take `seconds`."""

    source: InstanceId
    num_tokens: int
    brings: int
    seconds: float


class Holder(Protocol):
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


class Reader(Holder, Protocol):
    @property
    def own_tokens(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...


def best_holders(candidates: Iterable[Holder]) -> list[Holder]:
    """Those worth asking: with the longest prefix that is really there."""
    holders = [c for c in candidates if c.held_tokens]
    return nlargest(MAX_SOURCES, holders, key=lambda c: (c.held_tokens, c.instance)) if holders else []


def plan_pull(
    reader: Reader, holders: Iterable[Holder], *, num_tokens: int, policy: PullPolicy = "auto"
) -> PullPlan | None:
    """The fetch that saves most, if any is worth it (with `always`: if there is any). The last token is computed."""
    if policy == "never":
        return None
    block_tokens = reader.layout.block_tokens
    useful = (num_tokens - 1) // block_tokens * block_tokens
    plans: list[tuple[float, PullPlan]] = []
    for holder in holders:
        brings = min(useful, holder.held_tokens) - reader.own_tokens
        if holder.instance == reader.instance or holder.layout != reader.layout or brings <= 0:
            continue
        seconds = LATENCY_S + brings * reader.layout.token_bytes / link_speed(reader, holder)
        saved_s = brings / reader.tokens_per_s
        if policy == "always" or seconds <= LARGEST_PRICE * saved_s:
            plan = PullPlan(holder.instance, reader.own_tokens + brings, brings, seconds)
            plans.append((saved_s - seconds, plan))
    return max(plans, key=lambda found: (found[0], found[1].source), default=(0.0, None))[1]


def link_speed(reader: Reader, holder: Holder) -> float:
    """Bytes a second, as the reader measured it, or the holder the other way round, as in a handoff; else as either's
    links are in the median."""
    measured = reader.link_speeds.get(holder.instance, 0.0) or holder.link_speeds.get(reader.instance, 0.0)
    if measured > 0:
        return measured
    others = [speed for end in (reader, holder) for speed in end.link_speeds.values() if speed > 0]
    if others:
        return median_low(others)
    return LOCAL_BYTES_PER_S if reader.machine == holder.machine else REMOTE_BYTES_PER_S
