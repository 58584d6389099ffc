"""Whole handoffs between engines of two ranks, each of which sends its part of the blocks to the same rank.

The ranks are threads, and keep their parts in memory of their own, as on devices.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.engine import Engine, EngineConfig
from baton_serve.engine.core.outputs import Reservation
from baton_serve.kvtransfer import RankedTransferNode, SilentObserver, TransferNode
from baton_serve.services.instance.rank_transfers import RANK_PROGRAM
from baton_serve.services.instance.rank_transfers.part_client import RemoteRank
from baton_serve.services.instance.rank_transfers.start_ranks import start_ranks
from tests.contract.test_transports import only
from tests.devices import DEVICE
from tests.engine.driving import make_work, place_kv_caches
from tests.engine.driving import run as run_engine
from tests.engine.rank_threads import use_threads
from tests.references import Reference, References

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="ranks are threads of one process")


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    place_kv_caches(monkeypatch, "mirrored")


@dataclass
class Side:
    """One instance of two ranks."""

    engine: Engine
    instance: InstanceId
    node: RankedTransferNode
    division: str
    broken: list[str]
    """Why the instance had to end."""


@contextlib.asynccontextmanager
async def side(reference: Reference, name: str, transport: str, **settings: Any) -> AsyncIterator[Side]:
    config = EngineConfig(
        model=str(reference.folder),
        device="cpu",
        block_size=16,
        kv_cache_bytes=4 << 20,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        **settings,
    )
    instance, broken = InstanceId(name), list[str]()
    with Engine(config, rank_program=RANK_PROGRAM) as engine:
        whole = TransferNode(
            instance=instance,
            generation=Generation(1),
            layout=engine.layout,
            memory=engine.kv,
            settings=only("zeromq"),
        )
        await whole.start()
        started = await start_ranks(
            engine,
            instance,
            Generation(1),
            settings=only(transport),
            observer=SilentObserver(),
            on_broken=broken.append,
        )
        node = RankedTransferNode(whole, started.ranks)
        try:
            yield Side(engine, instance, node, started.division, broken)
        finally:
            await node.close()
        assert not broken


@dataclass
class Handoffs:
    """Hands prompts over from one instance to the other, and keeps by which way the blocks came."""

    source: Side
    sink: Side
    by_ranks: list[BlockHash] = field(default_factory=list)
    by_mirror: list[BlockHash] = field(default_factory=list)
    number: int = 0

    def ticket(self, timeout_s: float = 20.0) -> Ticket:
        self.number += 1
        return Ticket(
            ticket=TicketId(f"t{self.number}"),
            source=self.source.instance,
            source_generation=Generation(1),
            source_address=self.source.node.address,
            sink=self.sink.instance,
            sink_generation=Generation(1),
            timeout_s=timeout_s,
            source_ranks=self.source.node.rank_addresses,
        )

    def reserve(self, request_id: str, prompt: list[int]) -> Reservation:
        reservation = self.sink.engine.reserve(make_work(self.sink.engine, request_id, prompt))
        assert reservation is not None
        return reservation

    async def hand_over(self, prompt: list[int]) -> list[int]:
        """Return all tokens of the answer."""
        ticket, source, sink = self.ticket(), self.source, self.sink
        request = RequestId(f"w{self.number}")
        reservation = self.reserve(request, prompt)

        def received(names: list[BlockHash]) -> None:
            self.by_mirror += names
            sink.engine.mark_received(request, names)

        def received_by_ranks(names: list[BlockHash]) -> None:
            self.by_ranks += names
            sink.engine.mark_received(request, names, in_parts=True)

        async def mirror() -> None:
            source.engine.mirror(request)

        fetch = asyncio.create_task(
            sink.node.fetch(ticket, reservation.missing, on_blocks=received, on_rank_blocks=received_by_ranks)
        )
        sends_parts = source.node.open_handoff(ticket, mirror)
        assert sends_parts
        source.engine.add(make_work(source.engine, request, prompt), mode="prefill", sends_parts=sends_parts)
        first: list[int] = []
        while source.engine.has_work():
            result = source.engine.step()
            source.engine.check_invariants()
            first += [token for output in result.tokens for token in output.token_ids]
            for done in result.completed:
                source.node.publish(ticket.ticket, done.blocks)
            await asyncio.sleep(0)
        source.node.finish(ticket.ticket, b"first tokens")
        assert (await fetch).payload == b"first tokens"
        assert await source.node.released(ticket.ticket) == "received"
        source.engine.release(request)
        source.engine.check_invariants()
        sink.engine.admit(request, {0: first[0]})
        return first + run_engine(sink.engine)[request, 0]


@contextlib.asynccontextmanager
async def handoffs(reference: Reference, transport: str, **settings: Any) -> AsyncIterator[Handoffs]:
    async with (
        side(reference, "prefill-0", transport, **settings) as source,
        side(reference, "decode-0", transport, **settings) as sink,
    ):
        assert source.division and source.division == sink.division
        both = Handoffs(source, sink)
        assert await sink.node.connect_ranks(both.ticket())
        yield both


TP: dict[str, Any] = {"tensor_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "transport", "settings"),
    [
        ("llama", "usm", TP),
        ("llama", "zeromq", TP),
        ("llama", "oneccl", TP),
        ("llama", "usm", TP | {"kv_cache_dtype": "int8"}),
        ("llama", "usm", PP),
        ("qwen3_5", "usm", TP),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value)),
)
def test_handoffs_by_ranks_change_no_token(
    family: str, transport: str, settings: dict[str, Any], references: References
) -> None:
    """The second handoff of a prompt finds its prefix at both ends, and its last blocks are other ones."""
    reference = references(family)

    async def test() -> None:
        async with handoffs(reference, transport, **settings) as both:
            for _ in range(2):
                for prompt, answer in zip(reference.prompts, reference.answers, strict=True):
                    found = await both.hand_over(prompt)
                    assert found == answer or "kv_cache_dtype" in settings
            assert both.by_ranks and not both.by_mirror

    asyncio.run(test())


@pytest.mark.parametrize("settings", [TP, PP], ids=["ranks", "stages"])
def test_parts_that_were_in_host_tiers_are_handed_over(settings: dict[str, Any], references: References) -> None:
    reference = references("llama")
    small = {"num_gpu_blocks_override": 9, "max_model_len": 128, "host_kv_bytes": 4 << 20}

    async def test() -> None:
        async with handoffs(reference, "usm", **small, **settings) as both:
            for _ in range(3):
                for prompt, answer in zip(reference.prompts[:4], reference.answers, strict=False):
                    assert await both.hand_over(prompt) == answer
            assert both.by_ranks and not both.by_mirror
            for each in (both.source, both.sink):
                assert each.engine.stats().host_loaded_blocks > 0

    asyncio.run(test())


def test_instances_that_divide_blocks_differently_say_so(references: References) -> None:
    async def test() -> None:
        async with (
            side(references("llama"), "a", "usm", **TP) as one,
            side(references("llama"), "b", "usm", **PP) as two,
        ):
            assert one.division and two.division and one.division != two.division
        async with side(references("llama"), "c", "usm") as alone:
            assert not alone.division and not alone.node.rank_addresses

    asyncio.run(test())


def test_a_rank_that_cannot_fetch_demotes_the_ticket_and_changes_no_token(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references("llama")

    async def test() -> None:
        async with handoffs(reference, "usm", **TP) as both:
            prompt, answer = reference.prompts[3], reference.answers[3]
            (other,) = (rank for rank in both.sink.node._ranks if isinstance(rank, RemoteRank))
            fetch = other.fetch

            async def misled(ticket: Ticket, *arguments: Any) -> Any:
                # The first rank of the source has another part.
                return await fetch(
                    Ticket(**{n: getattr(ticket, n) for n in ticket.__struct_fields__} | {"source_address": first}),
                    *arguments,
                )

            first = both.source.node.rank_addresses[0]
            monkeypatch.setattr(other, "fetch", misled)
            assert await both.hand_over(prompt) == answer
            assert both.by_mirror and not set(both.by_mirror) & set(both.by_ranks)
            monkeypatch.undo()

    asyncio.run(test())


def test_a_cancelled_fetch_leaves_no_rank_that_writes_to_its_blocks(references: References) -> None:
    reference = references("llama")

    async def test() -> None:
        async with handoffs(reference, "usm", **TP) as both:
            # Connects the ranks: a source does not know of a fetch that is cancelled before.
            assert await both.hand_over(reference.prompts[2]) == reference.answers[2]
            ticket = both.ticket()
            reservation = both.reserve("w", reference.prompts[3])
            fetch = asyncio.create_task(
                both.sink.node.fetch(ticket, reservation.missing, on_rank_blocks=lambda names: None)
            )
            assert both.source.node.open_handoff(ticket, None)
            await asyncio.sleep(0.2)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(fetch, 5.0)
            assert await asyncio.wait_for(both.source.node.released(ticket.ticket), 5.0) == "cancelled"
            both.sink.engine.cancel(RequestId("w"))
            assert await both.hand_over(reference.prompts[3]) == reference.answers[3]
            assert not both.by_mirror

    asyncio.run(test())
