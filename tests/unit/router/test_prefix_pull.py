"""When a cached prefix is fetched from another instance, and from which."""

from msgspec.structs import replace

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import InstanceId
from baton_serve.services.router.placement.policy import (
    Candidate,
    ClusterView,
    Demand,
    NoCapacity,
    Placement,
    PlacementPolicy,
    place,
)
from baton_serve.services.router.placement.prefix_pull import (
    LOCAL_BYTES_PER_S,
    PULL_LATENCY_S,
    best_holders,
    link_speed,
    plan_pull,
)

LAYOUT = KVLayout(fingerprint="f", num_layers=4, num_kv_heads=2, block_tokens=16, head_dim=64, dtype="bfloat16")


def candidate(instance: str, *, held: int = 0, cached: int | None = None, rate: float = 5000.0) -> Candidate:
    return Candidate(
        instance=InstanceId(instance),
        role="decode" if instance.startswith("d") else "prefill",
        layout=LAYOUT,
        free_blocks=1000,
        total_blocks=1000,
        active_sequences=0,
        queued_tokens=0.0,
        prefill_tokens_per_s=rate,
        cached_tokens=held if cached is None else cached,
        machine="here",
        held_tokens=held,
    )


P0, P1, D0 = candidate("p0"), candidate("p1", held=3200), candidate("d0", held=4000)


def test_the_longest_prefix_wins_at_equal_speed() -> None:
    plan = plan_pull(P0, [P1, D0], num_tokens=5000)
    assert plan is not None
    assert (plan.source, plan.num_tokens, plan.missing_tokens) == ("d0", 4000, 4000)
    assert plan.seconds == PULL_LATENCY_S + 4000 * LAYOUT.token_bytes / LOCAL_BYTES_PER_S


def test_only_what_is_missing_is_paid_for() -> None:
    plan = plan_pull(replace(P0, cached_tokens=3840), [D0], num_tokens=5000)
    assert plan is not None
    assert (plan.num_tokens, plan.missing_tokens) == (4000, 160)
    assert plan_pull(replace(P0, cached_tokens=3200, host_cached_tokens=800), [D0], num_tokens=5000) is None


def test_the_last_token_is_always_computed() -> None:
    plan = plan_pull(P0, [D0], num_tokens=3200)
    assert plan is not None and plan.num_tokens == 3184


def test_a_slow_link_a_fast_instance_or_few_tokens_are_not_worth_it() -> None:
    assert plan_pull(replace(P0, link_speeds={D0.instance: 5e6}), [D0], num_tokens=5000) is None
    assert plan_pull(replace(P0, prefill_tokens_per_s=1e7), [D0], num_tokens=5000) is None
    assert plan_pull(replace(P0, cached_tokens=3984), [D0], num_tokens=5000) is None
    assert plan_pull(P0, [D0], num_tokens=5000, policy="never") is None


def test_a_link_is_as_fast_as_the_handoffs_over_it_or_as_others() -> None:
    handed = replace(D0, link_speeds={P0.instance: 3e9, P1.instance: 1e9})
    assert link_speed(P0, handed) == 3e9
    assert link_speed(candidate("p2"), handed) == 1e9
    assert link_speed(P0, P1) == LOCAL_BYTES_PER_S


def test_a_faster_link_may_beat_a_longer_prefix() -> None:
    reader = replace(P0, link_speeds={D0.instance: 1.5e7, P1.instance: 1e10})
    plan = plan_pull(reader, [P1, D0], num_tokens=5000)
    assert plan is not None and plan.source == "p1"


def test_always_takes_what_there_is_but_never_from_itself() -> None:
    slow = replace(P0, link_speeds={D0.instance: 1.0})
    assert plan_pull(slow, [D0], num_tokens=5000, policy="always") is not None
    assert plan_pull(D0, [D0], num_tokens=5000, policy="always") is None


def test_instances_of_another_layout_are_not_asked() -> None:
    other = KVLayout(fingerprint="f", num_layers=4, num_kv_heads=2, block_tokens=32, head_dim=64, dtype="bfloat16")
    assert plan_pull(P0, [replace(D0, layout=other)], num_tokens=5000, policy="always") is None


def test_guesses_are_not_asked_for() -> None:
    assert best_holders([candidate("p2", cached=640), D0]) == [D0]


def placed(*candidates: Candidate, policy: PlacementPolicy | None = None, tokens: int = 4100) -> Placement:
    policy = policy or PlacementPolicy(disaggregation_min_tokens=32)
    found = place(Demand(num_tokens=tokens, max_new_tokens=9), ClusterView(candidates), policy)
    assert not isinstance(found, NoCapacity)
    return found


def test_prefill_fetches_from_decode_what_it_lacks() -> None:
    placement = placed(P0, D0)
    assert placement.prefill is not None and placement.prefill.pull is not None
    assert placement.prefill.pull.source == "d0"
    assert placement.predicted_ttft_s < placed(P0, candidate("d0")).predicted_ttft_s


def test_a_queue_is_escaped_with_the_prefix() -> None:
    busy = replace(P1, queued_tokens=50_000.0)
    placement = placed(P0, busy, candidate("d0"))
    assert placement.prefill is not None and placement.prefill.instance == "p0"
    assert placement.prefill.pull is not None and placement.prefill.pull.source == "p1"


def test_policies_that_look_at_no_cache_fetch_nothing() -> None:
    for policy in (PlacementPolicy(name="round_robin"), PlacementPolicy(pull="never")):
        placement = placed(P0, D0, policy=policy, tokens=5000)
        assert placement.prefill is not None and placement.prefill.pull is None


def test_one_that_failed_this_request_is_not_asked() -> None:
    demand = Demand(num_tokens=4100, max_new_tokens=9, avoided=frozenset([P1.instance]))
    found = place(demand, ClusterView([P0, P1, candidate("d0")]), PlacementPolicy())
    assert isinstance(found, Placement) and found.prefill is not None
    assert (found.prefill.instance, found.prefill.pull) == ("p0", None)
