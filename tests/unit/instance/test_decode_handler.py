import asyncio
import gc
import time
import weakref
from concurrent.futures import Future
from typing import Literal

import msgspec
import pytest

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.messages import Cancel, Decode, Generate, HandoffReport, Prefill
from baton_serve.engine.errors import RequestError
from baton_serve.kvtransfer import Translation
from baton_serve.kvtransfer.errors import LocalTransferError, PeerLost, SourceFailed
from baton_serve.services.common.tracing import Span
from baton_serve.services.decode import handler
from baton_serve.services.decode.block_queue import BlockQueue
from baton_serve.services.decode.handler import DecodeHandler
from baton_serve.services.decode.kv_arrivals import ArrivedBlocks, HandoffAdmission
from baton_serve.services.instance.first_tokens import FirstToken, encode_first_tokens
from tests.unit.instance.fakes import ROUTER, Bench, Fetched, NoPulls, name, output, run, settle, ticket, work


def bench(fallback: Literal["fail", "local"] = "fail", *, max_waiting: int = 8) -> Bench:
    return Bench(
        lambda b: DecodeHandler(
            b.calls,
            b.transfer,
            b.router,
            NoPulls(),
            counter=b.transfer,
            fallback=fallback,
            block_queue=BlockQueue(b.calls, max_waiting=max_waiting),
        ),
    )


def fetched(*tokens: FirstToken) -> Fetched:
    return Fetched(encode_first_tokens(list(tokens), since_end_s=0.05))


@pytest.mark.parametrize("is_valid", [True, False])
def test_a_request_waits_for_its_grammar_outside_of_the_engine(is_valid: bool) -> None:
    async def test() -> None:
        b = bench()
        for message in (Decode(work("a", grammar="g"), ticket()), Generate(work("b", grammar="g"))):
            b.serving.on_message(ROUTER, message)
        await settle()
        assert b.engine.asked == [("compile_grammar", "g")] * 2
        assert b.transfer.asked == []
        if is_valid:
            b.engine.compiled.set_result(None)
        else:
            b.engine.compiled.set_exception(RequestError("invalid", "structured output: wrong"))
        await settle()
        if is_valid:
            assert sorted(b.engine.verbs()[2:]) == ["add", "reserve"]
        else:
            assert [failed.message for failed in b.router.answers()] == ["structured output: wrong"] * 2
            assert "add" not in b.engine.verbs() and "reserve" not in b.engine.verbs()

    run(test())


class CompiledGrammar:
    """Stands for a compiled grammar of the engine."""


@pytest.mark.parametrize("ending", ["finished", "cancelled"])
@pytest.mark.parametrize("message", [Decode(work("a", grammar="g"), ticket()), Generate(work("a", grammar="g"))])
def test_an_attempt_holds_its_compiled_grammar_until_it_ends(message: Decode | Generate, ending: str) -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, message)
        await settle()
        compiled = CompiledGrammar()
        is_held = weakref.ref(compiled)
        b.engine.compiled.set_result(compiled)
        await settle()
        b.engine.compiled = Future()
        del compiled
        assert is_held(), "a step would compile the grammar again"
        if ending == "cancelled":
            b.serving.on_message(ROUTER, Cancel(request_id=work("a").request_id))
        else:
            b.transfer.fetched.set_result(fetched(FirstToken(0, 42, False)))
            await settle()
            b.turn(tokens=[output(b.inner(), 43, position=1, finish="stop")])
        await settle()
        b.check()
        gc.collect()
        assert is_held() is None, "the grammar's memory must be freed with the request"

    run(test())


def test_a_cancelled_request_does_not_cancel_the_compilation_that_others_wait_for() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work("a", grammar="g")))
        b.serving.on_message(ROUTER, Generate(work("b", grammar="g")))
        await settle()
        b.serving.on_message(ROUTER, Cancel(request_id=work("a").request_id))
        await settle()
        b.engine.compiled.set_result(None)
        await settle()
        assert b.engine.verbs().count("add") == 1

    run(test())


