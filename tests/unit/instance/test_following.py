"""A prompt that is read behind another instance: when the engine begins, and what becomes of it if that one fails."""

import asyncio

import msgspec
import pytest

from contracts.identity import RequestId
from contracts.messages import Cancel, Front, Prefill, Work
from engine.outputs import CompletedBlocks, NamedBlock, Place
from kvtransfer.errors import PeerLost
from tests.unit.instance.fakes import ROUTER, Bench, Fetched, name, output, run, settle, ticket, work
from tests.unit.instance.test_prefill_handler import bench

TOKENS = list(range(50))  # three blocks and two tokens
FRONT = Front(ticket=ticket(), num_blocks=3)


def long_work(tokens: list[int] = TOKENS) -> Work:
    return msgspec.structs.replace(work(), token_ids=tokens, num_prompt_tokens=len(tokens))


async def begun(num_blocks: int = 3) -> Bench:
    b = bench()
    front = Front(ticket=ticket(), num_blocks=num_blocks)
    b.serving.on_message(ROUTER, Prefill(long_work(), ticket(), None, front))
    await settle()
    return b


async def ended(b: Bench) -> None:
    """The prompt is read, and its blocks are fetched."""
    inner = b.inner()
    b.turn(completed=[CompletedBlocks(inner, [NamedBlock(name(0), 3)])], tokens=[output(inner, 5)], held=[inner])
    b.transfer.release.set_result("received")
    await settle()
    assert b.engine.asked[-1] == ("release", inner)
    b.check()


def test_the_engine_follows_once_the_first_layers_are_here() -> None:
    async def test() -> None:
        b = await begun()
        inner = b.inner()
        assert b.transfer.asked[-1] == ("fetch", [(name(1), 4), (name(2), 5)])
        assert b.engine.asked == [("reserve", inner)]
        assert b.transfer.on_blocks is not None and b.transfer.on_parts is not None
        b.transfer.on_blocks([name(1)])
        b.transfer.on_parts(1, 2)
        await settle()
        assert b.engine.asked[1:] == [("mark_received", inner, [name(1)]), ("follow", inner, 48)]
        assert not b.engine.gate.is_open
        b.transfer.on_blocks([name(2)])
        b.transfer.on_parts(2, 2)
        assert b.engine.gate.is_open
        b.transfer.fetched.set_result(Fetched(b""))
        await settle()
        assert not b.engine.gate.is_lost
        await ended(b)

    run(test())


@pytest.mark.parametrize("reached", [0, 1])
def test_a_front_that_fails_leaves_all_to_the_engine(reached: int) -> None:
    async def test() -> None:
        b = await begun()
        inner = b.inner()
        assert b.transfer.on_parts is not None
        if reached:
            b.transfer.on_parts(1, 2)
            await settle()
        b.transfer.fetched.set_exception(PeerLost("its process ended"))
        await settle()
        assert b.transfer.failures == ["PeerLost"]
        if reached:
            assert b.engine.gate.is_lost
            assert b.engine.verbs() == ["reserve", "follow"]
        else:
            assert b.engine.asked[1:] == [("read_alone", inner)]
        await ended(b)

    run(test())


def test_without_room_it_waits_its_turn_and_the_front_is_asked_for_nothing() -> None:
    async def test() -> None:
        b = bench()
        b.engine.free_blocks = 0
        b.serving.on_message(ROUTER, Prefill(long_work(), ticket(), None, FRONT))
        await settle()
        assert b.transfer.asked[-1] == ("fetch", [])
        assert b.engine.asked == [("add", b.inner(), "prefill")]
        await ended(b)

    run(test())


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_what_is_here_already_is_not_waited_for(num_blocks: int) -> None:
    async def test() -> None:
        b = await begun(num_blocks)
        assert b.transfer.asked[-1] == ("fetch", [])
        assert b.engine.verbs() == ["reserve", "read_alone"]
        await ended(b)

    run(test())


def test_a_front_that_claims_the_whole_prompt_leaves_the_last_token() -> None:
    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(long_work(TOKENS[:48]), ticket(), None, FRONT))
        await settle()
        assert b.transfer.asked[-1] == ("fetch", [(name(1), 4)])
        assert b.transfer.on_parts is not None
        b.transfer.on_parts(1, 1)
        await settle()
        assert b.engine.asked[-1] == ("follow", b.inner(), 32)
        await ended(b)

    run(test())


def test_cancelled_it_frees_only_when_nothing_writes_any_more() -> None:
    async def test() -> None:
        b = await begun()
        inner = b.inner()
        assert b.transfer.on_parts is not None
        b.transfer.on_parts(1, 2)
        await settle()
        b.transfer.stopping = asyncio.get_running_loop().create_future()
        b.transfer.release.set_result("cancelled")
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        assert b.engine.verbs() == ["reserve", "follow"], "freed while a copy may still write"
        assert not b.engine.gate.is_lost, "the engine may free at once"
        b.transfer.stopping.set_result(None)
        await settle()
        assert b.engine.gate.is_lost
        assert b.engine.asked[-1] == ("cancel", inner, None)
        b.check()

    run(test())


