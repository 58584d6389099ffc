"""The choice of instances for a request, over tables of clusters."""

import itertools
from typing import Any

import msgspec
from msgspec.structs import replace

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import Role
from baton_serve.services.router.placement.policy import (
    Candidate,
    ClusterView,
    Demand,
    NoCapacity,
    Placement,
    PlacementPolicy,
    PolicyName,
    place,
)
from tests.unit.router.fakes import LAYOUT

ALWAYS = PlacementPolicy(disaggregation_min_tokens=0)


def candidate(name: str, role: Role, **changes: Any) -> Candidate:
    idle = Candidate(
        instance=InstanceId(name),
        role=role,
        layout=LAYOUT,
        free_blocks=1000,
        total_blocks=1000,
        active_sequences=0,
        queued_tokens=0,
        prefill_tokens_per_s=1000.0,
    )
    return replace(idle, **changes)


def chosen(demand: Demand, *candidates: Candidate, policy: PlacementPolicy = ALWAYS) -> tuple[str, str, str]:
    """Return (decision, prefill, decode) of the placement."""
    placement = place(demand, ClusterView(candidates), policy)
    assert isinstance(placement, Placement), placement
    prefill, decode = placement.prefill, placement.decode
    return placement.decision, prefill.instance if prefill else "", decode.instance if decode else ""


def refused(demand: Demand, *candidates: Candidate) -> NoCapacity:
    placement = place(demand, ClusterView(candidates), ALWAYS)
    assert isinstance(placement, NoCapacity)
    return placement


LONG = Demand(num_tokens=400, max_new_tokens=50)
P0, P1 = candidate("p0", "prefill"), candidate("p1", "prefill")
D0, D1 = candidate("d0", "decode"), candidate("d1", "decode")
U0 = candidate("u0", "unified")


def test_ties_are_broken_by_name() -> None:
    assert chosen(LONG, P1, P0, D1, D0) == ("disaggregated", "p0", "d0")


def test_a_warm_prefix_beats_a_shorter_queue() -> None:
    warm = replace(P1, cached_tokens=300, queued_tokens=200)
    assert chosen(LONG, P0, warm, D0)[1] == "p1"


def test_a_hot_prefix_does_not_melt_one_instance() -> None:
    hot = replace(P1, cached_tokens=300, queued_tokens=301)
    idle = [candidate(f"p{i}", "prefill") for i in range(2, 9)]
    assert chosen(LONG, P0, *idle, replace(hot, queued_tokens=400), D0)[1] == "p0"
    assert chosen(LONG, P0, replace(hot, queued_tokens=1501), D0)[1] == "p0"  # whatever the load: five times


def test_under_load_a_cached_prefix_is_worth_a_longer_queue() -> None:
    warm = replace(P1, cached_tokens=300)
    assert chosen(LONG, P0, replace(warm, queued_tokens=301), D0)[1] == "p1"
    queued = replace(P0, queued_tokens=4000)
    assert chosen(LONG, queued, replace(warm, queued_tokens=5400), D0)[1] == "p1"
    assert chosen(LONG, queued, replace(warm, queued_tokens=5600), D0)[1] == "p0"


def test_a_faster_instance_takes_more() -> None:
    fast = replace(P1, prefill_tokens_per_s=4000.0, queued_tokens=1000)
    assert chosen(LONG, P0, fast, D0)[1] == "p1"


def test_the_host_tier_counts_for_less_than_the_device() -> None:
    on_host, on_device = replace(P0, host_cached_tokens=300), replace(P1, cached_tokens=300)
    assert chosen(LONG, on_host, on_device, D0)[1] == "p1"
    assert chosen(LONG, replace(P1), on_host, D0)[1] == "p0"


def test_decode_goes_where_fewest_sequences_run() -> None:
    assert chosen(LONG, P0, replace(D0, active_sequences=3), replace(D1, active_sequences=2))[2] == "d1"


