"""Instances that come, restart, freeze, drain and go, and what the router counts for each."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId
from baton_serve.contracts.instance import InstanceRecord, Load
from baton_serve.contracts.messages import Answer, Batch, Cancel, Failed, LoadReport, SnapshotRequest
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import LoadEstimate, WorkerState
from baton_serve.services.router.placement.block_index import Match
from tests.unit.router.conftest import settle
from tests.unit.router.fakes import LAYOUT, FakeCluster, FakeLink, record

NAMES = [BlockHash(bytes([i]) * 16) for i in range(4)]


class Watcher:
    """An assignment that only remembers."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.lost: list[str] = []

    def on_answer(self, worker: WorkerState, answer: Answer, now: float) -> None:
        self.answers.append(answer)

    def on_lost(self, worker: WorkerState, reason: str) -> None:
        self.lost.append(reason)


def with_cluster(test: Callable[[Cluster, FakeCluster], Awaitable[None]]) -> None:
    async def scenario() -> None:
        fakes = FakeCluster()
        cluster = Cluster(fakes, fakes, clock=time.monotonic)
        await cluster.start()
        try:
            await test(cluster, fakes)
            cluster.index.check_invariants()
        finally:
            await cluster.close()

    asyncio.run(scenario())


def ready(cluster: Cluster) -> list[str]:
    return [m.record.instance for m in cluster.workers() if m.takes_work]


def test_an_instance_is_ready_when_it_answers() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        heard: list[int] = []
        cluster.add_listener(lambda: heard.append(1))
        fakes.registered[record("ghost", "decode").instance] = record("ghost", "decode")
        fakes.add(record("d", "decode"))
        await settle()
        assert ready(cluster) == ["d"]
        assert heard
        assert [type(m) for m in fakes["d"].received] == [SnapshotRequest]

    with_cluster(scenario)


def test_blocks_are_known_from_snapshot_and_events_until_the_instance_is_lost() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        fakes.add(record("d", "decode")).cached = NAMES[:1]
        await settle()
        fakes["d"].store(NAMES[1:3])
        (found,) = cluster.view(lambda layout: NAMES).candidates
        assert found.cached_tokens == 3 * LAYOUT.block_tokens
        fakes["d"].die()
        await settle()
        assert cluster.view(lambda layout: NAMES).candidates == []
        assert cluster.index.match(NAMES) == {}

    with_cluster(scenario)


