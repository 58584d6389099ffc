"""A cluster with both pools in which nothing is handed off is shown by /health and the metrics of the router."""

from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import Role
from baton_serve.services.router.placement.policy import (
    Candidate,
    ClusterView,
    Demand,
    Placement,
    PlacementPolicy,
    place,
)
from baton_serve.services.router.requests.handoff_counts import HandoffCounts, HandoffStats, joined, warning_of
from baton_serve.services.router.requests.metrics import RouterMetrics
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import LAYOUT, record

OTHER_WEIGHTS = replace(LAYOUT, fingerprint="other")
LONG = Demand(num_tokens=400, max_new_tokens=50)


def candidate(role: Role, **changes: Any) -> Candidate:
    idle = Candidate(
        instance=InstanceId(f"{role}-0"),
        role=role,
        layout=LAYOUT,
        free_blocks=1000,
        total_blocks=1000,
        active_sequences=0,
        queued_tokens=0,
        prefill_tokens_per_s=1000.0,
    )
    return replace(idle, **changes)


def placed(demand: Demand, *candidates: Candidate) -> Placement:
    placement = place(demand, ClusterView(candidates), PlacementPolicy(disaggregation_min_tokens=32))
    assert isinstance(placement, Placement)
    return placement


def test_a_handoff_is_due_where_it_happens_and_where_it_is_impossible() -> None:
    prefill, decode = candidate("prefill"), candidate("decode")
    assert placed(LONG, prefill, decode).handoff_is_due
    strange = candidate("prefill", layout=OTHER_WEIGHTS)
    missed = placed(LONG, strange, decode)
    assert missed.decision == "decode_only" and missed.handoff_is_due
    assert placed(LONG, candidate("prefill", total_blocks=10), decode).handoff_is_due, "too small for the prompt"


def test_no_handoff_is_due_for_requests_that_one_instance_should_serve() -> None:
    decode, strange = candidate("decode"), candidate("prefill", layout=OTHER_WEIGHTS)
    assert not placed(replace(LONG, num_tokens=20), strange, decode).handoff_is_due, "too short"
    assert not placed(LONG, strange, replace(decode, cached_tokens=390)).handoff_is_due, "nearly all of it is cached"
    assert not placed(replace(LONG, max_new_tokens=1), strange, decode).handoff_is_due, "the first token is the last"
    assert not placed(LONG, decode).handoff_is_due, "there is no prefill pool"
    fast = replace(decode, spare_tokens_per_s=1e6)
    alone = placed(replace(LONG, itl_s=1.0), candidate("prefill"), fast)
    assert alone.decision == "decode_only" and not alone.handoff_is_due, "faster on the decode instance"
    unified = candidate("unified", prefill_tokens_per_s=1e6)
    alone = placed(LONG, candidate("prefill"), decode, unified)
    assert alone.decision == "unified" and not alone.handoff_is_due, "faster on the unified instance"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_warning_needs_a_whole_minute_with_due_handoffs_and_none_completed() -> None:
    clock = Clock()
    counts = HandoffCounts(RouterMetrics(CollectorRegistry(), "m"), clock=clock)
    assert counts.stats() == HandoffStats()
    for _ in range(6):
        assert counts.stats().warning is None
        counts.add_due()
        clock.now += 10
    assert counts.stats() == HandoffStats(due_last_minute=5, completed_last_minute=0, stalled_s=60.0)
    assert "no KV handoff was completed in the last 60 s, though 5 were due" in str(counts.stats().warning)
    counts.add_completed()
    assert counts.stats() == HandoffStats(due_last_minute=5, completed_last_minute=1)


def test_an_idle_cluster_is_not_a_broken_one() -> None:
    clock = Clock()
    counts = HandoffCounts(RouterMetrics(CollectorRegistry(), "m"), clock=clock)
    counts.add_due()
    clock.now += 600
    assert counts.stats() == HandoffStats()
    counts.add_due()
    assert counts.stats() == HandoffStats(due_last_minute=1) and counts.stats().warning is None


def test_processes_are_added_up_and_models_are_not() -> None:
    stalled, working = HandoffStats(due_last_minute=3, stalled_s=80.0), HandoffStats(completed_last_minute=1)
    assert warning_of(joined([{"a": stalled}, {"a": working}])) is None
    both = joined([{"a": stalled, "b": working}, {"a": stalled}])
    assert both == {"a": HandoffStats(due_last_minute=6, stalled_s=80.0), "b": working}
    assert str(warning_of(both)).startswith("model a: no KV handoff was completed in the last 80 s, though 6 were due")


async def totals(router: Router) -> tuple[float, float]:
    text = (await router.http.get("/metrics")).text
    values = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("baton:handoffs_")]
    found = {name.partition("{")[0]: float(value) for name, value in values}
    return found["baton:handoffs_due_total"], found["baton:handoffs_completed_total"]


def test_a_handoff_is_counted_as_due_and_as_completed(serve: Serve) -> None:
    async def handed_off(router: Router) -> None:
        assert await totals(router) == (0, 0)
        await router.complete(prompt=[104] * 40, max_tokens=4)
        await router.complete(prompt=[105] * 40, max_tokens=1)
        assert await totals(router) == (1, 1)
        health = (await router.http.get("/health")).json()
        stats = {"due_last_minute": 1, "completed_last_minute": 1, "stalled_s": 0.0}
        assert (health["handoffs"], health["warning"]) == ({"tiny": stats}, None)

    serve(handed_off)


def test_health_warns_of_pools_that_cannot_exchange_blocks(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def apart(router: Router) -> None:
        router.fakes.add(record("prefill-0", "prefill", layout=OTHER_WEIGHTS))
        await settle()
        await router.complete(prompt=[104] * 3, max_tokens=4)
        assert await totals(router) == (0, 0), "too short for disaggregation"
        clock = Clock()
        monkeypatch.setattr(router.dispatcher.handoff_counts, "_clock", clock)
        await router.complete(prompt=[104] * 40, max_tokens=4)
        assert (await router.http.get("/health")).json()["warning"] is None, "one request says nothing yet"
        clock.now += 50
        await router.complete(prompt=[105] * 40, max_tokens=4)
        clock.now += 20
        health = (await router.http.get("/health")).json()
        assert health["status"] == "ok" and "model tiny: no KV handoff was completed" in health["warning"]
        assert health["handoffs"]["tiny"]["stalled_s"] == 70.0
        assert await totals(router) == (2, 0)

    serve(apart, prefill=0, disaggregation_min_tokens=8)
