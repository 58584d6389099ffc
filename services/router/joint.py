"""Whether a prompt had better be read by two prefill instances that take turns at it. Pure.

What is not cached is computed in parts, alternately by the front and by the back, each part right behind the one before
it: a group of its layers as soon as the other one has computed that group. So both compute nearly all of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import ceil
from statistics import fmean
from typing import Generic, Protocol, TypeVar

from contracts.identity import InstanceId
from services.router.pulls import LATENCY_S, PullPlan, Reader, link_speed

LAYER_GROUPS = 8
"""In so many groups of layers a part's last step hands on what it computes."""
MAX_PARTS = 64
"""Each is a request of its own, with all that comes with one. Longer prompts have parts of several steps."""
ALIKE = 1.5
"""Instances whose rates differ by less read as much each. Rates are of the prompts that came so far, and those of two
like cards have differed by 1.4; parts of whole steps are worth more."""
MAX_PARTNERS = 4
"""So many that could follow are looked at closely."""
LEAST_GAIN = 0.1
"""Of the time that one reader would take: both keep the prompt's blocks, so caches hold less that differs."""
PRICE = 0.5
"""Of a second of the back's, in what others wait for it: in a queue that is busy for a share b of the time, b / (1 - b)
seconds a second of work. About half, since the front is free earlier meanwhile. docs/experiments.md."""

MOST_BUSY = 0.99


class Partner(Reader, Protocol):
    """`services.router.placement.Candidate`."""

    @property
    def free_blocks(self) -> int: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def turnover(self) -> float: ...
    @property
    def busy(self) -> float: ...
    @property
    def step_tokens(self) -> int: ...
    @property
    def behind(self) -> float: ...
    @property
    def pull(self) -> PullPlan | None: ...
    def uncached(self, num_tokens: int) -> float: ...
    def time_to_first_token_s(self, num_tokens: int) -> float: ...


AnyPartner = TypeVar("AnyPartner", bound=Partner)


@dataclass(frozen=True, slots=True)
class JointPlan(Generic[AnyPartner]):
    """`ends`: how many tokens, in whole blocks, lie before the end of each part but the last. The front computes parts
    0, 2, … and `back` parts 1, 3, …, of which the last one ends the prompt. The first token is expected after
    `seconds`."""

    back: AnyPartner
    ends: tuple[int, ...]
    seconds: float


def plan_joint(
    front: AnyPartner,
    pool: Sequence[AnyPartner],
    *,
    num_tokens: int,
    min_tokens: int,
    avoid: frozenset[InstanceId] = frozenset(),
) -> JointPlan[AnyPartner] | None:
    """With `front`, one of `pool`, which would read the prompt alone; None where two gain less than it costs others, or
    nobody could follow."""
    if front.instance in avoid or not _can(front, num_tokens) or front.uncached(num_tokens) < min_tokens:
        return None
    cached = _cached(front)
    able = [
        other
        for other in pool
        if other.instance != front.instance
        and other.layout == front.layout
        and other.own_tokens <= cached
        and other.instance not in avoid
        and _can(other, num_tokens)
    ]
    plans = [
        JointPlan(back, ends, expected_s(front, back, num_tokens=num_tokens, ends=ends))
        for back in nsmallest(MAX_PARTNERS, able, key=_rank)
        if (ends := part_ends(front, back, num_tokens=num_tokens))
    ]
    best = min(plans, key=lambda plan: (plan.seconds, *_rank(plan.back)), default=None)
    if best is None:
        return None
    gain_s = front.time_to_first_token_s(num_tokens) - best.seconds
    busy = min(MOST_BUSY, fmean([candidate.busy for candidate in pool]))
    price_s = PRICE * busy / (1.0 - busy) * _back_s(best, num_tokens)
    return best if gain_s > max(price_s, LEAST_GAIN * front.time_to_first_token_s(num_tokens)) else None