def test_blocks_are_reserved_fetched_and_the_answer_is_written_from_the_second_token_on() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        inner = b.inner()
        assert b.transfer.asked == [("fetch", [(name(1), 4), (name(2), 5)])]
        assert b.transfer.on_blocks is not None
        b.transfer.on_blocks([name(1)])
        b.transfer.on_blocks([name(2)])
        b.transfer.fetched.set_result(fetched(FirstToken(0, 42, False)))
        await settle()
        assert b.engine.asked[1:] == [
            ("mark_received", inner, [name(1), name(2)]),
            ("admit", inner, {0: 42}),
        ]
        (report,) = b.router.answers()
        assert report.to_step_s > report.exposed_s
        assert msgspec.structs.replace(report, to_step_s=0.0) == HandoffReport(
            request_id=work().request_id,
            transport="usm",
            handoff_s=0.5,
            exposed_s=0.1 + 0.05,
            transferred_blocks=2,
            reused_blocks=1,
            transferred_bytes=2048,
        )
        b.turn(tokens=[output(inner, 43, position=1, finish="stop")])
        await settle()
        assert b.engine.verbs()[-1] == "admit"
        b.check()

    run(test())


def test_the_engine_is_notified_before_the_fetching_task_runs_again() -> None:
    async def test() -> None:
        b = bench()
        request = b.serving.table.add(ROUTER, work())
        reservation = b.engine.reserve(request.work)
        assert reservation is not None
        now = [20.25]
        reports: list[HandoffReport] = []
        admission = HandoffAdmission(
            request, reservation, ArrivedBlocks(b.calls, request), b.calls, reports.append, lambda: now[0]
        )
        admission.arrivals.add([name(1), name(2)])
        admission.begin(fetched(FirstToken(0, 42, False)))
        assert b.engine.verbs() == ["reserve", "mark_received", "admit"]
        assert request.is_admitted
        now[0] = 30.0
        (report,) = reports
        assert report.exposed_s == pytest.approx(0.15)
        assert report.to_step_s == pytest.approx(0.15 + 0.25)  # `ended_at` is 20

    run(test())


def test_the_router_gets_the_handoff_report_before_any_token() -> None:
    """This must hold even if the fetch's task had no time to run while the engine generated the whole answer."""

    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        inner = b.inner()
        b.transfer.ended = lambda: b.turn(tokens=[output(inner, 43, position=1, finish="stop")])
        b.transfer.fetched.set_result(fetched(FirstToken(0, 42, False)))
        await settle()
        assert [type(m).__name__ for m in b.router.answers()] == ["HandoffReport", "Tokens"]
        b.check()

    run(test())


class Spans(Span):
    """Remembers when what was called how began and was over."""

    def __init__(self, seen: dict[str, list[float | None]], name: str = "") -> None:
        super().__init__({})
        self._seen = seen
        self._name = name

    def child(self, name: str, *, at: float | None = None) -> Span:
        self._seen[name] = [at]
        return Spans(self._seen, name)

    def over(self, at: float) -> None:
        self._seen[self._name].append(at)


def test_a_trace_has_the_times_of_the_events_not_of_the_task_that_handles_them() -> None:
    async def test() -> None:
        b, seen = bench(), dict[str, list[float | None]]()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        b.serving.table.all()[0].span = Spans(seen)
        await settle()
        before, inner = time.monotonic(), b.inner()
        b.transfer.ended = lambda: b.turn(tokens=[output(inner, 43, position=1, finish="stop")])
        b.transfer.fetched.set_result(fetched(FirstToken(0, 42, False)))
        await settle()
        ended_at = Fetched(b"").ended_at
        assert seen["transfer"] == [None, ended_at]
        began, over = seen["write"]
        assert began == ended_at and over is not None and over >= before
        b.check()

    run(test())


