import asyncio

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import Cancel, Generate, Prefill
from baton_serve.engine.core.outputs import CompletedBlocks, CompletedLayerGroups, FailedRequest, NamedBlock
from baton_serve.engine.errors import RequestError
from baton_serve.services.instance.first_tokens import FirstToken, decode_first_tokens
from baton_serve.services.prefill.handler import PrefillHandler
from tests.unit.instance.fakes import ROUTER, Bench, NoPulls, name, output, run, settle, ticket, work


def bench() -> Bench:
    def make(b: Bench) -> PrefillHandler:
        return PrefillHandler(b.calls, b.transfer, NoPulls(), counter=b.transfer, clock=lambda: 1.25)

    return Bench(make)


def test_blocks_are_handed_on_as_they_complete_and_first_tokens_with_the_last() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(sequences=(0, 1)), ticket()))
        await settle()
        inner = b.inner()
        assert b.engine.asked == [("add", inner, "prefill")]
        b.turn(completed=[CompletedBlocks(inner, [NamedBlock(name(0), 3)])])
        b.turn(
            completed=[CompletedBlocks(inner, [NamedBlock(name(1), 4)])],
            tokens=[output(inner, 5), output(inner, 6, sequence=1, finish="stop")],
            held=[inner],
        )
        assert b.transfer.verbs() == ["open", "publish", "publish", "finish"]
        first = decode_first_tokens(b.transfer.asked[-1][1])
        assert first.tokens == [FirstToken(0, 5, False), FirstToken(1, 6, True)]
        assert first.since_end_s == 0.25
        assert [t.token_ids for t in b.router.answers()] == [[5], [6]]
        await settle()
        assert b.engine.verbs() == ["add"], "freed while it may still be read"
        b.transfer.release.set_result("received")
        await settle()
        assert b.engine.asked[-1] == ("release", inner)
        assert "cancel" not in b.transfer.verbs()
        b.check()

    run(test())


def test_parts_of_the_last_blocks_are_handed_on_before_the_step_has_ended() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        inner = b.inner()
        last = CompletedBlocks(inner, [NamedBlock(name(0), 3)])
        b.serving.on_layer_groups(CompletedLayerGroups(range(1), [last, CompletedBlocks(RequestId("gone"), [])]))
        assert b.transfer.asked[-1] == ("publish_parts", [(name(0), 3)], range(1))
        b.turn(completed=[last], tokens=[output(inner, 5)], held=[inner])
        assert b.transfer.verbs() == ["open", "publish_parts", "publish", "finish"]
        b.transfer.release.set_result("received")
        await settle()
        b.serving.on_layer_groups(CompletedLayerGroups(range(1, 2), [last]))
        assert b.transfer.verbs()[-1] == "finish", "a part that comes late is nobody's"
        b.check()

    run(test())


def test_with_ranks_that_send_their_parts_the_engine_mirrors_only_on_demand() -> None:
    async def test() -> None:
        b = bench()
        b.transfer.by_ranks = True
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        inner = b.inner()
        assert b.engine.asked == [("add", inner, "prefill", "in parts")]
        assert b.transfer.mirror is not None
        await b.transfer.mirror()
        assert b.engine.asked[-1] == ("mirror", inner)
        b.turn(tokens=[output(inner, 5)], held=[inner])
        b.transfer.release.set_result("received")
        await settle()
        b.check()

    run(test())


def test_whole_blocks_that_are_fetched_before_the_engine_has_the_request_are_mirrored_from_the_first_one() -> None:
    """A cached prefix is still being pulled. A request with parts would leave nothing in the mirror that is sent."""

    class SlowPulls(NoPulls):
        def __init__(self) -> None:
            self.has_ended = asyncio.Event()

        async def pull(self, *_: object) -> None:
            await self.has_ended.wait()

    async def test() -> None:
        pulls = SlowPulls()
        b = Bench(lambda b: PrefillHandler(b.calls, b.transfer, pulls, counter=b.transfer, clock=lambda: 1.25))
        b.transfer.by_ranks = True
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        assert b.transfer.mirror is not None and not b.engine.asked
        await b.transfer.mirror()
        pulls.has_ended.set()
        await settle()
        inner = b.inner()
        assert b.engine.asked[-1] == ("add", inner, "prefill")
        b.turn(tokens=[output(inner, 5)], held=[inner])
        b.transfer.release.set_result("received")
        await settle()
        b.check()

    run(test())


def test_cancelled_while_computing_it_frees_only_when_nothing_reads_any_more() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        assert b.transfer.verbs() == ["open", "cancel"]
        assert b.engine.verbs() == ["add"]
        b.transfer.release.set_result("cancelled")
        await settle()
        assert b.engine.verbs() == ["add", "cancel"]
        assert not b.router.sent
        b.check()

    run(test())