def test_instances_that_can_hand_nothing_over_are_named_with_their_layouts(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        codes = msgspec.structs.replace(LAYOUT, dtype="int8", block_tokens=16)
        fakes.add(record("p", "prefill", layout=codes))
        fakes.add(record("d", "decode", layout=msgspec.structs.replace(LAYOUT, dtype="bfloat16")))
        await settle()
        assert not caplog.records
        fakes.add(record("e", "decode", layout=msgspec.structs.replace(LAYOUT, dtype="fp8_e4m3")))
        await settle()
        (reported,) = caplog.records
        assert "converting int8 to fp8_e4m3 would round the values a second time" in reported.message
        assert f"p ({codes})" in reported.message and "e (KVLayout(" in reported.message

    with_cluster(scenario)


def test_missed_events_are_made_up_for_by_a_snapshot() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        instance = fakes.add(record("d", "decode"))
        await settle()
        instance.sequence += 1
        instance.cached = NAMES[:2]
        instance.store(NAMES[2:3])
        assert cluster.index.match(NAMES)[instance.record.instance].device == 3

    with_cluster(scenario)


def test_a_restarted_process_replaces_the_old_one_and_its_work_is_lost() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        first = fakes.add(record("d", "decode"))
        await settle()
        watcher = Watcher()
        (worker,) = cluster.workers()
        worker.assign(RequestId("r"), LoadEstimate(watcher, prefill_tokens=0, sequences=1, blocks=1))
        fakes.add(msgspec.structs.replace(first.record, generation=Generation(2)))
        await settle()
        assert watcher.lost
        (worker,) = cluster.workers()
        assert worker.record.generation == 2
        assert worker.takes_work

    with_cluster(scenario)


def test_a_process_at_a_reused_address_is_not_taken_for_the_one_registered() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        instance = fakes.add(record("d", "decode"))
        instance.record = msgspec.structs.replace(instance.record, generation=Generation(99))
        await settle()
        assert ready(cluster) == []

    with_cluster(scenario)


def test_a_draining_instance_finishes_what_it_has() -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        instance = fakes.add(record("d", "decode"))
        await settle()
        watcher = Watcher()
        (worker,) = cluster.workers()
        worker.assign(RequestId("r"), LoadEstimate(watcher, prefill_tokens=0, sequences=1, blocks=1))
        instance.draining = True
        instance.report()
        assert ready(cluster) == []
        fakes.forget("d")
        await settle()
        assert watcher.lost == []
        worker.release(RequestId("r"))
        instance.report()
        assert cluster.workers() == []
        assert watcher.lost == []

    with_cluster(scenario)


def test_a_lost_link_is_tried_again_while_the_record_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        monkeypatch.setattr("baton_serve.services.router.cluster.cluster._RECONNECT_S", 0.0)
        instance = fakes.add(record("d", "decode"))
        await settle()
        assert instance.link is not None
        instance.link.lose("no message for 3 s")
        await settle(2)
        assert ready(cluster) == []
        await settle()
        assert ready(cluster) == ["d"]

    with_cluster(scenario)


def test_an_instance_that_never_answers_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have another cluster's key, say."""

    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        monkeypatch.setattr("baton_serve.services.router.cluster.cluster._RECONNECT_S", 0.0)
        ghost = record("ghost", "decode")
        fakes.registered[ghost.instance] = ghost
        fakes.add(record("d", "decode"))
        for _ in range(2):
            await settle()
            (unreached,) = [worker for worker in cluster.workers() if worker.state != "ready"]
            assert isinstance(unreached.link, FakeLink)
            unreached.link.lose("the handshake failed")
        await settle()
        assert ready(cluster) == ["d"]

    with_cluster(scenario)
    (line,) = [entry.message for entry in caplog.records if entry.levelname == "WARNING"]
    assert "ghost cannot be reached at rpc-ghost: the handshake failed" in line


class Broken(Watcher):
    def on_answer(self, worker: WorkerState, answer: Answer, now: float) -> None:
        raise RuntimeError("a bug")

    def on_lost(self, worker: WorkerState, reason: str) -> None:
        raise RuntimeError("a bug")


def breaks() -> None:
    raise RuntimeError("a bug")


def test_a_listener_that_fails_keeps_no_other_one_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        heard: list[str] = []
        for name in ("first", "second"):
            cluster.add_listener(partial(heard.append, name))
            cluster.add_listener(breaks)
            cluster.add_listener(lambda: breaks())
        fakes.add(record("d", "decode"))
        await settle()
        assert ready(cluster) == ["d"]
        assert heard.count("first") == heard.count("second") >= 2
        assert "a bug" in caplog.text and "Traceback" in caplog.text

    with_cluster(scenario)


def test_a_request_that_cannot_be_notified_keeps_no_other_one_from_it(caplog: pytest.LogCaptureFixture) -> None:
    """Neither of an answer in the same frame, nor of the instance's loss."""

    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        fakes.add(record("d", "decode"))
        await settle()
        (worker,), watchers = cluster.workers(), [Watcher(), Watcher()]
        for name, watcher in (("a", watchers[0]), ("b", Broken()), ("c", watchers[1])):
            worker.assign(RequestId(name), LoadEstimate(watcher, prefill_tokens=0, sequences=1, blocks=1))
        failed = [Failed(request_id=RequestId(name), code="internal", message="") for name in "abc"]
        fakes["d"].send(Batch(list(failed)))
        assert [watcher.answers for watcher in watchers] == [[failed[0]], [failed[2]]]
        fakes["d"].die()
        await settle()
        assert [len(watcher.lost) for watcher in watchers] == [1, 1]
        assert caplog.text.count("RuntimeError: a bug") == 2

    with_cluster(scenario)


def test_an_instance_that_cannot_be_added_keeps_no_other_one_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        link = fakes.link

        def refuses(added: InstanceRecord, *args: Any) -> FakeLink:
            if added.instance == "bad":
                raise ValueError("no such address")
            return link(added, *args)

        monkeypatch.setattr(fakes, "link", refuses)
        for name in ("bad", "good"):
            fakes.registered[InstanceId(name)] = record(name, "decode")
        fakes.add(record("last", "decode"))
        await settle()
        assert "last" in ready(cluster)
        assert "no such address" in caplog.text

    with_cluster(scenario)


def test_a_message_without_a_request_that_cannot_be_sent_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: Cluster, fakes: FakeCluster) -> None:
        fakes.add(record("d", "decode"))
        await settle()
        cluster.workers()[0].send(Cancel(RequestId("half a character: \ud800")))
        assert "Cancel could not be sent to d" in caplog.text

    with_cluster(scenario)


def worker(**load: float) -> WorkerState:
    stated = Load(free_blocks=50, total_blocks=100, prefill_tokens_per_s=100.0)
    made = WorkerState(record("p", "prefill", load=stated), state="ready")
    made.report(report(**load), now=0.0)
    return made


def report(**load: float) -> LoadReport:
    stated = {"free_blocks": 50, "total_blocks": 100, "prefill_tokens_per_s": 100.0} | load
    return LoadReport(
        instance=record("p", "prefill").instance,
        generation=Generation(1),
        load=Load(**stated),  # type: ignore[arg-type]
    )


def test_work_just_placed_counts_at_once_and_never_twice() -> None:
    p = worker()
    p.assign(RequestId("r"), LoadEstimate(Watcher(), prefill_tokens=200, sequences=2, blocks=10))
    seen = p.candidate(Match(), now=0.0)
    assert (seen.queued_tokens, seen.active_sequences, seen.free_blocks) == (200, 2, 40)
    p.report(report(queued_tokens=200, running=2, free_blocks=40), now=1.0)
    seen = p.candidate(Match(), now=1.0)
    assert (seen.queued_tokens, seen.active_sequences, seen.free_blocks) == (200, 2, 40)
    p.on_prefill_done(RequestId("r"))
    assert p.candidate(Match(), now=1.0).queued_tokens == 0
    p.release(RequestId("r"))
    p.release(RequestId("r"))
    assert p.candidate(Match(), now=1.0).active_sequences == 0
    p.check_invariants()


def test_work_of_other_routers_is_seen_in_reports_and_ages() -> None:
    p = worker(queued_tokens=500, running=3, waiting=1)
    assert p.candidate(Match(), now=0.0).queued_tokens == 500
    assert p.candidate(Match(), now=0.0).active_sequences == 4
    assert p.candidate(Match(), now=2.0).queued_tokens == 300
    assert p.candidate(Match(), now=9.0).queued_tokens == 0
    p.check_invariants()
