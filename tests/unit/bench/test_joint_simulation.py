"""Two simulated instances read a prompt by turns: times computed by hand, and nothing left behind."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulation.cluster import SimulatedCluster
from bench.simulation.cost import CostModel
from bench.simulation.instance import SimulatedInstance
from bench.simulation.measures import Gaps
from bench.simulation.run import Result, Served, simulate
from bench.simulation.summary import Objective, summarise
from bench.simulation.virtual_time import run_virtually
from bench.traces import Trace, TraceRequest
from contracts.identity import BlockName, RequestId, TicketId
from contracts.instance import Role
from contracts.messages import Cancel, Front, Prefill, PrefillReport, Ticket, Tokens, ToRouter, Work
from contracts.sampling import SamplingParams
from services.router import joint
from tests.unit.bench.tiny_trace import COST, conversations, scenario

LATENCY_S = 0.004
BLOCK = 512


def simulated(*requests: TraceRequest, cost: CostModel = COST, least: int = 1024, prefill: int = 2) -> Result:
    trace = Trace("by hand", list(requests), 1.0, 1.0, hash_tokens=BLOCK)
    result = simulate(replace(scenario(trace, prefill=prefill), cost=cost, joint_prefill_min_tokens=least))
    assert not result.refused
    return result


def served(*requests: TraceRequest, cost: CostModel = COST, least: int = 1024) -> list[Served]:
    return sorted(simulated(*requests, cost=cost, least=least).served, key=lambda one: one.at_s)


def prompt(tokens: int, at_s: float = 0.0, first: int = 1) -> TraceRequest:
    return TraceRequest(at_s, tokens, 3, tuple(range(first, first + tokens // BLOCK)))


def test_both_read_at_once_a_group_of_layers_apart() -> None:
    """4,096 tokens of 1 ms: 2,048 each. 256 of them, a group of layers, are 256 KB: 0.256 ms of the link."""
    [one] = served(prompt(4096))
    assert one.front_tokens == 2048
    assert one.ttft_s == pytest.approx(2.048 + 2.048 / 8 + LATENCY_S + 256e-6)
    assert one.predicted_ttft_s == pytest.approx(one.ttft_s)
    [alone] = served(prompt(4096), least=0)
    assert alone.ttft_s == pytest.approx(4.096)
    assert alone.front_tokens == 0


def test_of_a_long_prompt_each_computes_half_by_turns() -> None:
    [one] = served(prompt(8192))
    assert (one.front_tokens, one.cached_tokens) == (4096, 0)
    assert one.ttft_s == pytest.approx(4.096 + 2.048 / 8 + LATENCY_S + 256e-6)
    assert one.predicted_ttft_s == pytest.approx(one.ttft_s)


def test_who_has_work_before_it_is_awaited_as_predicted() -> None:
    """Three prompts at once: the second waits for both instances, the third for one of them."""
    result = simulated(prompt(8192), prompt(8192, first=21), prompt(2048, first=41))
    for one in result.served:
        assert one.ttft_s == pytest.approx(one.predicted_ttft_s, rel=1e-6)
    assert sorted(one.front_tokens > 0 for one in result.served) == [False, True, True]


def test_parts_of_several_steps_begin_with_the_others_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "MAX_PARTS", 2)
    [one] = served(prompt(16384), cost=replace(COST, kv_tokens=BLOCK * 80))
    assert one.front_tokens == 8192
    # Three steps of the front, a group of layers of its last one, and four steps of the back.
    assert one.ttft_s == pytest.approx(3 * 2.048 + 2.048 / 8 + LATENCY_S + 256e-6 + 8.192)
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
    assert second.front_tokens == 1024 + 3072
    assert second.ttft_s == pytest.approx(3.072 + 1.536 / 8 + LATENCY_S + 192e-6)


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


def test_prompts_one_after_the_other_do_not_make_the_second_reader_dear() -> None:
    """Both are busy nearly all of the time, and nobody waits."""
    result = simulated(*(prompt(4096, at_s=2.7 * number, first=1 + 8 * number) for number in range(60)))
    assert all(one.front_tokens > 0 for one in result.served)


class Pair:
    """Two prefill instances and what they tell, spoken to directly."""

    def __init__(self, cost: CostModel = COST) -> None:
        self.loop = asyncio.get_running_loop()
        self.cluster = SimulatedCluster(cost, block_tokens=BLOCK, gaps=Gaps())
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

    def ticket(self, number: int = 0) -> Ticket:
        """For what follows part `number`."""
        ends = (self.front.record, self.back.record)[:: -1 if number % 2 else 1]
        return Ticket(
            ticket=TicketId(f"t{number}"),
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

    def by_turns(self, ends: Sequence[int], *, order: Iterable[int] | None = None) -> None:
        """Parts `0`, `1`, … of a prompt, the last one with no ticket."""
        for number in order if order is not None else range(len(ends)):
            more: dict[str, Ticket | Front] = {}
            if number:
                after = RequestId(f"{number - 2}") if number > 1 else None
                more["front"] = Front(ticket=self.ticket(number - 1), num_blocks=ends[number - 1] // BLOCK, after=after)
            if number < len(ends) - 1:
                more["ticket"] = self.ticket(number)
            self.read((self.front, self.back)[number % 2], f"{number}", ends[number], **more)

    def cancel(self, num_parts: int) -> None:
        for number in range(num_parts):
            (self.front, self.back)[number % 2].on_message(Cancel(RequestId(f"{number}")))

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
        assert pair.first_token_at("full") == pytest.approx(3.072 + 1.024)
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


FOUR = (1024, 2048, 3072, 4096)
FOUR_S = 2.048 + 1.024 / 8 + LATENCY_S + 128e-6


def test_each_part_follows_the_others_and_waits_for_its_own_earlier_one() -> None:
    async def scene() -> None:
        pair = Pair()
        pair.by_turns(FOUR)
        await asyncio.sleep(10)
        lag_s = FOUR_S - 2.048
        for name, at in (("0", 1.024), ("1", 1.024 + lag_s), ("2", 2.048), ("3", FOUR_S)):
            assert pair.first_token_at(name) == pytest.approx(at)
        reports = [pair.report(f"{number}") for number in range(4)]
        assert [report.front_tokens for report in reports] == [0, 1024, 1024, 2048]
        assert all(report.cached_tokens == {"device": 0} for report in reports)
        pair.cluster.check_idle()
        assert len(pair.front.engine.cache.names()) == 6 and len(pair.back.engine.cache.names()) == 8

    run_virtually(scene)


def test_between_two_parts_an_instance_goes_on_with_the_prompt_before_others() -> None:
    """Which then take what a step has left."""

    async def scene() -> None:
        pair = Pair()
        pair.by_turns(FOUR)
        await asyncio.sleep(0.1)
        pair.read(pair.front, "other", 4096)
        await asyncio.sleep(20)
        assert pair.first_token_at("3") < FOUR_S + 1.1
        assert pair.first_token_at("other") > pair.first_token_at("2")
        pair.cluster.check_idle()

    run_virtually(scene)


def test_a_part_that_waits_for_its_front_stops_nobody() -> None:
    async def scene() -> None:
        pair = Pair()
        pair.read(pair.front, "before", 4096)
        pair.by_turns(FOUR)
        pair.read(pair.back, "meanwhile", 2048)
        await asyncio.sleep(20)
        assert pair.first_token_at("meanwhile") == pytest.approx(2.048)
        assert pair.first_token_at("3") <= 4.096 + FOUR_S + 1e-6
        pair.cluster.check_idle()

    run_virtually(scene)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("is_busy", [False, True])
def test_what_a_lost_part_would_have_brought_is_computed(lost: int, is_busy: bool) -> None:
    async def scene() -> None:
        pair = Pair()
        if is_busy:
            pair.read(pair.front, "before", 4096)
        pair.by_turns(FOUR)
        (pair.front, pair.back)[lost % 2].on_message(Cancel(RequestId(f"{lost}")))
        await asyncio.sleep(30)
        assert pair.first_token_at("3") > 0
        assert pair.report("3").front_tokens < 4096
        pair.cluster.check_idle()

    run_virtually(scene)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_parts_may_come_in_any_order(order: tuple[int, ...]) -> None:
    """Between instances; those of one come in order, or compute what they do not find."""

    async def scene() -> None:
        pair = Pair()
        pair.by_turns(FOUR, order=order)
        await asyncio.sleep(30)
        in_order = order.index(0) < order.index(2) and order.index(1) < order.index(3)
        at = pair.first_token_at("3")
        assert at == pytest.approx(FOUR_S) if in_order else at < 8.2
        pair.cluster.check_idle()

    run_virtually(scene)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.5, 1.1, 1.5, 2.1])
@pytest.mark.parametrize("is_busy", [False, True])
def test_nothing_is_left_of_parts_that_were_called_off(after_s: float, is_busy: bool) -> None:
    async def scene() -> None:
        pair = Pair(replace(COST, kv_tokens=BLOCK * 9))
        if is_busy:
            pair.read(pair.front, "before", 4096)
        pair.by_turns(FOUR)
        await asyncio.sleep(after_s)
        pair.cancel(len(FOUR))
        await asyncio.sleep(30)
        pair.cluster.check_idle()

    run_virtually(scene)


def test_decode_and_unified_instances_read_behind_nobody() -> None:
    async def scene() -> None:
        cluster = SimulatedCluster(COST, block_tokens=BLOCK, gaps=Gaps())
        roles: list[Role] = ["prefill", "decode", "unified"]
        for role in roles:
            cluster.add(role)
        records = [instance.record for instance in cluster.instances.values()]
        assert [record.reads_behind for record in records] == [True, False, False]
        assert {record.step_tokens for record in records} == {COST.max_num_batched_tokens}

    run_virtually(scene)
