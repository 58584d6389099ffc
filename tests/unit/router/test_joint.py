"""When two prefill instances read a prompt together, which, and how much of it each."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from contracts.identity import InstanceId
from contracts.instance import Role
from services.router.joint import LAYER_GROUPS, LEAST_GAIN, MAX_PARTS, PRICE, predicted_s
from services.router.placement import Candidate, ClusterView, Demand, Placement, PlacementPolicy, PolicyName, place
from services.router.pulls import LATENCY_S
from tests.unit.router.fakes import LAYOUT

BLOCK = LAYOUT.block_tokens
JOINT = PlacementPolicy(disaggregation_min_tokens=0, joint_prefill_min_tokens=1000)
FAST = {InstanceId(f"p{i}"): 1e12 for i in range(4)}


def candidate(name: str, role: Role = "prefill", **changes: Any) -> Candidate:
    idle = Candidate(
        instance=InstanceId(name),
        role=role,
        layout=LAYOUT,
        free_blocks=5000,
        total_blocks=5000,
        active_sequences=0,
        queued_tokens=0,
        prefill_tokens_per_s=1000.0,
        link_speeds=FAST,
        step_tokens=2000,
        behind=float(role == "prefill"),
    )
    return replace(idle, **changes)


P0, P1, P2, D0 = candidate("p0"), candidate("p1"), candidate("p2"), candidate("d0", "decode")
LONG = Demand(num_tokens=8000, max_new_tokens=50)


def placed(*candidates: Candidate, demand: Demand = LONG, policy: PlacementPolicy = JOINT) -> Placement:
    placement = place(demand, ClusterView([*candidates, D0]), policy)
    assert isinstance(placement, Placement)
    return placement


def pair(*candidates: Candidate, demand: Demand = LONG, policy: PlacementPolicy = JOINT) -> tuple[str, str]:
    """(front, prefill)"""
    placement = placed(*candidates, demand=demand, policy=policy)
    assert placement.prefill is not None
    return placement.front.instance if placement.front is not None else "", placement.prefill.instance


def ends(*candidates: Candidate, demand: Demand = LONG) -> tuple[int, ...]:
    return placed(*candidates, demand=demand).part_ends


def test_they_take_turns_at_equal_parts_of_a_step_at_most() -> None:
    assert pair(P0, P1) == ("p0", "p1")
    assert ends(P0, P1) == (2000, 4000, 6000)
    assert ends(P0, replace(P1, step_tokens=1001)) == tuple(range(1000, 8000, 1000))
    assert ends(P0, P1, demand=replace(LONG, num_tokens=3003)) == (1500,)


def test_what_is_cached_belongs_to_the_first_part() -> None:
    assert ends(replace(P0, cached_tokens=4000), P1) == (6000,)


def test_who_is_slower_computes_less() -> None:
    slow = replace(P1, prefill_tokens_per_s=500.0)
    assert ends(P0, slow) == (1776, 2668, 4444, 5332, 7112)
    sizes = [2000 * 2 / 3, 2000 / 3]
    first, second = placed(P0, slow, demand=replace(LONG, num_tokens=2000)).part_ends[0], 2000
    assert [first, second - first] == pytest.approx(sizes, abs=BLOCK)


def test_who_was_measured_a_little_slower_computes_as_much() -> None:
    """Else parts of whole steps would become more and smaller ones."""
    assert ends(P0, replace(P1, prefill_tokens_per_s=700.0)) == (2000, 4000, 6000)
    assert ends(replace(P0, prefill_tokens_per_s=700.0), P1) == (2000, 4000, 6000)


def test_very_long_prompts_have_parts_of_several_steps() -> None:
    front, back, writer = (replace(one, free_blocks=100_000, total_blocks=100_000) for one in (P0, P1, D0))
    longest = replace(LONG, num_tokens=2000 * MAX_PARTS * 2)
    placement = place(longest, ClusterView([front, back, writer]), JOINT)
    assert isinstance(placement, Placement)
    found = placement.part_ends
    assert found == tuple(range(4000, longest.num_tokens, 4000)) and len(found) == MAX_PARTS - 1


def test_until_the_back_is_free_the_front_reads_alone() -> None:
    assert ends(P0, replace(P1, queued_tokens=2000)) == (3500, 5000, 6500)
    assert ends(P0, replace(P1, queued_tokens=1000)) == (2752, 4500, 6248)


def test_a_queue_of_the_front_is_waited_for_by_both() -> None:
    warm = replace(P0, cached_tokens=4000, queued_tokens=500)
    placement = placed(warm, P1)
    assert (placement.front, placement.part_ends) == (warm, (6000,))
    assert placement.predicted_ttft_s == pytest.approx(0.5 + 2.0 + 2.0 / LAYER_GROUPS + LATENCY_S, rel=1e-6)


def test_it_is_never_done_unless_it_is_asked_for() -> None:
    assert pair(P0, P1, policy=PlacementPolicy(disaggregation_min_tokens=0)) == ("", "p0")


def test_others_need_the_time_of_the_back_where_all_are_busy() -> None:
    """4 s of the back's make the first token 4 s earlier, less a group of layers: an eighth of 2 s."""
    worth = (4.0 - 2.0 / LAYER_GROUPS - LATENCY_S) / (4.0 * PRICE)
    enough = worth / (1.0 + worth)
    assert 0.6 < enough < 0.7
    for busy, front in ((0.0, "p0"), (enough - 0.01, "p0"), (enough + 0.01, ""), (1.0, "")):
        assert pair(replace(P0, busy=busy), replace(P1, busy=busy))[0] == front
    # It is the pool that counts, not the two.
    assert pair(replace(P0, busy=1.0), replace(P1, busy=1.0), P2, replace(P2, instance=InstanceId("p3")))[0] != ""


