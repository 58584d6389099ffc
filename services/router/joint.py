"""Whether a prompt had better be read by two idle prefill instances at once. Pure.

The front computes what one step holds, at most half of what is not cached, and the back what follows, at the same time:
each group of layers of the back's first step begins when the front's blocks of that group have come. So both read for
about as long, and the first token comes earlier by what the front computes, less its first group of layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Generic, Protocol, TypeVar

from contracts.identity import InstanceId
from services.router.pulls import LATENCY_S, PullPlan, Reader, link_speed

LAYER_GROUPS = 8
"""In so many parts the front hands on what it computes in its last step."""


class Partner(Reader, Protocol):
    """`services.router.placement.Candidate`."""

    @property
    def free_blocks(self) -> int: ...
    @property
    def queued_tokens(self) -> float: ...
    @property
    def turnover(self) -> float: ...
    @property
    def step_tokens(self) -> int: ...
    @property
    def reads_behind(self) -> bool: ...
    @property
    def pull(self) -> PullPlan | None: ...
    def uncached(self, num_tokens: int) -> float: ...
    def time_to_first_token_s(self, num_tokens: int) -> float: ...


AnyPartner = TypeVar("AnyPartner", bound=Partner)


@dataclass(frozen=True, slots=True)
class JointPlan(Generic[AnyPartner]):
    """`back` serves the request; the front has the first `front_tokens` in whole blocks, cached ones and those that it
    computes. The first token is predicted after `seconds`."""

    back: AnyPartner
    front_tokens: int
    seconds: float


def plan_joint(
    front: AnyPartner,
    others: Iterable[AnyPartner],
    *,
    num_tokens: int,
    min_tokens: int,
    avoid: frozenset[InstanceId] = frozenset(),
) -> JointPlan[AnyPartner] | None:
    """With `front`, which would read the prompt alone; None where that is quicker, or nobody is there to follow."""
    if not _is_free(front, avoid) or front.uncached(num_tokens) < min_tokens:
        return None
    cached = front.own_tokens + (front.pull.brings if front.pull is not None else 0)
    plans: list[JointPlan[AnyPartner]] = []
    for back in others:
        if back.instance == front.instance or back.layout != front.layout or not _is_free(back, avoid):
            continue
        front_tokens = cached + _computed_by_front(front, back, num_tokens - cached)
        if front_tokens == cached or back.own_tokens > cached:
            continue
        if _has_room(front, front_tokens) and _has_room(back, num_tokens):
            seconds = _seconds(front, back, num_tokens=num_tokens, cached=cached, front_tokens=front_tokens)
            plans.append(JointPlan(back, front_tokens, seconds))
    best = min(plans, key=lambda p: (p.back.turnover, -p.back.free_blocks, p.back.instance), default=None)
    return best if best is not None and best.seconds < front.time_to_first_token_s(num_tokens) else None


def _is_free(candidate: Partner, avoid: frozenset[InstanceId]) -> bool:
    return candidate.reads_behind and not candidate.queued_tokens and candidate.instance not in avoid


def _has_room(candidate: Partner, num_tokens: int) -> bool:
    return ceil(num_tokens / candidate.layout.block_tokens) <= candidate.free_blocks


def _computed_by_front(front: Partner, back: Partner, uncached: int) -> int:
    """In whole blocks; a step of unknown size holds none."""
    block_tokens = front.layout.block_tokens
    return min(front.step_tokens, back.step_tokens, uncached // 2) // block_tokens * block_tokens


def _seconds(front: Partner, back: Partner, *, num_tokens: int, cached: int, front_tokens: int) -> float:
    """Until the first token. The back's first step begins with the front's first group of layers, and computes its
    own last group when the front's has come."""
    computed, rest = front_tokens - cached, num_tokens - front_tokens
    token_s = front.layout.token_bytes / link_speed(back, front)
    earlier_s, group_s = (cached - back.own_tokens) * token_s, computed * token_s / LAYER_GROUPS
    front_s, step_s = computed / front.tokens_per_s, min(rest, back.step_tokens) / back.tokens_per_s
    first_s = max(earlier_s, front_s / LAYER_GROUPS) + group_s
    last_s = max(earlier_s + (LAYER_GROUPS - 1) * group_s, front_s) + group_s
    step_ends_s = LATENCY_S + max(first_s + step_s, last_s + step_s / LAYER_GROUPS)
    before_s = front.time_to_first_token_s(num_tokens) - (num_tokens - cached) / front.tokens_per_s
    return before_s + step_ends_s + (rest / back.tokens_per_s - step_s)