def test_a_cached_prefix_decides_only_between_decodes_that_are_equally_busy() -> None:
    assert chosen(LONG, P0, D0, replace(D1, cached_tokens=396))[2] == "d1"
    assert chosen(LONG, P0, D0, replace(D1, cached_tokens=396, active_sequences=1))[2] == "d0"


def test_a_decode_without_room_is_the_last_choice() -> None:
    assert chosen(LONG, P0, replace(D0, free_blocks=99), replace(D1, active_sequences=50))[2] == "d1"
    assert chosen(LONG, P0, replace(D0, free_blocks=99))[2] == "d0"


def test_a_short_uncached_prompt_stays_on_decode() -> None:
    policy = PlacementPolicy(disaggregation_min_tokens=32)
    short = Demand(num_tokens=31, max_new_tokens=50)
    assert chosen(short, P0, D0, policy=policy) == ("decode_only", "", "d0")
    assert chosen(Demand(num_tokens=32, max_new_tokens=50), P0, D0, policy=policy)[0] == "disaggregated"
    assert chosen(LONG, P0, replace(D0, cached_tokens=380), policy=policy)[0] == "decode_only"
    assert chosen(short, P0, D0)[0] == "disaggregated"


def test_a_prompt_bypasses_a_busy_prefill_if_all_decoding_sequences_have_an_itl_slo() -> None:
    """400 tokens take the decode instance 0.8 s beside its decoding sequences, and a prefill instance 0.4 s."""
    with_slo, decode = replace(LONG, itl_s=0.6), replace(D0, spare_tokens_per_s=500.0)
    assert chosen(with_slo, replace(P0, queued_tokens=401), decode) == ("decode_only", "", "d0")
    assert chosen(with_slo, replace(P0, queued_tokens=399), decode)[0] == "disaggregated", "no faster there"
    busy = replace(P0, queued_tokens=1000)
    assert chosen(with_slo, busy, replace(decode, queued_tokens=301))[0] == "disaggregated", "others are read there"
    assert chosen(with_slo, busy, D0)[0] == "disaggregated", "it would miss an SLO"
    assert chosen(LONG, busy, decode)[0] == "disaggregated", "the request has no ITL SLO"
    assert chosen(with_slo, replace(busy, cached_tokens=390), decode)[0] == "decode_only", "the queue is as long"
    assert chosen(with_slo, busy, replace(decode, cached_tokens=200, queued_tokens=301))[0] == "decode_only"


def test_decoding_sequences_are_not_slowed_down_if_prefill_meets_the_ttft_slo() -> None:
    """The first token takes 1.4 s with the prefill instance, and 0.8 s beside the decoding sequences."""
    busy, decode = replace(P0, queued_tokens=1000), replace(D0, spare_tokens_per_s=500.0)
    for ttft_s, decision in ((None, "decode_only"), (1.5, "decode_only"), (1.6, "disaggregated")):
        assert chosen(replace(LONG, itl_s=0.6, ttft_s=ttft_s), busy, decode)[0] == decision


def test_the_alternative_placement_is_reported() -> None:
    with_slo, decode = replace(LONG, itl_s=0.6), replace(D0, spare_tokens_per_s=500.0)
    for queued, here_s, other_s in ((1000, 0.8, 1.4), (100, 0.5, 0.8)):
        placement = place(with_slo, ClusterView([replace(P0, queued_tokens=queued), decode]), ALWAYS)
        assert isinstance(placement, Placement)
        assert (placement.predicted_ttft_s, placement.other_ttft_s) == (here_s, other_s)
    placement = place(LONG, ClusterView([P0, decode]), ALWAYS)
    assert isinstance(placement, Placement) and placement.other_ttft_s == 0.0


def test_an_empty_pool_leaves_the_work_to_the_other() -> None:
    assert chosen(LONG, D0) == ("decode_only", "", "d0")
    assert chosen(LONG, U0) == ("unified", "", "u0")
    assert "decode" in refused(LONG, P0).message
    assert refused(LONG).reason == "empty_pool"