def test_what_has_come_is_handed_on_at_once_as_far_as_nothing_lacks_before_it() -> None:
    async def test() -> None:
        b = await begun()
        assert b.transfer.on_blocks is not None and b.transfer.on_parts is not None
        assert b.transfer.asked[:-1] == [("open", "t"), ("publish", [(name(0), 3)])], "what was cached"
        b.transfer.on_blocks([name(2)])
        assert b.transfer.verbs()[-1] == "fetch"
        b.transfer.on_blocks([name(1)])
        assert b.transfer.asked[-1] == ("publish", [(name(1), 4), (name(2), 5)])
        b.transfer.on_parts(1, 1)
        await settle()
        await ended(b)

    run(test())


def test_a_part_has_its_first_tokens_from_the_part_before_it() -> None:
    async def test() -> None:
        b = bench()
        first = msgspec.structs.replace(long_work(TOKENS[:20]), request_id=RequestId("first"))
        b.serving.on_message(ROUTER, Prefill(first))
        await settle()
        rest = msgspec.structs.replace(long_work(), token_ids=TOKENS[20:])
        front = Front(ticket=ticket(), num_blocks=3, after=first.request_id, known_tokens=20)
        b.serving.on_message(ROUTER, Prefill(rest, None, None, front))
        await settle()
        assert b.serving.table.all()[1].work.token_ids == TOKENS
        assert b.transfer.asked[-1] == ("fetch", [(name(1), 4), (name(2), 5)])
        for request_id in ("first", "r"):
            b.serving.on_message(ROUTER, Cancel(RequestId(request_id)))
        await settle()
        b.check()

    run(test())


@pytest.mark.parametrize("known", [21, 30])
def test_a_part_without_its_first_tokens_fails_and_so_do_those_after_it(known: int) -> None:
    async def test() -> None:
        b = bench()
        for number, after in enumerate(("nobody", "0")):
            rest = msgspec.structs.replace(long_work(), request_id=RequestId(str(number)), token_ids=TOKENS[20:])
            front = Front(ticket=ticket(), num_blocks=3, after=RequestId(after), known_tokens=known)
            b.serving.on_message(ROUTER, Prefill(rest, ticket(), None, front))
        b.transfer.release.set_result("failed")
        await settle()
        assert [failed.code for failed in b.router.answers()] == ["handoff_failed"] * 2
        assert b.transfer.verbs().count("fail") == 2
        b.check()

    run(test())


def test_one_that_nobody_fetches_is_freed_when_its_end_is_cancelled() -> None:
    """A router that has its first token cancels what is left, while the fetch is being ended."""

    async def test() -> None:
        b = bench()
        b.serving.on_message(ROUTER, Prefill(long_work(), None, None, FRONT))
        await settle()
        inner = b.inner()
        assert b.transfer.on_parts is not None
        b.transfer.on_parts(2, 2)
        await settle()
        b.transfer.stopping = asyncio.get_running_loop().create_future()
        b.turn(tokens=[output(inner, 5, finish="length")], held=[inner])
        await settle()
        b.serving.on_message(ROUTER, Cancel(work().request_id))
        await settle()
        assert b.engine.verbs() == ["reserve", "follow"]
        b.transfer.stopping.set_result(None)
        await settle()
        assert b.engine.asked[-1] == ("release", inner)
        b.check()

    run(test())


async def without_its_front(b: Bench, timeout_s: float = 30.0) -> RequestId:
    """Read alone, if there is room."""
    b.engine.can_read_alone = False
    front = Front(ticket=msgspec.structs.replace(ticket(), timeout_s=timeout_s), num_blocks=0)
    b.serving.on_message(ROUTER, Prefill(long_work(), None, None, front))
    await settle()
    return b.inner()


def test_without_room_to_read_alone_the_engine_is_asked_again_when_blocks_are_free() -> None:
    async def test() -> None:
        b = bench()
        inner = await without_its_front(b)
        for _ in range(3):
            b.turn()
            await settle()
        assert b.engine.verbs().count("read_alone") == 1, "asked again though nothing was freed"
        b.engine.can_read_alone = True
        b.engine.free_blocks += 1
        b.turn()
        await settle()
        assert b.engine.asked[1:] == [("read_alone", inner)] * 2
        await ended(b)

    run(test())


def test_one_that_finds_no_room_to_read_alone_in_time_fails() -> None:
    async def test() -> None:
        b = bench()
        await without_its_front(b, timeout_s=0.01)
        await b.router.has_sent.wait()
        (failed,) = b.router.answers()
        assert (failed.code, failed.message) == ("overloaded", "no room for the prompt within 0.01 s")
        b.check()

    run(test())


def test_parts_that_could_not_reserve_early_keep_their_place() -> None:
    async def test() -> None:
        b = bench()
        b.engine.free_blocks = 0
        parts = [msgspec.structs.replace(long_work(), request_id=RequestId(str(number))) for number in range(3)]
        b.serving.on_message(ROUTER, Prefill(parts[0]))
        for part, lead in zip(parts[1:], parts, strict=False):
            b.serving.on_message(
                ROUTER, Prefill(part, None, None, Front(ticket=ticket(), num_blocks=1, after=lead.request_id))
            )
        b.serving.on_message(ROUTER, Prefill(msgspec.structs.replace(long_work(), request_id=RequestId("later"))))
        await settle()
        assert b.engine.places == [None, None]
        for request_id in ("0", "1", "2", "later"):
            b.serving.on_message(ROUTER, Cancel(RequestId(request_id)))
            await settle()
        assert b.engine.places[2:] == [Place(0, 1), Place(0, 1)], "the first one's"
        b.check()

    run(test())
