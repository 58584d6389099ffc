import asyncio

from baton_serve.contracts.identity import TicketId
from baton_serve.contracts.messages import HotBlocks, MigrateIn, MigrationTickets
from baton_serve.services.instance.drain.migration import DrainMigration
from baton_serve.services.instance.kv_sharing.block_serving import KVSharing
from baton_serve.services.instance.kv_sharing.pulling import Puller
from baton_serve.services.unified.main import UnifiedHandler
from tests.unit.instance.fakes import IDENTITY, LAYOUT, Bench, Fetched, NoPulls, name, run, settle, ticket


def handover_of(*, timeout_s: float = 5.0) -> tuple[Bench, DrainMigration]:
    b = Bench(lambda b: UnifiedHandler(b.calls, NoPulls()))
    handover = DrainMigration(
        IDENTITY,
        engine=b.calls,
        router=b.router,
        sharing=KVSharing(b.calls, b.transfer),
        puller=Puller(b.calls, b.transfer, layout=LAYOUT, counter=b.transfer),
        timeout_s=timeout_s,
        max_blocks=8,
    )
    return b, handover


def test_hot_blocks_are_offered_and_waited_for_until_they_were_read() -> None:
    async def test() -> None:
        b, handover = handover_of()
        leaving = asyncio.create_task(handover.migrate_out())
        await settle()
        (hot,) = b.router.answers()
        assert isinstance(hot, HotBlocks)
        assert hot.names == [name(1), name(2)]
        handover.on_migration_tickets(MigrationTickets([TicketId("t")]))
        b.transfer.ask(ticket(), hot.names)
        await settle()
        assert not leaving.done()
        b.transfer.release.set_result("received")
        await leaving

    run(test())


def test_nobody_to_inherit_or_no_answer_delays_nothing_for_long() -> None:
    async def test() -> None:
        _, handover = handover_of()
        leaving = asyncio.create_task(handover.migrate_out())
        await settle()
        handover.on_migration_tickets(MigrationTickets([]))
        await leaving
        _, late = handover_of(timeout_s=0.01)
        await late.migrate_out()

    run(test())


def test_an_heir_asks_even_if_it_lacks_nothing() -> None:
    async def test() -> None:
        b, handover = handover_of()
        b.engine.num_imported = 0
        handover.on_migrate_in(MigrateIn(ticket=ticket(), names=[name(1)]))
        await settle()
        assert b.transfer.asked == [("fetch", [])]
        b.transfer.fetched.set_result(Fetched(b""))
        await handover.close()

    run(test())


def test_a_draining_instance_takes_no_blocks_and_does_not_let_the_source_wait() -> None:
    async def test() -> None:
        b, handover = handover_of()
        handover.on_migrate_in(MigrateIn(ticket=ticket(), names=[name(1)]), is_draining=True)
        await settle()
        assert b.transfer.asked == [("fetch", [])]
        b.transfer.fetched.set_result(Fetched(b""))
        await handover.close()

    run(test())
