"""The chart's autoscaling rules, by hand and over a simulated cluster."""

from dataclasses import replace
from pathlib import Path

from baton_serve.bench.simulation.autoscaling import PoolRules, PoolScaler, ScalingRules, rules_from_values
from baton_serve.bench.simulation.run import simulate
from tests.structure.test_structure import ROOT
from tests.unit.bench.tiny_trace import conversations, scenario


def test_the_defaults_are_the_charts() -> None:
    chart = rules_from_values(ROOT / "helm" / "values.yaml", start_s=60, roles=["prefill", "decode", "unified"])
    assert set(chart.pools.values()) == {PoolRules()}


def test_up_at_once_two_a_minute_down_after_the_window_one_in_two() -> None:
    scaler = PoolScaler(PoolRules(max_replicas=9, stabilization_s=300))
    sizes, size = [], 1
    for poll in range(80):
        size = scaler.size(poll * 15.0, size, 3.0 if poll < 20 else 0.1)
        sizes.append(size)
    assert sizes[:23] == [1] * 3 + [3] * 4 + [5] * 4 + [7] * 4 + [9] * 8
    assert sizes[23:40] == [9] * 17
    assert sizes[40:73] == [8] * 8 + [7] * 8 + [6] * 8 + [5] * 8 + [4]


def test_a_tenth_changes_nothing() -> None:
    scaler = PoolScaler(PoolRules())
    assert {scaler.size(poll * 15.0, 2, 1.09) for poll in range(10)} == {2}


def test_pools_follow_the_load_and_drain(tmp_path: Path) -> None:
    trace = conversations(tmp_path, time_scale=2.0)
    late = [replace(r, at_s=r.at_s + (2000 if n >= 40 else 0)) for n, r in enumerate(trace.requests)]
    rules = ScalingRules(pools={"prefill": PoolRules(wait_s=0.2, stabilization_s=60)}, start_s=30)
    result = simulate(replace(scenario(replace(trace, requests=late), prefill=1), scaling=rules))
    sizes = [one.sizes["prefill"] for one in result.sizes]
    assert len(result.served) == 52
    assert max(sizes) > 1
    assert sizes[-1] < max(sizes)
