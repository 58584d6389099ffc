"""A simulated cluster does what can be computed by hand, and always the same."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from baton_serve.bench.serving.traces import Trace, TraceRequest
from baton_serve.bench.simulation.cost import CostError, CostModel, prompt_steps
from baton_serve.bench.simulation.run import Served, SimulationResult, simulate
from baton_serve.bench.simulation.search import Trials, best_split, smallest_pools
from baton_serve.bench.simulation.summary import Objective, Summary, rows, summarise
from baton_serve.services.router.placement.policy import PolicyName
from tests.unit.bench.tiny_trace import COST, conversations, scenario

SLOW_LINK = replace(COST, link_bytes_per_s=1e6)


def alone(*requests: TraceRequest) -> Trace:
    return Trace("by hand", list(requests), 1.0, 1.0, hash_tokens=512)


def served(trace: Trace, cost: CostModel = COST) -> list[Served]:
    result = simulate(replace(scenario(trace, prefill=1), cost=cost))
    assert not result.refused
    return sorted(result.served, key=lambda one: one.at_s)


def test_the_first_token_takes_the_prompt_and_the_others_a_step_each() -> None:
    [one] = served(alone(TraceRequest(0.0, 1024, 3, (1, 2))), SLOW_LINK)
    assert one.ttft_s == pytest.approx(1.024)
    # The KV travels at 1 ms a token: while it is computed, but for all of the last chunk.
    assert one.exposed_s == pytest.approx(1.024)
    steps = 2 * 0.010 + (1024 + 1025) * 1e-6
    assert one.e2e_s == pytest.approx(1.024 + 1.024 + steps)


def test_chunks_travel_while_the_next_is_computed() -> None:
    cost = replace(SLOW_LINK, max_num_batched_tokens=512)
    [one] = served(alone(TraceRequest(0.0, 2048, 3, (1, 2, 3, 4))), cost)
    assert one.ttft_s == pytest.approx(2.048)
    assert one.exposed_s == pytest.approx(0.512)


def test_prompts_queue_and_the_second_finds_the_first_ones_prefix() -> None:
    first, second = served(alone(TraceRequest(0.0, 2048, 2, (1, 2, 3, 4)), TraceRequest(0.5, 1536, 2, (1, 2, 9))))
    assert (first.cached_tokens, second.cached_tokens) == (0, 1024)
    assert second.ttft_s == pytest.approx(2.048 - 0.5 + 0.512)


def test_decodes_share_steps() -> None:
    trace = alone(*(TraceRequest(0.0, 512, 50, (n,)) for n in range(4)))
    result = simulate(scenario(trace, prefill=4))
    # Four in a batch: the base of a step grows by 1 ms a sequence, and each reads its KV.
    assert result.gaps.percentile(50) == pytest.approx(0.013 + 4 * 530e-6, rel=0.05)
    assert result.busy["decode"] < 1


def test_who_joins_a_batch_has_no_part_in_the_steps_before() -> None:
    first, second = TraceRequest(0.0, 512, 300, (1,)), TraceRequest(0.1, 1024, 6, (2, 3))
    [_, joined] = served(alone(first, second))
    assert joined.tpot_s is not None
    assert joined.tpot_s > COST.step_s(2, 512 + 1024)


@pytest.mark.parametrize("prefill", [0, 1])
def test_a_short_cache_preempts_and_still_answers_all(prefill: int) -> None:
    cost = replace(COST, kv_tokens=512 * 5)
    trace = alone(*(TraceRequest(0.0, 1000, 600, (n, n + 10)) for n in range(4)))
    pools = replace(scenario(trace, prefill=prefill, decode=prefill), num_unified=1 - prefill)
    result = simulate(replace(pools, cost=cost))
    assert (len(result.served), result.refused) == (4, [])


def test_what_can_never_fit_is_refused() -> None:
    result = simulate(scenario(alone(TraceRequest(0.0, 512 * 41, 5, tuple(range(41))))))
    assert len(result.refused) == 1
    assert "tokens of KV cache" in result.refused[0]


def test_a_unified_instance_stalls_answers_while_it_reads_prompts() -> None:
    trace = alone(TraceRequest(0.0, 512, 300, (1,)), TraceRequest(1.0, 2048, 2, (2, 3, 4, 5)))
    split = simulate(scenario(trace, prefill=1, decode=1))
    unified = simulate(replace(scenario(trace, prefill=0, decode=0), num_unified=1))
    assert split.gaps.percentile(100) < 0.02
    assert unified.gaps.percentile(100) > 2.0
    assert {one.decision for one in unified.served} == {"unified"}


def test_an_objective_of_gaps_is_for_each_requests_own() -> None:
    trace = alone(TraceRequest(0.0, 512, 60, (1,)), TraceRequest(0.8, 2048, 30, (2, 3, 4, 5)))
    own = replace(scenario(trace, prefill=0, decode=0), num_unified=1, keeps_own_gaps=True)
    stalled, other = sorted(simulate(own).served, key=lambda one: one.at_s)
    assert stalled.itl_p99_s == pytest.approx(2.048, rel=0.02)
    assert other.itl_p99_s is not None
    assert other.itl_p99_s < 0.02
    objective = Objective(itl_s=0.1)
    assert [objective.is_met_by(one) for one in (stalled, other)] == [False, True]
    assert objective.description() == "objective: p99 of its ITL <= 100 ms"
    apart = simulate(replace(own, num_prefill=1, num_decode=1, num_unified=0))
    assert all(objective.is_met_by(one) for one in apart.served)


def test_a_first_token_that_is_held_back_leaves_a_shorter_first_gap() -> None:
    trace = alone(*(TraceRequest(0.9 * n, 512, 40, (n,)) for n in range(12)))
    split = replace(scenario(trace, prefill=1, decode=1), cost=SLOW_LINK, keeps_own_gaps=True)
    plain, with_slo = simulate(split), simulate(replace(split, itl_s=0.4))
    for one, held in list(zip(plain.served, with_slo.served, strict=True))[9:]:  # what is expected is known by then
        assert held.ttft_s > one.ttft_s + 0.1
        assert one.itl_p99_s is not None
        assert held.itl_p99_s is not None
        assert held.itl_p99_s < one.itl_p99_s - 0.1


def test_an_itl_slo_bounds_the_prompt_tokens_of_a_unified_instance_beside_answers() -> None:
    trace = alone(TraceRequest(0.0, 512, 300, (1,)), TraceRequest(1.0, 2048, 2, (2, 3, 4, 5)))
    unified = replace(scenario(trace, prefill=0, decode=0), num_unified=1)
    with_slo = simulate(replace(unified, itl_s=0.1))
    assert with_slo.gaps.percentile(100) < 0.1
    assert simulate(unified).gaps.percentile(100) > 2.0
    assert len(with_slo.served) == 2


def test_with_an_itl_slo_a_decode_instance_takes_prompts_from_a_queue() -> None:
    trace = alone(*(TraceRequest(0.1 * n, 512, 100, (n,)) for n in range(20)))
    split = scenario(trace, prefill=1, decode=1)
    apart, shared = simulate(split), simulate(replace(split, itl_s=0.2))
    assert {one.decision for one in apart.served} == {"disaggregated"}
    assert {one.decision for one in shared.served} == {"disaggregated", "decode_only"}
    assert shared.gaps.percentile(99) < 0.2

    def mean_ttft_s(result: SimulationResult) -> float:
        return sum(one.ttft_s for one in result.served) / len(result.served)

    assert mean_ttft_s(shared) < 0.8 * mean_ttft_s(apart)


def test_steps_with_prompts_take_what_a_table_says(tmp_path: Path) -> None:
    table = tmp_path / "steps.json"
    table.write_text('{"alone": {"256": 100, "512": 200}, "beside": {"256": 150, "512": 300}}')
    cost = replace(COST, prompt_steps=prompt_steps(table))
    assert cost.chunks_s([(0, 200)], 0, 0) == pytest.approx(0.1)
    assert cost.chunks_s([(0, 200), (0, 57)], 0, 0) == pytest.approx(0.2)
    assert cost.chunks_s([(0, 200)], 56, 1000) == pytest.approx(0.15 + 1000 * COST.step_s_per_kv_token)
    assert cost.chunks_s([(0, 612)], 0, 0) == pytest.approx(0.2 + 100 * COST.prefill_s_per_token)
    table.write_text('{"alone": {"256": 100}}')
    with pytest.raises(CostError, match="beside"):
        prompt_steps(table)


def test_twice_is_the_same(tmp_path: Path) -> None:
    trace = conversations(tmp_path, time_scale=0.2)
    for policy in ("prefix", "random"):
        results = [simulate(scenario(trace, policy=policy)) for _ in range(2)]
        assert all(len(result.served) == 52 for result in results)
        first, second = (summarise(result, Objective(2.0)) for result in results)
        assert msgspec.json.encode(first) == msgspec.json.encode(second)


def mean_ttft(trace: Trace, policy: PolicyName) -> float:
    return summarise(simulate(scenario(trace, policy=policy, prefill=4, decode=2)), Objective()).ttft.mean_ms


def test_prefix_placement_finds_conversations_again(tmp_path: Path) -> None:
    trace = conversations(tmp_path, time_scale=0.2)
    prefix = mean_ttft(trace, "prefix")
    assert all(prefix < 0.8 * mean_ttft(trace, policy) for policy in ("least_loaded", "round_robin", "random"))


def test_the_report_counts_goodput(tmp_path: Path) -> None:
    result = simulate(scenario(conversations(tmp_path)))
    summary = summarise(result, Objective(ttft_s=1.0, tpot_s=0.05))
    good = sum(one.ttft_s <= 1.0 and (one.tpot_s or 0.0) <= 0.05 for one in result.served)
    assert 0 < good < 52
    assert summary.attainment == good / 52
    assert {row.case: row.value for row in rows(summary)}["Request goodput"] == pytest.approx(good / result.duration_s)


def made_up(prefill: int, decode: int) -> Summary:
    """Good from 5 prefill and 3 decode instances on; goodput is greatest where the two are balanced."""
    blank = summarise(simulate(scenario(alone(TraceRequest(0.0, 512, 2, (1,))))), Objective())
    return msgspec.structs.replace(
        blank,
        prefill=prefill,
        decode=decode,
        ttft_attainment=float(prefill >= 5),
        attainment=float(prefill >= 5 and decode >= 3),
        goodput_per_s=min(prefill / 5, decode / 3),
    )


def test_a_plan_needs_no_torch() -> None:
    check = "import sys, baton_serve.bench.simulation.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


def test_a_short_shared_cache_answers_all() -> None:
    trace = alone(*(TraceRequest(0.1 * n, 2048, 3, tuple(range(4 * n, 4 * n + 4))) for n in range(12)))
    shared = replace(scenario(trace, policy="least_loaded", prefill=3), shares_cache=True)
    result = simulate(replace(shared, cost=replace(SLOW_LINK, kv_tokens=512 * 5)))
    assert (len(result.served), result.refused) == (12, [])


def test_searches_find_the_smallest_pools_and_the_best_split() -> None:
    found = smallest_pools(Trials(made_up), attainment=0.9, most=16)
    assert found is not None
    assert (found.prefill, found.decode) == (5, 3)
    assert smallest_pools(Trials(made_up), attainment=0.9, most=4) is None
    for instances, best in ((8, 5), (32, 20)):
        assert best_split(Trials(made_up), instances).prefill == best


def test_no_placement_finds_more_than_a_cache_that_all_share(tmp_path: Path) -> None:
    trace = conversations(tmp_path, time_scale=0.2)
    bound = summarise(
        simulate(replace(scenario(trace, policy="least_loaded", prefill=4, decode=2), shares_cache=True)), Objective()
    )
    ours = summarise(simulate(scenario(trace, prefill=4, decode=2)), Objective())
    assert bound.policy == "shared_cache"
    assert bound.block_hit_rate >= ours.block_hit_rate > 0.3
    assert bound.ttft.mean_ms <= ours.ttft.mean_ms