def test_a_cancel_that_comes_twice_frees_once() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        b.serving.on_router_lost(ROUTER)
        await settle()
        b.transfer.release.set_result("cancelled")
        await settle()
        assert b.engine.verbs() == ["add", "cancel"]
        b.check()

    run(test())


def test_blocks_handed_on_before_the_engine_gave_the_request_up_stay_while_they_are_read() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        inner = b.inner()
        b.turn(completed=[CompletedBlocks(inner, [NamedBlock(name(0), 3)])])
        b.turn(failed=[FailedRequest(inner, "the device ran out of memory")])
        await settle()
        assert b.transfer.asked[2] == ("fail", "the device ran out of memory")
        assert b.engine.verbs() == ["add"], "freed while it may still be read"
        b.transfer.release.set_result("failed")
        await settle()
        assert b.engine.verbs() == ["add", "cancel"]
        b.check()

    run(test())


def test_held_blocks_are_released_when_the_router_cancels() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        inner = b.inner()
        b.turn(tokens=[output(inner, 5)], held=[inner])
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        b.transfer.release.set_result("cancelled")
        await settle()
        assert b.engine.asked[-1] == ("release", inner)
        b.check()

    run(test())


def test_a_sink_that_dies_while_the_prompt_is_computed_ends_the_request() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        b.transfer.release.set_result("lost")
        await settle()
        (failed,) = b.router.answers()
        assert (failed.code, failed.lost) == ("handoff_failed", "decode-0")
        assert b.transfer.failures == ["lost"]
        assert b.engine.verbs() == ["add", "cancel"]
        b.check()

    run(test())


def test_a_sink_that_cancels_notifies_the_router_itself() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        b.transfer.release.set_result("cancelled")
        await settle()
        assert not b.router.sent
        assert b.engine.verbs() == ["add", "cancel"]
        b.check()

    run(test())


def test_a_sink_that_dies_after_the_first_token_frees_silently() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        inner = b.inner()
        b.turn(tokens=[output(inner, 5)], held=[inner])
        await settle()
        b.transfer.release.set_result("lost")
        await settle()
        assert [type(m).__name__ for m in b.router.answers()] == ["Tokens"]
        assert b.engine.verbs() == ["add", "release"]
        b.check()

    run(test())


def test_a_refused_prompt_fails_its_transfer_at_once() -> None:
    async def test() -> None:
        b = bench()
        b.engine.error = RequestError("too_long", "prompt too long")
        b.transfer.release.set_result("failed")
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        assert ("fail", "prompt too long") in b.transfer.asked
        assert b.router.answers()[-1].code == "too_long"
        assert b.transfer.failures == [], "the client's fault is no failure of a handoff"
        b.check()

    run(test())


def test_what_comes_while_it_drains_fails_its_transfer_at_once() -> None:
    async def test() -> None:
        b = bench()
        b.serving.refuse_new()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        b.serving.on_message(ROUTER, Prefill(work()))
        assert b.transfer.asked == [("open", "t"), ("fail", "the instance is shutting down")]
        b.check()

    run(test())


def test_without_a_ticket_the_blocks_are_released_with_the_first_token() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work()))
        await settle()
        inner = b.inner()
        b.turn(completed=[CompletedBlocks(inner, [])], tokens=[output(inner, 5, finish="length")], held=[inner])
        await settle()
        assert b.engine.verbs() == ["add", "release"]
        assert not b.transfer.asked
        b.check()

    run(test())


def test_blocks_that_complete_after_a_cancel_are_not_handed_on() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(work(), ticket()))
        await settle()
        inner = b.inner()
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        b.turn(completed=[CompletedBlocks(inner, [NamedBlock(name(0), 3)])], tokens=[output(inner, 5)], held=[inner])
        assert b.transfer.verbs() == ["open", "cancel"]
        b.transfer.release.set_result("cancelled")
        await settle()
        assert b.engine.asked[-1] == ("release", inner), "by then it was held"
        b.check()

    run(test())


def test_while_no_decode_instance_is_ready_it_generates_the_whole_answer() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work(sequences=(0, 1))))
        await settle()
        inner = b.inner()
        assert b.engine.asked == [("add", inner, "generate")]
        b.turn(tokens=[output(inner, 5), output(inner, 6, sequence=1, finish="stop")])
        b.turn(tokens=[output(inner, 7, position=1, finish="length")])
        await settle()
        assert [t.token_ids for t in b.router.answers()] == [[5], [6], [7]]
        assert b.engine.verbs() == ["add"] and b.transfer.verbs() == [], "nothing is kept or handed off"
        b.check()

    run(test())


def test_an_answer_that_it_generates_is_freed_when_it_is_cancelled() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work(sequences=(0, 1))))
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id, 1))
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        assert b.engine.verbs() == ["add", "cancel", "cancel"]
        assert not b.router.sent
        b.check()

    run(test())