def fallback(demand: Demand, *candidates: Candidate) -> Placement | NoCapacity:
    """Place where prefill instances may generate if the other pools are empty."""
    return place(demand, ClusterView(candidates, allows_prefill_fallback=True), ALWAYS)


G0, G1 = replace(P0, can_generate=True), replace(P1, can_generate=True)


def test_a_prefill_instance_generates_only_without_any_decode_or_unified_instance() -> None:
    alone = fallback(LONG, G0)
    assert isinstance(alone, Placement) and alone.prefill is None and alone.decode is not None
    assert (alone.decision, alone.decode.instance, alone.final_worker.instance) == ("prefill_fallback", "p0", "p0")
    assert not alone.handoff_is_due
    for other, decision in ((D0, "disaggregated"), (U0, "disaggregated")):
        # A decode instance that failed this request once is ready, and so it comes before any prefill instance.
        placed = fallback(replace(LONG, avoided=frozenset({other.instance})), G0, other)
        assert isinstance(placed, Placement)
        assert placed.decision == ("unified" if other is U0 else decision)
    assert refused(LONG, G0).reason == "empty_pool", "it is not allowed"
    assert isinstance(fallback(LONG, P0), NoCapacity), "an instance of an earlier version cannot generate"


def test_the_fallback_takes_the_prefill_instance_with_the_smallest_predicted_ttft() -> None:
    def on(demand: Demand, *candidates: Candidate) -> str:
        placed = fallback(demand, *candidates)
        assert isinstance(placed, Placement) and placed.decode is not None
        return placed.decode.instance

    assert on(LONG, G0, replace(G1, cached_tokens=300)) == "p1"
    assert on(LONG, P0, replace(G1, queued_tokens=5000)) == "p1", "the other one cannot generate"
    assert on(replace(LONG, avoided=frozenset({G0.instance})), G0, replace(G1, queued_tokens=5000)) == "p1"
    assert on(replace(LONG, avoided=frozenset({G0.instance})), G0) == "p0"
    other = msgspec.structs.replace(LAYOUT, fingerprint="new weights")
    assert on(LONG, replace(G0, layout=other, queued_tokens=500), G1) == "p1"
    assert on(replace(LONG, has_images=True), G0) == "p0", "it has the vision tower, and hands nothing off"


def test_the_fallback_changes_nothing_for_requests_that_no_instance_can_hold_or_that_need_no_decode() -> None:
    too_long = fallback(Demand(num_tokens=4000, max_new_tokens=9), G0)
    assert isinstance(too_long, NoCapacity) and too_long.reason == "never_fits"
    one = fallback(Demand(num_tokens=400, max_new_tokens=1), G0)
    assert isinstance(one, Placement) and one.decision == "prefill_only"


def test_one_token_is_prefill_work() -> None:
    one = Demand(num_tokens=400, max_new_tokens=1)
    assert chosen(one, P0, D0) == ("prefill_only", "p0", "")
    assert chosen(one, P0) == ("prefill_only", "p0", "")
    assert chosen(one, D0)[0] == "decode_only"


def test_unified_instances_compete_by_predicted_time() -> None:
    assert chosen(LONG, P0, D0, U0)[0] == "disaggregated"
    assert chosen(LONG, replace(P0, queued_tokens=100), D0, U0) == ("unified", "", "u0")


def test_other_weights_are_never_paired() -> None:
    other = msgspec.structs.replace(LAYOUT, fingerprint="new weights")
    new_p, new_d = replace(P0, layout=other), replace(D0, layout=other, active_sequences=9)
    assert chosen(LONG, new_p, D1) == ("decode_only", "", "d1")
    assert chosen(LONG, new_p, D1, new_d)[1:] in (("p0", "d0"), ("", "d1"))
    assert refused(LONG, new_p, replace(P1)).reason == "empty_pool"