def test_a_small_gain_is_not_worth_two_copies_of_the_prompt() -> None:
    """Alone 8 s. A back that is free after 6.5 s computes 0.75 s of them."""
    alone_s = 8.0
    assert pair(P0, replace(P1, queued_tokens=int(alone_s * (1.0 - 2.5 * LEAST_GAIN) * 1000)))[0] == "p0"
    assert pair(P0, replace(P1, queued_tokens=int(alone_s * (1.0 - 1.5 * LEAST_GAIN) * 1000)))[0] == ""


def test_short_rests_are_read_by_one() -> None:
    assert pair(replace(P0, cached_tokens=7000), P1)[0] == "p0"
    assert pair(replace(P0, cached_tokens=7004), P1)[0] == ""


def test_the_one_with_the_best_prefix_is_the_front() -> None:
    assert pair(P0, replace(P1, cached_tokens=4000)) == ("p1", "p0")


def test_of_several_that_could_follow_the_first_to_be_free_is_taken_and_of_those_the_least_worn_cache() -> None:
    assert pair(P0, replace(P1, turnover=0.2, queued_tokens=100), replace(P2, turnover=0.3)) == ("p0", "p2")
    assert pair(P0, replace(P1, turnover=0.2), replace(P2, turnover=0.3)) == ("p0", "p1")
    assert pair(P0, P1, replace(P2, free_blocks=5001)) == ("p2", "p0")
    assert pair(replace(P0, cached_tokens=400), P1, replace(P2, free_blocks=5001))[1] == "p2"


@pytest.mark.parametrize(
    "lacks",
    [{"queued_tokens": 8000}, {"behind": 0.0}, {"step_tokens": 0}, {"free_blocks": 1999}],
)
def test_both_must_be_able_and_have_room(lacks: dict[str, Any]) -> None:
    assert pair(P0, replace(P1, **lacks))[0] == ""
    assert pair(P0, P1)[0] == "p0"


def test_the_chosen_one_must_be_able_too() -> None:
    warm = replace(P0, cached_tokens=6000)
    assert pair(warm, P1) == ("p0", "p1")
    assert pair(replace(warm, behind=0.0), P1) == ("", "p0")
    assert pair(replace(warm, free_blocks=1999), P1) == ("", "p0")


def test_other_layouts_and_those_that_failed_do_not_follow() -> None:
    other = replace(P1, layout=replace(LAYOUT, block_tokens=8))
    assert pair(P0, other)[0] == ""
    assert pair(P0, P1, demand=replace(LONG, avoid=frozenset([P1.instance]))) == ("", "p0")
    # All have failed: one is taken all the same, but nobody else with it.
    assert pair(P0, P1, demand=replace(LONG, avoid=frozenset([P0.instance, P1.instance, D0.instance])))[0] == ""


def test_one_that_has_more_of_the_prompt_than_the_front_does_not_follow() -> None:
    """It was not chosen for another reason: its cache is worn."""
    warm = replace(P1, cached_tokens=400, turnover=10.0)
    placement = placed(P0, warm)
    assert (placement.front, placement.prefill) == (None, P0)


def test_logprobs_of_the_prompt_need_one_reader() -> None:
    assert pair(P0, P1, demand=replace(LONG, needs_one_reader=True)) == ("", "p0")


def test_requests_of_one_token_are_read_by_two_as_well() -> None:
    placement = placed(P0, P1, demand=replace(LONG, max_new_tokens=1))
    assert (placement.decision, placement.decode, placement.front) == ("prefill_only", None, P0)


@pytest.mark.parametrize("name", ["least_loaded", "round_robin", "random"])
def test_policies_to_compare_with_do_without(name: PolicyName) -> None:
    policy = PlacementPolicy(disaggregation_min_tokens=0, name=name, joint_prefill_min_tokens=1000)
    assert pair(P0, P1, policy=policy)[0] == ""


def test_the_prediction_is_half_of_the_time_and_the_fronts_first_layers() -> None:
    placement = placed(P0, P1)
    assert placement.predicted_ttft_s == pytest.approx(4.0 + 2.0 / LAYER_GROUPS + LATENCY_S, rel=1e-6)