def part_ends(front: Partner, back: Partner, *, num_tokens: int) -> tuple[int, ...]:
    """`JointPlan.ends`. What the front computes before the back is free is its alone; of the rest each computes as much
    as it can in the same time, or as much as the other. Empty: there are no two parts."""
    block_tokens, cached = front.layout.block_tokens, _cached(front)
    step = min(front.step_tokens, back.step_tokens) // block_tokens * block_tokens
    ahead_s = back.queue_s - _begins_s(front, num_tokens)
    ahead = max(0, int(ahead_s * front.tokens_per_s)) // block_tokens * block_tokens
    rest = num_tokens - cached - ahead
    blocks = rest // block_tokens
    share = _share(front.tokens_per_s, back.tokens_per_s)
    if not step or blocks < 2:
        return ()
    num_turns = ceil(rest * max(share, 1.0 - share) / step)
    num_turns = max(1, min(num_turns, MAX_PARTS // 2, blocks // 2))
    in_blocks = [
        min(blocks - 1, max(1, round(blocks * (turn + done) / num_turns)))
        for turn in range(num_turns)
        for done in (share, 1.0)
    ]
    ends = [cached + ahead + number * block_tokens for number in in_blocks[:-1]]
    return tuple(ends) if len(set(ends)) == len(ends) else ()


def _share(front_rate: float, back_rate: float) -> float:
    """The front's."""
    is_alike = max(front_rate, back_rate) < ALIKE * min(front_rate, back_rate)
    return 0.5 if is_alike else front_rate / (front_rate + back_rate)


def expected_s(front: Partner, back: Partner, *, num_tokens: int, ends: Sequence[int]) -> float:
    """Until the first token: `predicted_s`, and as much more as turns with this back have taken of late."""
    begins_s = _begins_s(front, num_tokens)
    return begins_s + back.behind * (predicted_s(front, back, num_tokens=num_tokens, ends=ends) - begins_s)


def times_predicted(front: Partner, back: Partner, *, num_tokens: int, ends: Sequence[int], took_s: float) -> float:
    """How many times as long as predicted it took from the front's beginning to the first token; `took_s` counts from
    the prompt's arrival."""
    begins_s = _begins_s(front, num_tokens)
    return (took_s - begins_s) / (predicted_s(front, back, num_tokens=num_tokens, ends=ends) - begins_s)


def predicted_s(front: Partner, back: Partner, *, num_tokens: int, ends: Sequence[int]) -> float:
    """Until the first token. A part begins with the first group of layers of the last step of the one before, and
    computes its own last group when that one's has come."""
    token_s = front.layout.token_bytes / link_speed(back, front)
    start = _cached(front)
    front_begins_s = _begins_s(front, num_tokens)
    free_s = [front_begins_s, back.queue_s]
    there_s = front_begins_s + (start - back.own_tokens) * token_s
    """When the reader of the next part has what comes before the last step of this one."""
    begun_s = ended_s = group_s = 0.0
    """Of the last step of the part before."""
    for number, end in enumerate((*ends, num_tokens)):
        reader = (front, back)[number % 2]
        length, rate, step = end - start, reader.tokens_per_s, reader.step_tokens
        begins_s = free_s[number % 2]
        first_step_s = min(length, step) / rate
        last_group_s = begins_s + first_step_s
        if number:
            first_group_s = max(there_s, begun_s + (ended_s - begun_s) / LAYER_GROUPS) + group_s + LATENCY_S
            begins_s = max(begins_s, first_group_s)
            come_s = max(there_s + (LAYER_GROUPS - 1) * group_s, ended_s) + group_s + LATENCY_S
            last_group_s = max(begins_s + first_step_s, come_s + first_step_s / LAYER_GROUPS)
            there_s = 0.0
        ended_s = last_group_s + length / rate - first_step_s
        last = (length - 1) % step + 1
        begun_s, group_s = ended_s - last / rate, last * token_s / LAYER_GROUPS
        free_s[number % 2] = ended_s
        start = end
    return ended_s


def _back_s(plan: JointPlan[AnyPartner], num_tokens: int) -> float:
    """How long the back computes."""
    ends = (*plan.ends, num_tokens)
    return sum(ends[i] - ends[i - 1] for i in range(1, len(ends), 2)) / plan.back.tokens_per_s


def _can(candidate: Partner, num_tokens: int) -> bool:
    return candidate.behind > 0 and ceil(num_tokens / candidate.layout.block_tokens) <= candidate.free_blocks


def _cached(front: Partner) -> int:
    """Tokens that it has, or fetches first."""
    return front.own_tokens + (front.pull.brings if front.pull is not None else 0)


def _begins_s(front: Partner, num_tokens: int) -> float:
    return front.time_to_first_token_s(num_tokens) - (num_tokens - _cached(front)) / front.tokens_per_s


def _rank(back: Partner) -> tuple[float, float, int, InstanceId]:
    """The one that is free first; of several the one whose cache is least worn."""
    return (back.queue_s, back.turnover, -back.free_blocks, back.instance)
