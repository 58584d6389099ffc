"""Whole handoffs, from engine to engine, of caches that the host must not touch: here tensors of the CPU."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import Generation, InstanceId, RequestId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.engine import CompletedLayerGroups, Engine
from baton_serve.kvtransfer import TransferNode, Translation
from tests.contract.test_transports import only
from tests.devices import DEVICE
from tests.engine.driving import make_engine, make_work, place_kv_caches, run
from tests.tiny_models import write_tiny_model

PROMPT = [5 + (7 * i * i + i) % 200 for i in range(75)]
TOKENS = {"max_tokens": 9, "ignore_eos": True}


TRANSPORTS = [
    "usm",
    "zeromq",
    pytest.param(
        "oneccl",
        marks=pytest.mark.skipif(
            DEVICE == "cuda",
            reason="NCCL takes no two ranks of one device, and both engines of these tests are on the first",
        ),
    ),
]


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    place_kv_caches(monkeypatch, "device")


def node_of(name: str, engine: Engine, transport: str) -> TransferNode:
    return TransferNode(
        instance=InstanceId(name),
        generation=Generation(1),
        layout=engine.layout,
        memory=engine.kv,
        settings=only(transport, parts=engine.tail_parts),
    )


async def hand_over(source: Engine, sink: Engine, transport: str) -> tuple[str, list[int]]:
    """The transport that carried the prompt, and all tokens of the answer."""
    producer, consumer = node_of("prefill-0", source, transport), node_of("decode-0", sink, transport)
    await producer.start()
    await consumer.start()
    try:
        ticket = Ticket(
            ticket=TicketId("t"),
            source=InstanceId("prefill-0"),
            source_generation=Generation(1),
            source_address=producer.address,
            sink=InstanceId("decode-0"),
            sink_generation=Generation(1),
            timeout_s=20.0,
        )
        reservation = sink.reserve(make_work(sink, "w", PROMPT, **TOKENS))
        assert reservation is not None
        work, layout = make_work(source, "w", PROMPT, **TOKENS), source.layout
        names = hash_blocks(work.root, PROMPT, layout.block_tokens)
        translation = Translation(layout, names, reservation.reused, len(PROMPT))
        fetch = asyncio.create_task(consumer.fetch(ticket, reservation.missing, translation=translation))
        producer.open(ticket)
        loop = asyncio.get_running_loop()

        def publish_parts(tail: CompletedLayerGroups) -> None:
            for blocks in tail.blocks:
                producer.publish_parts(ticket.ticket, blocks.blocks, tail.parts)

        source.on_layer_groups(lambda tail: loop.call_soon_threadsafe(publish_parts, tail))
        source.add(work, mode="prefill")
        first: list[int] = []
        while source.has_work():
            result = source.step()
            first += [token for output in result.tokens for token in output.token_ids]
            for done in result.completed:
                producer.publish(ticket.ticket, done.blocks)
            await asyncio.sleep(0)
        producer.finish(ticket.ticket, b"")
        fetched = await fetch
        assert await producer.released(ticket.ticket) == "received"
        source.release(RequestId("w"))
        sink.mark_received(RequestId("w"), [name for name, _ in reservation.missing])
        sink.admit(RequestId("w"), {0: first[0]})
        return fetched.transport, first + run(sink)["w", 0]
    finally:
        await consumer.close()
        await producer.close()


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handoff_between_devices_changes_no_token(tmp_path: Path, transport: str, kv_cache_dtype: str) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=2)
    make: Any = partial(make_engine, folder, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=32)
    with make() as alone, make() as source, make() as sink:
        assert source.kv.host_view is None and source.kv.shared_fd is None
        alone.add(make_work(alone, "w", PROMPT, **TOKENS))
        assert asyncio.run(hand_over(source, sink, transport)) == (transport, run(alone)["w", 0])
        assert source.stats().free_blocks == source.stats().total_blocks


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_tail_in_parts_changes_no_token(tmp_path: Path, transport: str) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=4)
    make: Any = partial(make_engine, folder, max_num_batched_tokens=32)
    with make() as alone, make(tail_parts=4) as source, make() as sink:
        assert source.tail_parts == 4
        alone.add(make_work(alone, "w", PROMPT, **TOKENS))
        assert asyncio.run(hand_over(source, sink, transport)) == (transport, run(alone)["w", 0])


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("transport", ["usm", "zeromq"])
def test_devices_with_other_layouts_hand_over_too(tmp_path: Path, transport: str, kv_cache_dtype: str) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=2)
    make: Any = partial(make_engine, folder, max_num_batched_tokens=32)
    other = {"block_size": 32, "kv_cache_dtype": kv_cache_dtype}
    with make(**other) as alone, make(tail_parts=2) as source, make(**other) as sink:
        alone.add(make_work(alone, "w", PROMPT, **TOKENS))
        assert asyncio.run(hand_over(source, sink, transport)) == (transport, run(alone)["w", 0])
