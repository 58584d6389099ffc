import asyncio

import msgspec

from baton_serve.contracts.block_hash import checkpoint_hashes, hash_blocks
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import Pull
from baton_serve.kvtransfer.errors import PeerLost
from baton_serve.services.instance.attempt_table import AttemptEntry, AttemptTable
from baton_serve.services.instance.kv_sharing.block_serving import KVSharing
from baton_serve.services.instance.kv_sharing.pulling import Puller
from baton_serve.services.unified.main import UnifiedHandler
from tests.unit.instance.fakes import LAYOUT, ROUTER, Bench, Fetched, NoPulls, name, run, settle, ticket, work

STATES = msgspec.structs.replace(LAYOUT, state_bytes=LAYOUT.block_bytes + 1)
"""A checkpoint has two blocks."""


def bench() -> Bench:
    return Bench(lambda b: UnifiedHandler(b.calls, NoPulls()))


def puller_of(b: Bench, layout: KVLayout = LAYOUT) -> Puller:
    return Puller(b.calls, b.transfer, layout=layout, counter=b.transfer, clock=lambda: 1.0)


def request(tokens: int = 12) -> AttemptEntry:
    return AttemptTable().add(ROUTER, msgspec.structs.replace(work(), token_ids=list(range(tokens))))


def test_full_blocks_before_the_last_token_are_requested_and_received_ones_are_reported() -> None:
    async def test() -> None:
        b, asking = bench(), request()
        pulling = asyncio.create_task(puller_of(b).pull(asking, Pull(ticket=ticket(), num_blocks=3)))
        await settle()
        names = hash_blocks(asking.work.root, asking.work.token_ids[:8], 4)
        assert b.engine.asked[0] == ("begin_import", RequestId("import:t"), names)
        assert b.transfer.asked == [("fetch", [(names[0], 6), (names[1], 7)])]
        assert b.transfer.on_blocks is not None
        b.transfer.on_blocks(names[:1])
        b.transfer.fetched.set_result(Fetched(b""))
        await pulling
        assert b.engine.asked[1] == ("end_import", RequestId("import:t"), names[:1])
        assert asking.pulled is not None
        assert (asking.pulled.source, asking.pulled.num_tokens) == (ticket().source, 4)

    run(test())


def test_the_states_after_the_prefix_are_requested_with_it() -> None:
    async def test() -> None:
        b, asking = bench(), request()
        b.engine.num_imported = 4
        pulling = asyncio.create_task(puller_of(b, STATES).pull(asking, Pull(ticket=ticket(), num_blocks=2)))
        await settle()
        names = hash_blocks(asking.work.root, asking.work.token_ids[:8], 4)
        wanted = names + checkpoint_hashes(names[1], 2)
        assert b.engine.asked[0] == ("begin_import", RequestId("import:t"), wanted)
        assert b.transfer.asked == [("fetch", [(name, 6 + number) for number, name in enumerate(wanted)])]
        assert b.transfer.on_blocks is not None
        b.transfer.on_blocks(wanted)
        b.transfer.fetched.set_result(Fetched(b""))
        await pulling
        assert b.engine.asked[1] == ("end_import", RequestId("import:t"), wanted)
        assert asking.pulled is not None and asking.pulled.num_tokens == 8

    run(test())


def test_nothing_is_fetched_if_the_states_have_no_room() -> None:
    async def test() -> None:
        b, asking = bench(), request()
        b.engine.num_imported = 3
        await puller_of(b, STATES).pull(asking, Pull(ticket=ticket(), num_blocks=2))
        await settle()
        assert b.transfer.asked == []
        assert b.engine.asked[1] == ("end_import", RequestId("import:t"), [])

    run(test())


def test_a_source_that_dies_leaves_what_has_come_and_fails_nothing() -> None:
    async def test() -> None:
        b, asking = bench(), request()
        pulling = asyncio.create_task(puller_of(b).pull(asking, Pull(ticket=ticket(), num_blocks=3)))
        await settle()
        b.transfer.fetched.set_exception(PeerLost("it died"))
        await pulling
        assert b.engine.asked[1] == ("end_import", RequestId("import:t"), [])
        assert b.transfer.failures == ["PeerLost"]

    run(test())


def test_a_cancelled_request_gives_its_blocks_back() -> None:
    async def test() -> None:
        b, asking = bench(), request()
        pulling = asyncio.create_task(puller_of(b).pull(asking, Pull(ticket=ticket(), num_blocks=3)))
        await settle()
        pulling.cancel()
        await asyncio.wait([pulling])
        assert b.engine.asked[1] == ("end_import", RequestId("import:t"), [])

    run(test())


def test_nothing_is_fetched_where_nothing_is_missing() -> None:
    async def test() -> None:
        b, asking = bench(), request()
        b.engine.num_imported = 0
        await puller_of(b).pull(asking, Pull(ticket=ticket(), num_blocks=3))
        await puller_of(b).pull(asking, None)
        assert b.transfer.asked == []
        assert len(b.engine.asked) == 1

    run(test())


def test_what_is_cached_is_shared_until_it_was_read() -> None:
    async def test() -> None:
        b = bench()
        sharing = KVSharing(b.calls, b.transfer)
        b.transfer.ask(ticket(), [name(1), name(2), name(3)])
        await settle()
        assert b.transfer.asked == [("open", "t"), ("publish", [(name(1), 2), (name(2), 3)]), ("finish", b"")]
        assert [asked[0] for asked in b.engine.asked] == ["pin"]
        b.transfer.release.set_result("received")
        await sharing.close()
        assert b.engine.asked[-1] == ("unpin", RequestId("share:t"))

    run(test())


def test_more_shares_than_allowed_are_refused() -> None:
    async def test() -> None:
        b = bench()
        KVSharing(b.calls, b.transfer, max_shares=0)
        b.transfer.ask(ticket(), [name(1)])
        assert [asked[0] for asked in b.transfer.asked] == ["open", "fail"]

    run(test())