def test_a_request_that_is_cancelled_between_the_fetch_and_its_report_is_freed() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        b.transfer.ended = lambda: b.serving.on_message(ROUTER, Cancel(work().request_id))
        b.transfer.fetched.set_result(fetched(FirstToken(0, 42, False)))
        await settle()
        assert b.engine.verbs()[-2:] == ["admit", "cancel"]
        b.check()

    run(test())


def test_a_source_of_another_layout_is_asked_by_its_own_names() -> None:
    async def test() -> None:
        b = bench()
        layout = KVLayout(fingerprint="tiny", num_layers=1, num_kv_heads=1, block_tokens=2, head_dim=2, dtype="float32")
        root = BlockHash(bytes(16))
        foreign = msgspec.structs.replace(ticket(), source_layout=layout, source_root=root)
        b.serving.on_message(ROUTER, Decode(work(), foreign))
        await settle()
        tokens = work().token_ids
        names = hash_blocks(root, tokens, 2)
        assert b.transfer.translation == Translation(layout, names, first_block=1, num_tokens=len(tokens))
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        b.check()

    run(test())


def test_sequences_that_ended_with_their_first_token_are_not_admitted() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(sequences=(0, 1)), ticket()))
        await settle()
        inner = b.inner()
        b.transfer.fetched.set_result(fetched(FirstToken(0, 5, True), FirstToken(1, 6, False)))
        await settle()
        assert b.engine.asked[-1] == ("admit", inner, {1: 6})
        b.turn(tokens=[output(inner, 7, sequence=1, position=1, finish="length")])
        await settle()
        b.check()

    run(test())


def test_when_every_sequence_has_ended_the_reservation_is_freed() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        b.transfer.fetched.set_result(fetched(FirstToken(0, 5, True)))
        await settle()
        assert b.engine.verbs() == ["reserve", "cancel"]
        assert [type(m).__name__ for m in b.router.answers()] == ["HandoffReport"]
        b.check()

    run(test())


def test_a_sequence_cancelled_during_the_handoff_is_not_admitted() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(sequences=(0, 1)), ticket()))
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id, sequence=0))
        assert b.engine.verbs() == ["reserve"]
        b.transfer.fetched.set_result(fetched(FirstToken(0, 5, False), FirstToken(1, 6, False)))
        await settle()
        assert b.engine.asked[-1] == ("admit", b.inner(), {1: 6})
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        b.check()

    run(test())


def test_a_lost_source_is_blamed_after_everything_is_free() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        b.transfer.fetched.set_exception(PeerLost("gone"))
        await settle()
        (failed,) = b.router.answers()
        assert (failed.code, failed.lost) == ("handoff_failed", "prefill-0")
        assert b.engine.verbs() == ["reserve", "cancel"]
        b.check()

    run(test())


def test_blocks_that_arrived_before_a_failure_are_kept_in_the_cache() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        assert b.transfer.on_blocks is not None
        b.transfer.on_blocks([name(1)])
        b.transfer.fetched.set_exception(PeerLost("gone"))
        await settle()
        assert b.engine.verbs() == ["reserve", "mark_received", "cancel"]
        b.check()

    run(test())


def test_blocks_that_came_in_parts_are_reported_as_such() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        inner = b.inner()
        assert b.transfer.on_blocks is not None and b.transfer.on_rank_blocks is not None
        # One rank failed after the first block.
        b.transfer.on_rank_blocks([name(1)])
        b.transfer.on_blocks([name(2)])
        b.transfer.fetched.set_result(fetched(FirstToken(0, 42, False)))
        await settle()
        assert b.engine.asked[1:] == [
            ("mark_received", inner, [name(2)]),
            ("mark_received", inner, [name(1)], "in parts"),
            ("admit", inner, {0: 42}),
        ]
        b.turn(tokens=[output(inner, 43, position=1, finish="stop")])
        await settle()
        b.check()

    run(test())


