import asyncio

from baton_serve.contracts.events import BlocksStored
from baton_serve.contracts.messages import (
    Batch,
    Cancel,
    Failed,
    Generate,
    Heartbeat,
    LoadReport,
    Prefill,
    Snapshot,
    SnapshotRequest,
    Tokens,
)
from baton_serve.engine.core.outputs import FailedRequest
from baton_serve.engine.errors import RequestError
from baton_serve.services.unified.main import UnifiedHandler
from tests.unit.instance.fakes import OTHER_ROUTER, ROUTER, Bench, NoPulls, name, output, run, settle, work


def bench() -> Bench:
    return Bench(lambda b: UnifiedHandler(b.calls, NoPulls()))


def test_an_answer_is_streamed_and_ends() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        b.turn(tokens=[output(b.inner(), 5)])
        b.turn(tokens=[output(b.inner(), 6, position=1, finish="length")])
        await settle()
        assert [(t.token_ids, t.finish_reason) for t in b.router.answers()] == [([5], None), ([6], "length")]
        assert b.engine.verbs() == ["add"]
        b.check()

    run(test())


def test_all_tokens_of_a_step_for_one_router_travel_in_one_frame() -> None:
    async def test() -> None:
        b = bench()
        for request_id in ("a", "b"):
            b.serving.on_message(ROUTER, Generate(work(request_id)))
        await settle()
        b.turn(tokens=[output(b.inner(n), 5, finish="stop") for n in range(2)])
        ((_, batch),) = b.router.sent
        assert isinstance(batch, Batch)
        assert [m.request_id for m in batch.messages] == ["a", "b"]
        await settle()
        b.check()

    run(test())


def test_a_cancelled_request_is_freed_and_says_nothing() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        inner = b.inner()
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        b.turn(tokens=[output(inner, 5)])
        await settle()
        assert b.engine.asked[-1] == ("cancel", inner, None)
        assert not b.router.sent
        b.check()

    run(test())


def test_cancelling_one_sequence_leaves_the_other() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work(sequences=(0, 1))))
        await settle()
        inner = b.inner()
        b.serving.on_message(ROUTER, Cancel(work().request_id, sequence=1))
        assert b.engine.asked[-1] == ("cancel", inner, 1)
        b.turn(tokens=[output(inner, 5, sequence=1), output(inner, 6, finish="stop")])
        await settle()
        assert [t.sequence for t in b.router.answers()] == [0]
        b.check()

    run(test())


def test_cancelling_the_last_sequence_ends_the_request() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id, sequence=0))
        await settle()
        assert b.engine.verbs() == ["add", "cancel"]
        b.check()

    run(test())


def test_a_lost_router_takes_its_requests_with_it_and_no_others() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work("a")))
        b.serving.on_message(OTHER_ROUTER, Generate(work("b")))
        await settle()
        b.serving.on_router_lost(ROUTER)
        await settle()
        (left,) = b.serving.table.all()
        assert left.request_id == "b"
        b.serving.on_router_lost(OTHER_ROUTER)
        await settle()
        assert b.engine.verbs().count("cancel") == 2
        b.check()

    run(test())


def test_a_request_past_its_deadline_is_freed_before_its_router_is_notified() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work(timeout_s=0.0)))
        await b.router.has_sent.wait()
        (failed,) = b.router.answers()
        assert isinstance(failed, Failed) and failed.code == "timeout"
        assert b.engine.verbs()[-1:] in ([], ["cancel"])
        b.check()

    run(test())


def test_a_request_that_the_engine_refuses_fails_with_the_engine_s_code() -> None:
    async def test() -> None:
        b = bench()
        b.engine.error = RequestError("too_long", "prompt too long")
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        (failed,) = b.router.answers()
        assert (failed.code, failed.message) == ("too_long", "prompt too long")
        b.check()

    run(test())


