"""Blocks between nodes of different layouts, over every transport: what lands is what direct slicing gives."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from torch import Tensor

from baton_serve.contracts.block_layout import KVLayout, KVShape, obstacle
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.kernels import quantized_kv
from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.kvtransfer import Corrupt, LocalTransferError, Refused, Translation
from baton_serve.kvtransfer.conversion.plan import plan
from baton_serve.kvtransfer.conversion.staging_buffers import TokenTarget
from baton_serve.kvtransfer.conversion.tensors import place, recoded
from tests.contract.transports_pair import SETTINGS, Meddler, Pair, TensorMemory, name, pair_of

SOURCE = KVLayout(fingerprint="tiny", num_layers=2, num_kv_heads=2, block_tokens=16, head_dim=64, dtype="float32")
TRANSPORTS = ("memory", "usm", "zeromq", "oneccl")
NUM_TOKENS = 83


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(bounded())


def changed(layout: KVLayout, **changes: object) -> KVLayout:
    return msgspec.structs.replace(layout, **changes)


Rows = list[Tensor]
"""Tokens' KV by layer: [planes, tokens, heads, head_dim]."""


def cache_of(layout: KVLayout, rows: Rows) -> KVCache:
    """Tokens' KV, written by the engine's own twin."""
    num_tokens = rows[0].shape[1]
    cache = KVCache(layout, -(-num_tokens // layout.block_tokens), torch.device("cpu"))
    tokens = torch.arange(num_tokens)
    blocks, offsets = tokens // layout.block_tokens, tokens % layout.block_tokens
    for layer, view in enumerate(cache.layers()):
        for plane in range(len(rows[layer])):
            quantized_kv.write(view, plane, blocks, offsets, rows[layer][plane])
    return cache


def rows_of(layout: KVLayout, num_tokens: int, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn((shape.num_planes, num_tokens, shape.num_kv_heads, shape.head_dim), generator=draw)
        for count, shape in layout.runs
        for _ in range(count)
    ]


def read(cache: KVCache, num_tokens: int) -> Rows:
    """Return K and V as the engine reads them, in float32."""
    everything = torch.arange(cache.num_blocks)
    planes = [shape.num_planes for count, shape in cache.layout.runs for _ in range(count)]
    layers = [quantized_kv.read(view, everything).permute(1, 0, 3, 2, 4).flatten(1, 2) for view in cache.layers()]
    return [layer[:count, :num_tokens] for layer, count in zip(layers, planes, strict=True)]


dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"])
layouts = st.builds(
    KVLayout,
    fingerprint=st.just("tiny"),
    num_layers=st.just(2),
    num_planes=st.just(2),
    num_kv_heads=st.just(3),
    head_dim=st.sampled_from([8, 20]),
    block_tokens=st.sampled_from([1, 4, 8, 12, 16, 32]),
    dtype=dtypes,
)
shapes = st.sampled_from([(KVShape(2, 8), KVShape(3, 20)), (KVShape(1, 24, 1), KVShape(2, 12))]) | st.just(UNSET)
"""Of the two layers, if they are not equal."""


@given(source=layouts, sink=layouts, layers=shapes, num_tokens=st.integers(1, 70), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=100)
def test_converted_blocks_hold_what_the_engine_would_have_written(
    source: KVLayout, sink: KVLayout, layers: tuple[KVShape, ...] | UnsetType, num_tokens: int, seed: int
) -> None:
    source = changed(source, layers=layers)
    sink = changed(sink, head_dim=source.head_dim, layers=layers)
    if obstacle(source, sink) is not None:
        return
    here = cache_of(source, rows_of(source, num_tokens, seed))
    there = KVCache(sink, -(-num_tokens // sink.block_tokens), torch.device("cpu"))
    move(here.device_tensor, source, there.device_tensor, sink, num_tokens)
    expected = cache_of(sink, read(here, num_tokens))
    assert torch.equal(there.device_tensor, expected.device_tensor)
    if source.runs[0].shape.scale_rows(source) == 0 or sink.dtype == source.dtype:
        back = KVCache(source, here.num_blocks, torch.device("cpu"))
        move(there.device_tensor, sink, back.device_tensor, source, num_tokens)
        is_lossless = sink.dtype in (source.dtype, "float32")
        assert not is_lossless or torch.equal(back.device_tensor, here.device_tensor)


def move(here: Tensor, source: KVLayout, there: Tensor, sink: KVLayout, num_tokens: int) -> None:
    for piece in plan(source, sink, first_block=0, num_tokens=num_tokens):
        target = TokenTarget(piece.sink, piece.source_token, piece.sink_token, piece.count)
        place(here[piece.source], source, [target], there, sink)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "bfloat16"])
def test_blocks_in_a_smaller_dtype_are_those_of_an_engine_that_has_it(dtype: str) -> None:
    rows, narrow = rows_of(SOURCE, 64), changed(SOURCE, dtype=dtype)
    made = recoded(cache_of(SOURCE, rows).device_tensor, SOURCE, narrow)
    assert torch.equal(made, cache_of(narrow, rows).device_tensor)


CASES = {
    "larger blocks": changed(SOURCE, block_tokens=32),
    "smaller blocks": changed(SOURCE, block_tokens=8),
    "neither divides the other": changed(SOURCE, block_tokens=24),
    "one byte": changed(SOURCE, dtype="int8"),
    "one byte in larger blocks": changed(SOURCE, dtype="fp8_e4m3", block_tokens=64),
}


async def hand_over(pair: Pair, source: KVLayout, sink: KVLayout, *, first_block: int = 0) -> Tensor:
    """Returns what the consumer's blocks hold; block j of the tokens lies there in block 40 - j.

    The blocks of recurrent states follow those of the tokens.
    """
    theirs = torch.cat([cache_of(source, rows_of(source, NUM_TOKENS)).device_tensor, states_of(source)])
    for block, data in enumerate(theirs):
        pair.producer.memory.block(block)[:] = data.numpy().data
    ticket = pair.ticket()
    names = [name(100 + index) for index in range(len(theirs))]
    num_blocks = -(-NUM_TOKENS // sink.block_tokens) + sink.state_blocks
    wanted = [(name(index), 40 - index) for index in range(first_block, num_blocks)]
    heard = list[BlockHash]()
    pair.producer.node.open(ticket)
    translation = Translation(source, names, first_block, NUM_TOKENS)
    fetch = asyncio.create_task(
        pair.consumer.node.fetch(
            ticket,
            wanted,
            on_blocks=heard.extend,
            translation=translation,
        )
    )
    for block, block_name in enumerate(names):
        pair.producer.node.publish(ticket.ticket, [(block_name, block)])
    pair.producer.node.finish(ticket.ticket, b"first tokens")
    result = await fetch
    assert result.payload == b"first tokens"
    assert sorted(heard) == sorted(result.names) == sorted(block_name for block_name, _ in wanted)
    assert pair.consumer.tally.bytes[result.transport, "received"] == result.num_bytes
    assert await pair.producer.node.released(ticket.ticket) == "received"
    assert pair.producer.tally.bytes[result.transport, "sent"] == result.num_bytes
    blocks = [torch.frombuffer(bytearray(pair.consumer.memory.block(block)), dtype=torch.uint8) for _, block in wanted]
    return torch.stack(blocks)


def states_of(layout: KVLayout) -> Tensor:
    """The states of a sequence in blocks: the same bytes for every size of blocks, then zeros."""
    blocks = torch.zeros((layout.state_blocks, layout.block_bytes), dtype=torch.uint8)
    states = torch.arange(layout.state_bytes) % 251
    blocks.view(-1)[: len(states)] = states.to(torch.uint8)
    return blocks


def expected_blocks(source: KVLayout, sink: KVLayout) -> Tensor:
    rows = read(cache_of(source, rows_of(source, NUM_TOKENS)), NUM_TOKENS)
    return cache_of(sink, rows).device_tensor


def only(transport: str, **changes: object) -> Any:
    return msgspec.structs.replace(SETTINGS, transports=(transport,), **changes)


@pytest.mark.parametrize("is_reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocks_arrive_in_the_consumers_layout(transport: str, case: str, is_reverse: bool) -> None:
    source, sink = (CASES[case], SOURCE) if is_reverse else (SOURCE, CASES[case])

    async def test() -> None:
        async with pair_of(only(transport, parts=2), producer_layout=source, consumer_layout=sink) as pair:
            assert torch.equal(await hand_over(pair, source, sink), expected_blocks(source, sink))
            (link,) = pair.consumer.node.links()
            assert f"converting {source.dtype} in blocks of {source.block_tokens}" in link.reason

    run(test())


@pytest.mark.parametrize("first_block", [0, 2, 5])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 24)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_recurrent_states_arrive_in_blocks_of_another_size(
    transport: str, sizes: tuple[int, int], first_block: int
) -> None:
    source, sink = (changed(SOURCE, block_tokens=size, state_bytes=50_000) for size in sizes)
    # After the last block of tokens come the states, even if no token is missing.
    num_kv = -(-NUM_TOKENS // sink.block_tokens)
    first_block = min(first_block, num_kv)

    async def test() -> None:
        async with pair_of(only(transport), producer_layout=source, consumer_layout=sink) as pair:
            found = await hand_over(pair, source, sink, first_block=first_block)
            assert torch.equal(found[: num_kv - first_block], expected_blocks(source, sink)[first_block:])
            states = found[num_kv - first_block :].reshape(-1)[: sink.state_bytes]
            assert torch.equal(states, states_of(sink).reshape(-1)[: sink.state_bytes])

    assert obstacle(source, sink) is None
    run(test())


@pytest.mark.parametrize("case", ["larger blocks", "smaller blocks", "one byte in larger blocks"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocks_whose_layers_have_different_shapes_arrive(transport: str, case: str) -> None:
    mixed = {"num_kv_heads": 0, "head_dim": 0, "layers": (KVShape(2, 16), KVShape(1, 64))}
    source, sink = changed(SOURCE, **mixed), changed(CASES[case], **mixed)

    async def test() -> None:
        async with pair_of(only(transport, parts=2), producer_layout=source, consumer_layout=sink) as pair:
            assert torch.equal(await hand_over(pair, source, sink), expected_blocks(source, sink))

    run(test())


@pytest.mark.parametrize("ends", ["to a device", "from a device", "between devices"])
@pytest.mark.parametrize("transport", ["usm", "zeromq"])
def test_blocks_of_devices_are_converted(transport: str, ends: str) -> None:
    source, sink = SOURCE, CASES["one byte in larger blocks"]
    here = None if ends == "to a device" else TensorMemory(48, source.block_bytes)
    there = None if ends == "from a device" else TensorMemory(48, sink.block_bytes)

    async def test() -> None:
        ends_of: Sequence[Any] = (here, there)
        async with pair_of(
            only(transport, ring_bytes=1 << 20), producer_layout=source, consumer_layout=sink, memories=ends_of
        ) as pair:
            assert torch.equal(await hand_over(pair, source, sink), expected_blocks(source, sink))

    run(test())


def devices_of(source: KVLayout, sink: KVLayout) -> Sequence[Any]:
    return TensorMemory(48, source.block_bytes), TensorMemory(48, sink.block_bytes)


def test_a_message_between_devices_is_not_converted_so_another_transport_is_used() -> None:
    source, sink = SOURCE, CASES["larger blocks"]

    async def test() -> None:
        settings = only("oneccl", ring_bytes=1 << 20)
        async with pair_of(
            msgspec.structs.replace(settings, transports=("oneccl", "usm")),
            producer_layout=source,
            consumer_layout=sink,
            memories=devices_of(source, sink),
        ) as pair:
            assert torch.equal(await hand_over(pair, source, sink), expected_blocks(source, sink))
            assert list(pair.consumer.tally.bytes) == [("usm", "received")]
        async with pair_of(
            settings, producer_layout=source, consumer_layout=sink, memories=devices_of(source, sink)
        ) as pair:
            translation = Translation(source, [name(0), name(1)], 0, 32)
            with pytest.raises(Refused, match="other transports only"):
                await pair.consumer.node.fetch(pair.ticket(), [(name(0), 0)], translation=translation)

    run(test())


def test_a_pull_between_devices_of_other_layouts_is_refused_with_both() -> None:
    """The block hashes are requested without conversion, as `services.instance.kv_sharing.pulling` does; the router
    plans no such pull."""
    source, sink = SOURCE, CASES["larger blocks"]

    async def test() -> None:
        async with pair_of(
            only("usm", ring_bytes=1 << 20),
            producer_layout=source,
            consumer_layout=sink,
            memories=devices_of(source, sink),
        ) as pair:
            with pytest.raises(Refused, match=r"block_tokens=16.*block_tokens=32"):
                await pair.consumer.node.fetch(pair.ticket(), [(name(0), 0)], partial=True)

    run(test())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_there_already_does_not_travel(transport: str) -> None:
    source, sink = SOURCE, CASES["larger blocks"]

    async def test() -> None:
        async with pair_of(only(transport), consumer_layout=sink) as pair:
            found = await hand_over(pair, source, sink, first_block=2)
            assert torch.equal(found, expected_blocks(source, sink)[2:])
            assert pair.consumer.tally.bytes[transport, "received"] == 2 * source.block_bytes  # tokens 64 to 82

    run(test())


def test_the_producer_rounds_where_that_halves_what_travels() -> None:
    async def test() -> None:
        sink = CASES["one byte"]
        async with pair_of(only("zeromq"), consumer_layout=sink) as pair:
            await hand_over(pair, SOURCE, sink)
            blocks = -(-NUM_TOKENS // SOURCE.block_tokens)
            assert pair.consumer.tally.bytes["zeromq", "received"] == blocks * sink.block_bytes

    run(test())


@pytest.mark.parametrize("transport", ["usm", "zeromq"])
def test_a_mismatch_on_the_way_through_a_conversion_ends_as_any_other(transport: str) -> None:
    meddler, sink = Meddler(), CASES["larger blocks"]
    meddler.after = lambda transport, _: "bad"  # type: ignore[assignment]

    async def test() -> None:
        async with pair_of(only(transport), consumer_layout=sink, meddler=meddler) as pair:
            with pytest.raises(Corrupt):
                await hand_over(pair, SOURCE, sink)

    run(test())


def test_a_fetch_that_does_not_say_how_the_producer_names_its_blocks_is_refused() -> None:
    sink = CASES["larger blocks"]

    async def test() -> None:
        async with pair_of(only("usm"), consumer_layout=sink) as pair:
            with pytest.raises(Refused, match=r"block_tokens=16.*block_tokens=32"):
                await pair.consumer.node.fetch(pair.ticket(), [(name(0), 0)])
            wrong = Translation(changed(SOURCE, block_tokens=8), [name(0)], 0, 8)
            with pytest.raises(Refused, match=r"block_tokens=16.*block_tokens=8"):
                await pair.consumer.node.fetch(pair.ticket(), [(name(0), 0)], translation=wrong)
            with pytest.raises(LocalTransferError):
                await pair.consumer.node.fetch(pair.ticket(), [], translation=Translation(SOURCE, [], 0, 8))

    run(test())


@pytest.mark.parametrize("change", [{"dtype": "fp8_e5m2"}, {"num_layers": 1}, {"fingerprint": "other"}])
def test_what_cannot_be_converted_is_refused_with_both_layouts(change: dict[str, object]) -> None:
    source = changed(SOURCE, dtype="int8")
    sink = changed(source, block_tokens=32, **change)

    async def test() -> None:
        async with pair_of(only("usm"), producer_layout=source, consumer_layout=sink) as pair:
            translation = Translation(source, [name(0), name(1)], 0, 32)
            with pytest.raises(Refused, match=r"producer KVLayout\(.*block_tokens=16.*consumer KVLayout\(.*=32"):
                await pair.consumer.node.fetch(pair.ticket(), [(name(0), 0)], translation=translation)

    run(test())
