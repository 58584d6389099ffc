"""When two prefill instances read a prompt together, which, and how much of it each."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from contracts.identity import InstanceId
from contracts.instance import Role
from services.router.joint import LAYER_GROUPS
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
        reads_behind=role == "prefill",
    )
    return replace(idle, **changes)


P0, P1, P2, D0 = candidate("p0"), candidate("p1"), candidate("p2"), candidate("d0", "decode")
LONG = Demand(num_tokens=8000, max_new_tokens=50)


def placed(*candidates: Candidate, demand: Demand = LONG, policy: PlacementPolicy = JOINT) -> Placement:
    placement = place(demand, ClusterView([*candidates, D0]), policy)
    assert isinstance(placement, Placement)
    return placement


def pair(*candidates: Candidate, demand: Demand = LONG, policy: PlacementPolicy = JOINT) -> tuple[str, str, int]:
    """(front, prefill, front_tokens)"""
    placement = placed(*candidates, demand=demand, policy=policy)
    assert placement.prefill is not None
    front = placement.front.instance if placement.front is not None else ""
    return front, placement.prefill.instance, placement.front_tokens


def test_the_front_reads_one_step_and_the_other_the_rest() -> None:
    assert pair(P0, P1) == ("p0", "p1", 2000)
    assert pair(P0, replace(P1, step_tokens=1001)) == ("p0", "p1", 1000)


def test_the_front_reads_at_most_half_of_what_is_not_cached() -> None:
    assert pair(P0, P1, demand=replace(LONG, num_tokens=3003)) == ("p0", "p1", 1500)
    cached = replace(P0, cached_tokens=6000)
    assert pair(cached, P1) == ("p0", "p1", 7000)


def test_it_is_never_done_unless_it_is_asked_for() -> None:
    assert pair(P0, P1, policy=PlacementPolicy(disaggregation_min_tokens=0)) == ("", "p0", 0)


def test_short_rests_are_read_by_one() -> None:
    assert pair(replace(P0, cached_tokens=7000), P1)[0] == "p0"
    assert pair(replace(P0, cached_tokens=7004), P1)[0] == ""


def test_the_one_with_the_best_prefix_is_the_front() -> None:
    assert pair(P0, replace(P1, cached_tokens=4000)) == ("p1", "p0", 6000)


def test_of_several_that_could_follow_the_least_worn_cache_is_taken() -> None:
    assert pair(P0, replace(P1, turnover=0.2), replace(P2, turnover=0.3)) == ("p0", "p1", 2000)
    assert pair(P0, P1, replace(P2, free_blocks=5001))[:2] == ("p2", "p0")
    assert pair(replace(P0, cached_tokens=400), P1, replace(P2, free_blocks=5001))[1] == "p2"


@pytest.mark.parametrize(
    "lacks",
    [{"queued_tokens": 1}, {"reads_behind": False}, {"step_tokens": 0}, {"free_blocks": 1999}],
)
def test_both_must_be_idle_able_and_have_room(lacks: dict[str, Any]) -> None:
    assert pair(P0, replace(P1, **lacks))[0] == ""
    assert pair(P0, P1)[0] == "p0"


def test_the_chosen_one_must_be_free_too() -> None:
    warm = replace(P0, cached_tokens=6000)
    assert pair(replace(warm, queued_tokens=1), P1) == ("", "p0", 0)
    assert pair(replace(warm, reads_behind=False), P1) == ("", "p0", 0)
    assert pair(replace(warm, free_blocks=1749), P1) == ("", "p0", 0)  # 7,000 tokens are 1,750 blocks


def test_other_layouts_and_those_that_failed_do_not_follow() -> None:
    other = replace(P1, layout=replace(LAYOUT, block_tokens=8))
    assert pair(P0, other)[0] == ""
    assert pair(P0, P1, demand=replace(LONG, avoid=frozenset([P1.instance]))) == ("", "p0", 0)
    # All have failed: one is taken all the same, but nobody else with it.
    assert pair(P0, P1, demand=replace(LONG, avoid=frozenset([P0.instance, P1.instance, D0.instance])))[0] == ""


def test_one_that_has_more_of_the_prompt_than_the_front_does_not_follow() -> None:
    """It was not chosen for another reason: its cache is worn."""
    warm = replace(P1, cached_tokens=400, turnover=10.0)
    placement = placed(P0, warm)
    assert (placement.front, placement.prefill) == (None, P0)


def test_logprobs_of_the_prompt_need_one_reader() -> None:
    assert pair(P0, P1, demand=replace(LONG, needs_one_reader=True)) == ("", "p0", 0)


def test_requests_of_one_token_are_read_by_two_as_well() -> None:
    placement = placed(P0, P1, demand=replace(LONG, max_new_tokens=1))
    assert (placement.decision, placement.decode, placement.front) == ("prefill_only", None, P0)


@pytest.mark.parametrize("name", ["least_loaded", "round_robin", "random"])
def test_policies_to_compare_with_do_without(name: PolicyName) -> None:
    policy = PlacementPolicy(disaggregation_min_tokens=0, name=name, joint_prefill_min_tokens=1000)
    assert pair(P0, P1, policy=policy)[0] == ""


def test_the_prediction_is_what_the_back_computes_and_the_fronts_first_layers() -> None:
    placement = placed(P0, P1)
    assert placement.predicted_ttft_s == pytest.approx(6.0 + 2.0 / LAYER_GROUPS + LATENCY_S, rel=1e-6)


def test_a_slow_front_is_waited_for() -> None:
    """It was chosen for its prefix. Its 2,000 tokens take 4 s; the back's only step, of 2 s, ends an eighth later."""
    slow = replace(P0, prefill_tokens_per_s=500.0, cached_tokens=4000)
    placement = placed(slow, replace(P1, cached_tokens=0))
    assert placement.front == slow
    assert placement.predicted_ttft_s == pytest.approx(4.0 + 2.0 / LAYER_GROUPS + LATENCY_S, rel=1e-3)


def test_a_slow_link_takes_more_than_it_saves() -> None:
    """6,000 cached tokens and 1,000 computed ones take it 2 s; alone the chosen one needs 2 s, together 1 s."""
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
    assert placement.front_tokens == 6000
    assert placement.computing.instance == "p1"
    alone = placed(P0, P1, holder, policy=PlacementPolicy(disaggregation_min_tokens=0))
    assert alone.predicted_ttft_s - placement.predicted_ttft_s == pytest.approx(2.0 * 7 / 8 - LATENCY_S, rel=1e-3)


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
    queued_tokens=st.sampled_from([0, 0, 500]),
    free_blocks=st.integers(0, 2500),
    turnover=st.floats(0, 3),
    step_tokens=st.integers(0, 3000),
    prefill_tokens_per_s=st.sampled_from([0.0, 300.0, 1000.0]),
    reads_behind=st.booleans(),
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
def test_whatever_there_is_two_readers_are_two_and_idle_and_share_the_prompt(
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
    assert front.instance != back.instance and not avoid & {front.instance, back.instance}
    assert not front.queued_tokens and not back.queued_tokens
    assert front.uncached(num_tokens) >= least
    cached = front.own_tokens + (front.pull.brings if front.pull is not None else 0)
    computed = placement.front_tokens - cached
    assert placement.front_tokens % BLOCK == 0
    assert BLOCK <= computed <= min(front.step_tokens, back.step_tokens)
    assert computed <= num_tokens - placement.front_tokens
    assert back.own_tokens <= cached and num_tokens <= back.free_blocks * BLOCK
