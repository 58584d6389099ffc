"""Two simulated instances read a prompt together: times computed by hand, and nothing left behind."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulation.cluster import SimulatedCluster
from bench.simulation.cost import CostModel
from bench.simulation.instance import SimulatedInstance
from bench.simulation.measures import Distribution
from bench.simulation.run import Result, Served, simulate
from bench.simulation.summary import Objective, summarise
from bench.simulation.virtual_time import run_virtually
from bench.traces import Trace, TraceRequest
from contracts.identity import BlockName, RequestId, TicketId
from contracts.instance import Role
from contracts.messages import Cancel, Front, Prefill, PrefillReport, Ticket, Tokens, ToRouter, Work
from contracts.sampling import SamplingParams
from tests.unit.bench.tiny_trace import COST, conversations, scenario

LATENCY_S = 0.004
BLOCK = 512


def simulated(*requests: TraceRequest, cost: CostModel = COST, joint: int = 1024, prefill: int = 2) -> Result:
    trace = Trace("by hand", list(requests), 1.0, 1.0, hash_tokens=BLOCK)
    result = simulate(replace(scenario(trace, prefill=prefill), cost=cost, joint_prefill_min_tokens=joint))
    assert not result.refused
    return result


def served(*requests: TraceRequest, cost: CostModel = COST, joint: int = 1024) -> list[Served]:
    return sorted(simulated(*requests, cost=cost, joint=joint).served, key=lambda one: one.at_s)


def prompt(tokens: int, at_s: float = 0.0, first: int = 1) -> TraceRequest:
    return TraceRequest(at_s, tokens, 3, tuple(range(first, first + tokens // BLOCK)))


def test_both_read_at_once_a_group_of_layers_apart() -> None:
    """4,096 tokens of 1 ms: 2,048 each. 256 of them, a group of layers, are 256 KB: 0.256 ms of the link."""
    [one] = served(prompt(4096))
    assert one.front_tokens == 2048
    assert one.ttft_s == pytest.approx(2.048 + 2.048 / 8 + LATENCY_S + 256e-6)
    assert one.predicted_ttft_s == pytest.approx(one.ttft_s)
    [alone] = served(prompt(4096), joint=0)
    assert alone.ttft_s == pytest.approx(4.096)
    assert alone.front_tokens == 0


def test_what_the_back_reads_alone_takes_steps_of_its_own() -> None:
    [one] = served(prompt(8192))
    assert (one.front_tokens, one.cached_tokens) == (2048, 0)
    assert one.ttft_s == pytest.approx(6.144 + 2.048 / 8 + LATENCY_S + 256e-6)
    assert one.predicted_ttft_s == pytest.approx(one.ttft_s)


def test_a_short_front_is_followed_closely() -> None:
    [one] = served(prompt(1024))
    assert one.ttft_s == pytest.approx(0.512 + 0.512 / 8 + LATENCY_S + 64e-6)


def test_a_slow_link_holds_the_back_up() -> None:
    """A token takes it half as long as computing it: blocks of a group leave as soon as they are computed."""
    cost = replace(COST, link_bytes_per_s=2e6)
    first, second = served(prompt(4096), prompt(4096, at_s=60.0, first=11), cost=cost)
    assert first.ttft_s == pytest.approx(2.048 + 2.048 / 8 + LATENCY_S + 0.128)
    # Its speed was not known before the first one.
    assert first.predicted_ttft_s < first.ttft_s
    assert second.predicted_ttft_s == pytest.approx(second.ttft_s, rel=1e-3)


def test_a_link_that_costs_more_than_it_brings_is_not_used_again() -> None:
    cost = replace(COST, link_bytes_per_s=2e5)
    first, second = served(prompt(4096), prompt(4096, at_s=100.0, first=11), cost=cost)
    assert (first.front_tokens, second.front_tokens) == (2048, 0)
    assert second.ttft_s == pytest.approx(4.096)


def test_cached_blocks_of_the_front_are_hits_and_computed_ones_are_not() -> None:
    first, second = served(prompt(2048), TraceRequest(60.0, 8192, 3, (1, 2, 3, 4, *range(21, 33))))
    assert (first.front_tokens, second.cached_tokens) == (1024, 2048)
    # The back of the first is the front of the second, and the other one has the first two blocks already.
    assert second.front_tokens == 2048 + 2048 - 1024
    assert second.ttft_s == pytest.approx(4.096 + 2.048 / 8 + LATENCY_S + 256e-6)


def test_duplicates_take_room_in_both_caches(tmp_path: Path) -> None:
    trace = conversations(tmp_path)
    setting = replace(scenario(trace, prefill=3), cost=replace(COST, kv_tokens=BLOCK * 24))
    alone = summarise(simulate(setting), Objective())
    joint = summarise(simulate(replace(setting, joint_prefill_min_tokens=1024)), Objective())
    assert joint.joint_requests > 10 and alone.joint_requests == 0
    assert joint.block_hit_rate < alone.block_hit_rate


def test_the_measured_speed_is_not_that_of_waiting_for_a_front() -> None:
    first, second = served(prompt(4096), prompt(4096, at_s=60.0, first=11))
    assert second.ttft_s == pytest.approx(first.ttft_s)
    assert second.predicted_ttft_s == pytest.approx(second.ttft_s)


class Pair:
    """Two prefill instances and what they tell, spoken to directly."""

    def __init__(self, cost: CostModel = COST) -> None:
        self.loop = asyncio.get_running_loop()
        self.cluster = SimulatedCluster(cost, block_tokens=BLOCK, gaps=Distribution())
        self.told: list[tuple[float, ToRouter]] = []
        for _ in range(2):
            self.cluster.add("prefill")
        self.front, self.back = self.cluster.instances.values()
        for instance in (self.front, self.back):
            instance.router = lambda message: self.told.append((self.loop.time(), message))

    def read(self, instance: SimulatedInstance, name: str, tokens: int, **more: Ticket | Front) -> None:
        work = Work(
            request_id=RequestId(name),
            token_ids=[len(name)] * tokens,
            num_prompt_tokens=tokens,
            sampling=SamplingParams(seed=0, max_tokens=1),
            root=BlockName(b"root"),
        )
        ticket, front = more.get("ticket"), more.get("front")
        assert not isinstance(ticket, Front) and not isinstance(front, Ticket)
        instance.on_message(Prefill(work, ticket, None, front))

    def ticket(self) -> Ticket:
        ends = (self.front.record, self.back.record)
        return Ticket(
            ticket=TicketId("t"),
            source=ends[0].instance,
            source_generation=ends[0].generation,
            source_address="",
            sink=ends[1].instance,
            sink_generation=ends[1].generation,
            timeout_s=1.0,
        )

    def together(self, *, back_first: bool = False) -> None:
        """A prompt of 2,048 tokens; the front computes the first 1,024."""
        ticket = self.ticket()
        asks: list[Callable[[], None]] = [
            lambda: self.read(self.front, "part", 1024, ticket=ticket),
            lambda: self.read(self.back, "full", 2048, front=Front(ticket=ticket, num_blocks=2)),
        ]
        for ask in reversed(asks) if back_first else asks:
            ask()

    def first_token_at(self, name: str) -> float:
        [at] = [at for at, m in self.told if isinstance(m, Tokens) and m.request_id == name]
        return at

    def report(self, name: str) -> PrefillReport:
        [report] = [m for _, m in self.told if isinstance(m, PrefillReport) and m.request_id == name]
        return report


TOGETHER_S = 1.024 + 1.024 / 8 + LATENCY_S + 128e-6


@pytest.mark.parametrize("back_first", [False, True])
def test_both_may_hear_of_it_first(back_first: bool) -> None:
    async def scene() -> None:
        pair = Pair()
        pair.together(back_first=back_first)
        await asyncio.sleep(10)
        assert pair.first_token_at("part") == pytest.approx(1.024)
        assert pair.first_token_at("full") == pytest.approx(TOGETHER_S)
        assert (pair.report("full").front_tokens, pair.report("full").cached_tokens) == (1024, {"device": 0})
        pair.cluster.check_idle()
        assert len(pair.front.engine.cache.names()) == 2 and len(pair.back.engine.cache.names()) == 4

    run_virtually(scene)


def test_while_the_front_is_busy_the_back_reads_others() -> None:
    async def scene() -> None:
        pair = Pair()
        pair.read(pair.front, "other", 4096)
        pair.together()
        pair.read(pair.back, "another", 512)
        assert not pair.back.is_idle
        await asyncio.sleep(10)
        assert pair.first_token_at("another") == pytest.approx(0.512)
        assert pair.first_token_at("full") == pytest.approx(4.096 + TOGETHER_S)
        pair.cluster.check_idle()

    run_virtually(scene)


def test_a_back_that_is_late_finds_all_there() -> None:
    """Its own prompt before it takes 3 s. The front's blocks are kept meanwhile."""

    async def scene() -> None:
        pair = Pair()
        pair.read(pair.back, "another", 3072)
        pair.together()
        await asyncio.sleep(2)
        assert pair.front.engine.cache.num_free == pair.front.engine.cache.num_total - 2
        await asyncio.sleep(10)
        # All bytes travel from the step's beginning on, and the step has not more than itself to do after the first.
        assert pair.first_token_at("full") == pytest.approx(3.072 + 1.024 + LATENCY_S + 128e-6, abs=2e-3)
        pair.cluster.check_idle()

    run_virtually(scene)