def test_a_request_that_the_engine_gives_up_fails() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        b.turn(failed=[FailedRequest(b.inner(), "no block is left")])
        await settle()
        (failed,) = b.router.answers()
        assert (failed.code, failed.message) == ("internal", "no block is left")
        b.check()

    run(test())


def test_a_message_that_is_not_for_this_role_is_refused() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work()))
        (failed,) = b.router.answers()
        assert failed.code == "invalid"
        b.check()

    run(test())


def test_a_second_message_with_the_same_id_replaces_the_first_attempt() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        first = b.inner()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        assert ("cancel", first, None) in b.engine.asked
        b.turn(tokens=[output(first, 5), output(b.inner(), 6, finish="stop")])
        await settle()
        assert [t.token_ids for t in b.router.answers()] == [[6]]
        b.check()

    run(test())


def test_a_heartbeat_is_answered_with_the_load() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Heartbeat())
        (report,) = b.router.answers()
        assert isinstance(report, LoadReport)
        assert report.load.free_blocks == 10
        assert report.links[0].transport == "usm"
        assert not report.draining

    run(test())


def test_a_snapshot_is_numbered_by_the_last_published_batch() -> None:
    async def test() -> None:
        b = bench()
        b.turn(events=[BlocksStored([name(1)])])
        b.serving.on_message(ROUTER, SnapshotRequest())
        await settle()
        (snapshot,) = b.router.answers()
        assert isinstance(snapshot, Snapshot)
        assert (snapshot.sequence, snapshot.device) == (1, [name(1)])
        assert snapshot.host == [b"h" * 16]

    run(test())


def test_a_snapshot_has_the_number_of_when_it_was_taken() -> None:
    """This must hold even if this thread receives the snapshot and the next step at once: a router would miss the
    blocks of that step."""

    async def test() -> None:
        b = bench()
        b.turn(events=[BlocksStored([name(1)])])
        b.serving.on_message(ROUTER, SnapshotRequest())
        b.turn(events=[BlocksStored([name(2)])])
        await settle()
        (snapshot,) = b.router.answers()
        assert (snapshot.sequence, snapshot.device) == (1, [name(1)])
        assert b.events.sequence == 2

    run(test())


def test_draining_takes_nothing_new_and_lets_the_running_end() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work("old")))
        await settle()
        drained = asyncio.ensure_future(b.serving.drain(30.0))
        await settle()
        b.serving.on_message(ROUTER, Generate(work("new")))
        report, refused = b.router.answers()
        assert report.draining and refused.code == "draining"
        assert not drained.done()
        b.turn(tokens=[output(b.inner(), 5, finish="stop")])
        await drained
        b.check()

    run(test())


def test_what_does_not_end_in_time_is_ended_by_the_drain() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        await b.serving.drain(0.0)
        assert b.router.answers()[-1].code == "draining"
        assert b.engine.verbs() == ["add", "cancel"]
        b.check()

    run(test())


def test_an_answer_that_has_ended_is_not_failed_by_what_ends_all_in_the_same_turn() -> None:
    """Its router may still wait for the first token, which another instance sends: it would take it for a failure."""

    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        b.turn(tokens=[output(b.inner(), 5, finish="stop")])
        b.serving.fail_all("the engine broke")
        await settle()
        assert [type(answer) for answer in b.router.answers()] == [Tokens]
        b.check()

    run(test())


def test_a_broken_engine_fails_every_request() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        b.serving.fail_all("the engine broke")
        await b.serving.drain(30.0)
        assert b.router.answers()[-1].code == "internal"
        b.check()

    run(test())


def test_tokens_keep_their_positions() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work()))
        await settle()
        b.turn(tokens=[output(b.inner(), 9, position=41, finish="length")])
        (tokens,) = b.router.answers()
        assert tokens == Tokens(
            request_id=work().request_id, sequence=0, position=41, token_ids=[9], finish_reason="length"
        )
        await settle()
        b.check()

    run(test())
