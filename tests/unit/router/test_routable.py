"""The instances that accept new work, updated with each change of the cluster."""

import time

import msgspec

from baton_serve.contracts.block_hash import checkpoint_hashes
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId
from baton_serve.contracts.instance import Load, Role
from baton_serve.contracts.messages import LoadReport, Snapshot
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.routable import RoutableWorkers
from baton_serve.services.router.cluster.worker_state import UNCERTAINTY_DOUBLING_S, WorkerState
from baton_serve.services.router.placement.block_index import BlockIndex
from baton_serve.services.router.placement.circuit_breaker import FAILURE_THRESHOLD
from tests.unit.router.conftest import settle
from tests.unit.router.fakes import LAYOUT, FakeCluster, record
from tests.unit.router.test_cluster import NAMES, with_cluster


def seen(cluster: Cluster) -> list[str]:
    return sorted(candidate.instance for candidate in cluster.view(lambda layout: []).candidates)


def names_of(routable_workers: RoutableWorkers) -> list[str]:
    return [candidate.instance for candidate in routable_workers.candidates(lambda layout: [], BlockIndex(), 0.0)]


def ready(name: str, role: Role) -> WorkerState:
    return WorkerState(record(name, role), state="ready")


def test_who_comes_drains_or_goes_is_seen_at_once() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        assert seen(cluster) == []
        for name in ("a", "b", "c"):
            fakes.add(record(name, "decode"))
        await settle()
        assert seen(cluster) == ["a", "b", "c"]
        fakes["a"].draining = True
        fakes["a"].report()
        await settle()
        assert seen(cluster) == ["b", "c"]
        fakes["b"].die()
        await settle()
        assert seen(cluster) == ["c"]
        fakes["a"].draining = False
        fakes["a"].report()
        await settle()
        assert seen(cluster) == ["a", "c"]

    with_cluster(scenario)


def test_a_reported_rate_counts_at_once() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        fakes.add(record("a", "prefill"))
        fakes.add(record("b", "decode"))
        await settle()
        for rate in (70.0, 90.0):
            fakes["a"].report(Load(free_blocks=50, total_blocks=100, prefill_tokens_per_s=rate))
            await settle()
            assert cluster.routable_workers().prefill_tokens_per_s == rate

    with_cluster(scenario)


def test_equal_layouts_are_one_object_and_others_have_names_of_their_own() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        other = msgspec.structs.replace(LAYOUT, block_tokens=2 * LAYOUT.block_tokens)
        copies = [msgspec.msgpack.decode(msgspec.msgpack.encode(LAYOUT), type=type(LAYOUT)) for _ in range(2)]
        assert copies[0] is not copies[1]
        for name, layout in zip("abc", [*copies, other], strict=True):
            fakes.add(msgspec.structs.replace(record(name, "decode"), layout=layout)).cached = NAMES[:2]
        await settle()
        by_layout: dict[object, list[BlockHash]] = {LAYOUT: NAMES[:2], other: NAMES[2:]}
        a, b, c = cluster.view(by_layout.__getitem__).candidates
        assert a.layout is b.layout and (c.layout, c.instance) == (other, "c")
        assert [x.cached_tokens for x in (a, b, c)] == [2 * LAYOUT.block_tokens] * 2 + [0]

    with_cluster(scenario)


def test_with_recurrent_states_only_checkpoints_count_and_the_branches_are_told() -> None:
    layout = msgspec.structs.replace(LAYOUT, state_bytes=LAYOUT.block_bytes + 1)
    index = BlockIndex()
    for name, blocks in (("a", NAMES[:2] + checkpoint_hashes(NAMES[1], 2)), ("b", NAMES[:3]), ("c", [])):
        index.add(InstanceId(name), Generation(1))
        index.load(Snapshot(instance=InstanceId(name), generation=Generation(1), sequence=0, device=blocks))
    workers = [worker(name, "prefill", 1.0, layout=layout) for name in "abc"]
    found = RoutableWorkers(workers).candidates(lambda layout: NAMES[:4], index, 0.0)
    size = layout.block_tokens
    assert [(c.cached_tokens, c.held_tokens) for c in found] == [(2 * size, 2 * size), (0, 0), (0, 0)]
    assert {c.branches for c in found} == {(3 * size, 2 * size)}


def test_an_open_circuit_leaves_the_work_to_others_of_its_role_if_there_are_any() -> None:
    bad, good, reader = ready("bad", "decode"), ready("good", "decode"), ready("reader", "prefill")
    now = time.monotonic()
    for _ in range(FAILURE_THRESHOLD):
        bad.circuit_breaker.failed(now)
    assert names_of(RoutableWorkers([bad, good, reader]).with_allowed_traffic(now)) == ["good", "reader"]
    assert names_of(RoutableWorkers([bad, reader]).with_allowed_traffic(now)) == ["bad", "reader"]


def worker(name: str, role: Role, rate: float, *, is_measured: bool = True, layout: KVLayout = LAYOUT) -> WorkerState:
    load = Load(
        free_blocks=50,
        total_blocks=100,
        prefill_tokens_per_s=rate,
        prefill_is_measured=is_measured,
        spare_tokens_per_s=rate / 2,
    )
    return WorkerState(record(name, role, load=load, layout=layout), state="ready")


def test_who_has_computed_nothing_is_taken_to_be_as_fast_as_the_others() -> None:
    """Its warm-up may have run beside theirs. Instances of another layout, and decode instances, do not count."""
    other = msgspec.structs.replace(LAYOUT, fingerprint="another")
    workers = [
        worker("proved", "prefill", 900.0),
        worker("slow", "prefill", 300.0),
        worker("new", "prefill", 100.0, is_measured=False),
        worker("quick", "prefill", 2000.0, is_measured=False, layout=other),
        worker("writes", "decode", 50.0, is_measured=False),
        worker("wrote", "decode", 1000.0),
    ]
    found = RoutableWorkers(workers).candidates(lambda layout: [], BlockIndex(), 0.0)
    rates = {str(candidate.instance): candidate.prefill_tokens_per_s for candidate in found}
    fast = {"proved": 900.0, "new": 900.0, "quick": 2000.0, "writes": 900.0, "wrote": 1000.0}
    assert rates == {"slow": 300.0, **fast}
    spare = {str(candidate.instance): candidate.spare_tokens_per_s for candidate in found}
    assert spare == {name: rate / 2 for name, rate in rates.items()}


def test_an_instance_without_recent_work_may_be_faster_than_measured() -> None:
    slow, fast = worker("slow", "decode", 300.0), worker("fast", "prefill", 1000.0)

    def rate(now: float) -> float:
        found = RoutableWorkers([slow, fast]).candidates(lambda layout: [], BlockIndex(), now)
        return {str(candidate.instance): candidate.prefill_tokens_per_s for candidate in found}["slow"]

    def report(tokens_per_s: float, now: float) -> None:
        load = msgspec.structs.replace(slow.record.load, prefill_tokens_per_s=tokens_per_s)
        slow.report(LoadReport(instance=slow.record.instance, generation=Generation(1), load=load), now)

    report(300.0, 10.0)
    assert rate(10.0) == 300.0
    report(300.0, 70.0)  # it says so each second, and has computed nothing
    assert rate(10.0 + UNCERTAINTY_DOUBLING_S) == 600.0
    assert rate(10.0 + 9 * UNCERTAINTY_DOUBLING_S) == rate(1e6) == 1000.0, "and no faster than the fastest"
    report(310.0, 500.0)
    assert rate(500.0) == 310.0, "another prompt has shown that it is slow"