def test_without_its_front_the_back_computes_all() -> None:
    async def scene() -> None:
        pair = Pair()
        pair.read(pair.front, "other", 4096)
        pair.together()
        await asyncio.sleep(1)
        pair.front.on_message(Cancel(RequestId("part")))
        await asyncio.sleep(10)
        assert pair.first_token_at("full") == pytest.approx(1.0 + 2.048)
        assert pair.report("full").front_tokens == 0
        pair.cluster.check_idle()

    run_virtually(scene)


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.1, 2.0])
@pytest.mark.parametrize("is_busy", [False, True])
def test_nothing_is_left_of_one_that_was_called_off(after_s: float, is_busy: bool) -> None:
    async def scene() -> None:
        pair = Pair()
        if is_busy:
            pair.read(pair.front, "other", 4096)
        pair.together()
        await asyncio.sleep(after_s)
        pair.back.on_message(Cancel(RequestId("full")))
        pair.front.on_message(Cancel(RequestId("part")))
        await asyncio.sleep(10)
        pair.cluster.check_idle()

    run_virtually(scene)


def test_decode_and_unified_instances_read_behind_nobody() -> None:
    async def scene() -> None:
        cluster = SimulatedCluster(COST, block_tokens=BLOCK, gaps=Distribution())
        roles: list[Role] = ["prefill", "decode", "unified"]
        for role in roles:
            cluster.add(role)
        records = [instance.record for instance in cluster.instances.values()]
        assert [record.reads_behind for record in records] == [True, False, False]
        assert {record.step_tokens for record in records} == {COST.max_num_batched_tokens}

    run_virtually(scene)