def test_a_source_that_gave_up_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "SOURCE_REPORT_S", 0.01)

    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        b.transfer.fetched.set_exception(SourceFailed("cancelled"))
        await asyncio.sleep(0.02)
        await settle()
        (failed,) = b.router.answers()
        assert (failed.code, failed.lost) == ("handoff_failed", None)
        b.check()

    run(test())


def test_a_source_that_gave_up_reports_that_itself() -> None:
    """Before, a broken image counted as a failure of the decode instance, and was computed again."""

    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        b.transfer.fetched.set_exception(SourceFailed("an image cannot be read"))
        await settle()
        assert b.router.answers() == []
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        assert b.router.answers() == []
        assert b.engine.verbs() == ["reserve", "cancel"]
        assert b.transfer.failures == [], "a broken image is no failure of a handoff"
        b.check()

    run(test())


def test_a_fault_of_this_side_blames_nobody() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        b.transfer.fetched.set_exception(LocalTransferError("closed"))
        await settle()
        (failed,) = b.router.answers()
        assert (failed.code, failed.lost) == ("handoff_failed", None)
        b.check()

    run(test())


def test_if_asked_to_it_computes_the_prompt_itself_when_the_handoff_fails() -> None:
    async def test() -> None:
        b = bench("local")
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        inner = b.inner()
        b.transfer.fetched.set_exception(PeerLost("gone"))
        await settle()
        assert b.engine.verbs() == ["reserve", "admit_locally"]
        b.turn(tokens=[output(inner, 5, finish="stop")])
        await settle()
        assert [m.token_ids for m in b.router.answers()] == [[5]]
        b.check()

    run(test())


def test_an_undecodable_payload_fails_the_handoff() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        b.transfer.fetched.set_result(Fetched(b"garbage"))
        await settle()
        assert b.router.answers()[-1].code == "handoff_failed"
        assert b.engine.verbs() == ["reserve", "cancel"]
        b.check()

    run(test())


def test_cancelled_during_the_fetch_it_frees_only_when_no_copy_writes_any_more() -> None:
    async def test() -> None:
        b = bench()
        b.transfer.stopping = asyncio.get_running_loop().create_future()
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        assert b.engine.verbs() == ["reserve"]
        b.transfer.stopping.set_result(None)
        await settle()
        assert b.engine.verbs() == ["reserve", "cancel"]
        b.check()

    run(test())


def test_without_room_it_waits_and_goes_on_when_blocks_are_free() -> None:
    async def test() -> None:
        b = bench()
        b.engine.free_blocks = 1
        b.serving.on_message(ROUTER, Decode(work(), ticket()))
        await settle()
        assert b.serving.load().waiting == 1
        assert not b.transfer.asked
        b.turn()
        await settle()
        assert not b.transfer.asked
        b.engine.free_blocks = 2
        b.turn()
        await settle()
        assert b.transfer.verbs() == ["fetch"]
        b.serving.on_router_lost(ROUTER)
        await settle()
        b.check()

    run(test())


def test_without_room_until_the_ticket_ends_it_is_overloaded() -> None:
    async def test() -> None:
        b = bench()
        b.engine.free_blocks = 0
        hasty = msgspec.structs.replace(ticket(), timeout_s=0.0)
        b.serving.on_message(ROUTER, Decode(work(), hasty))
        await b.router.has_sent.wait()
        assert b.router.answers()[-1].code == "overloaded"
        b.check()

    run(test())


def test_it_also_generates_but_does_not_prefill() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Generate(work("a")))
        b.serving.on_message(ROUTER, Prefill(work("b")))
        await settle()
        assert b.engine.asked[0][2] == "generate"
        assert b.router.answers()[-1].code == "invalid"
        b.serving.on_router_lost(ROUTER)
        await settle()
        b.check()

    run(test())