def test_layouts_that_can_be_converted_are_paired_and_others_are_not() -> None:
    large = msgspec.structs.replace(LAYOUT, block_tokens=16, dtype="int8")
    assert chosen(LONG, P0, replace(D0, layout=large)) == ("disaggregated", "p0", "d0")
    assert chosen(LONG, replace(P0, layout=large), D0) == ("disaggregated", "p0", "d0")
    rounded_again = msgspec.structs.replace(LAYOUT, dtype="fp8_e4m3")
    assert chosen(LONG, replace(P0, layout=large), replace(D0, layout=rounded_again)) == ("decode_only", "", "d0")
    assert chosen(Demand(num_tokens=400, max_new_tokens=1), replace(P0, layout=large), D0)[0] == "prefill_only"


def test_instances_that_failed_are_avoided_if_there_are_others() -> None:
    wary = replace(LONG, avoided=frozenset({InstanceId("p0"), InstanceId("d0")}))
    assert chosen(wary, P0, P1, D0, D1) == ("disaggregated", "p1", "d1")
    assert chosen(wary, P0, D0) == ("disaggregated", "p0", "d0")


def test_prompts_that_never_fit_are_distinguished_from_prompts_that_do_not_fit_now() -> None:
    tiny = replace(D0, total_blocks=100, free_blocks=100)
    never = refused(LONG, tiny)
    assert never.reason == "never_fits"
    assert "401" in never.message and "400" in never.message
    assert chosen(LONG, P0, replace(tiny, total_blocks=101, free_blocks=0))[2] == "d0"


def test_an_instance_that_has_measured_nothing_is_usable() -> None:
    assert chosen(LONG, replace(P0, prefill_tokens_per_s=0.0), D0)[1] == "p0"


def test_the_shortest_queue_of_the_pool_is_reported() -> None:
    cluster = ClusterView([replace(P0, cached_tokens=390, queued_tokens=200), replace(P1, queued_tokens=100), D0, U0])
    placement = place(LONG, cluster, ALWAYS)
    assert isinstance(placement, Placement)
    assert (placement.final_worker.queue_s, placement.shortest_queue_s) == (0.2, 0.1)


def test_the_prediction_is_queue_plus_what_is_not_cached() -> None:
    placement = place(LONG, ClusterView([replace(P0, queued_tokens=100, cached_tokens=300), D0]), ALWAYS)
    assert isinstance(placement, Placement)
    assert placement.predicted_ttft_s == 0.2


def picks(policy: PolicyName, turns: range) -> list[str]:
    """Prefill instances chosen among three, of which one has the prefix and one an empty queue."""
    cluster = [
        replace(P0, cached_tokens=300, queued_tokens=50),
        P1,
        candidate("p2", "prefill", queued_tokens=500),
        D0,
    ]
    chosen_policy = PlacementPolicy(disaggregation_min_tokens=0, name=policy)
    placements = [place(LONG, ClusterView(cluster, turn), chosen_policy) for turn in turns]
    return [p.prefill.instance for p in placements if isinstance(p, Placement) and p.prefill is not None]


def test_least_loaded_sees_queues_and_no_caches() -> None:
    assert picks("prefix", range(2)) == ["p0", "p0"]
    assert picks("least_loaded", range(2)) == ["p1", "p1"]


def test_round_robin_takes_turns() -> None:
    assert picks("round_robin", range(3, 7)) == ["p0", "p1", "p2", "p0"]


def test_random_is_even_and_repeatable() -> None:
    drawn = picks("random", range(3000))
    assert drawn == picks("random", range(3000))
    assert all(900 < drawn.count(name) < 1100 for name in ("p0", "p1", "p2"))
    pairs = set(itertools.pairwise(drawn))
    assert len(pairs) == 9


def test_a_common_prefix_does_not_wear_out_one_cache_while_others_are_hardly_used() -> None:
    system_prompt = replace(P0, cached_tokens=40, turnover=3.0)
    assert chosen(LONG, system_prompt, replace(P1, turnover=0.1), D0)[1] == "p1"
    conversation = replace(system_prompt, cached_tokens=360)
    assert chosen(LONG, conversation, replace(P1, turnover=0.1), D0)[1] == "p0"