def test_between_parts_of_several_steps_a_group_of_layers_is_waited_for() -> None:
    """Parts of 4 s in steps of 2 s: one begins with the first layers of the other's last step, which is what its own
    first step needs."""
    parts = (4000, 8000, 12000)
    seconds = predicted_s(P0, P1, num_tokens=16000, ends=parts)
    assert seconds == pytest.approx(2.0 + 4.0 + 2 * (2.0 / LAYER_GROUPS) + 4.0 + 2.0 / LAYER_GROUPS - 0.0, abs=0.05)


def test_a_slow_link_takes_more_than_it_saves() -> None:
    """6,000 cached tokens and 1,000 computed ones take it 2 s; alone the chosen one needs 2 s."""
    cached = replace(P0, cached_tokens=6000)
    slow = replace(P1, link_speeds={P0.instance: 7000 * LAYOUT.token_bytes / 2.0})
    assert pair(replace(cached, link_speeds={}), slow)[0] == ""
    assert pair(replace(cached, link_speeds={}), replace(P1, link_speeds={P0.instance: 1e9}))[0] == "p0"
    # What is there already does not travel.
    placement = placed(replace(cached, link_speeds={}), replace(slow, cached_tokens=6000))
    assert placement.front is not None


def test_the_front_fetches_what_the_chosen_one_would_have() -> None:
    holder = candidate("d1", "decode", held_tokens=4000, link_speeds=FAST)
    placement = placed(P0, P1, holder)
    assert placement.front is not None and placement.front.pull is not None and placement.prefill is not None
    assert placement.prefill.pull is None
    assert placement.beginning.pull is not None and placement.beginning.pull.source == "d1"
    assert placement.part_ends == (6000,)
    assert placement.computing.instance == "p1"
    alone = placed(P0, P1, holder, policy=PlacementPolicy(disaggregation_min_tokens=0))
    assert alone.predicted_ttft_s - placement.predicted_ttft_s == pytest.approx(
        2.0 - 2.0 / LAYER_GROUPS - LATENCY_S, rel=1e-3
    )


def test_two_readers_may_be_quicker_than_a_unified_instance() -> None:
    unified = candidate("u0", "unified", prefill_tokens_per_s=1100.0)
    assert placed(P0, P1, unified).decision == "disaggregated"
    assert placed(P0, P1, unified, policy=PlacementPolicy(disaggregation_min_tokens=0)).decision == "unified"


BLOCKS = st.integers(0, 600).map(lambda blocks: blocks * BLOCK)
CANDIDATES = st.builds(
    candidate,
    st.sampled_from(["p0", "p1", "p2", "p3"]),
    cached_tokens=BLOCKS,
    host_cached_tokens=BLOCKS,
    queued_tokens=st.sampled_from([0, 0, 500, 5000]),
    busy=st.sampled_from([0.0, 0.5, 1.0]),
    free_blocks=st.integers(0, 2500),
    turnover=st.floats(0, 3),
    step_tokens=st.integers(0, 3000),
    prefill_tokens_per_s=st.sampled_from([0.0, 300.0, 1000.0]),
    behind=st.sampled_from([0.0, 1.0, 1.5]),
    held_tokens=BLOCKS,
    link_speeds=st.sampled_from([{}, FAST]),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(CANDIDATES, min_size=1, max_size=4, unique_by=lambda c: c.instance),
    st.integers(1, 9000),
    st.integers(1, 4000),
    st.frozensets(st.sampled_from([P0.instance, P1.instance, D0.instance])),
)
def test_whatever_there_is_two_readers_are_two_and_share_the_prompt(
    candidates: list[Candidate], num_tokens: int, least: int, avoid: frozenset[InstanceId]
) -> None:
    demand = Demand(num_tokens=num_tokens, max_new_tokens=9, avoid=avoid)
    policy = PlacementPolicy(disaggregation_min_tokens=0, joint_prefill_min_tokens=least)
    placement = placed(*candidates, demand=demand, policy=policy)
    alone = placed(*candidates, demand=demand, policy=PlacementPolicy(disaggregation_min_tokens=0))
    assert placement.predicted_ttft_s <= alone.predicted_ttft_s
    if placement.front is None:
        assert placement == alone
        return
    front, back = placement.front, placement.prefill
    assert back is not None and front == alone.prefill
    assert placement.predicted_ttft_s <= (1.0 - LEAST_GAIN) * alone.predicted_ttft_s
    assert front.instance != back.instance and not avoid & {front.instance, back.instance}
    assert front.uncached(num_tokens) >= least
    cached = front.own_tokens + (front.pull.brings if front.pull is not None else 0)
    parts = (cached, *placement.part_ends, num_tokens)
    computed = [end - start for start, end in itertools.pairwise(parts)]
    assert len(computed) % 2 == 0 and 2 <= len(computed) <= MAX_PARTS
    assert min(computed) >= 1 and all(end % BLOCK == 0 for end in placement.part_ends)
    step = min(front.step_tokens, back.step_tokens)
    assert max(computed[1:-1], default=0) <= step + BLOCK or len(computed) == MAX_PARTS
    assert back.own_tokens <= cached
    assert num_tokens <= back.free_blocks * BLOCK and num_tokens <= front.free_blocks * BLOCK
