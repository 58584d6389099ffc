"""Which tokens go where between ends of different block sizes; which layouts can be converted at all."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.contracts.block_layout import KVLayout, KVShape, obstacle
from baton_serve.kvtransfer.conversion.plan import Translation, plan, wire_layout
from baton_serve.kvtransfer.conversion.staging_buffers import StagingBuffers
from baton_serve.kvtransfer.errors import LocalTransferError, TransportUnavailable
from tests.unit.kvtransfer.samples import LAYOUT, name

sizes = st.sampled_from([1, 2, 3, 4, 8, 16, 24, 32, 64])


def sized(block_tokens: int, dtype: str = "float32") -> KVLayout:
    return msgspec.structs.replace(LAYOUT, block_tokens=block_tokens, dtype=dtype)


@given(source=sizes, sink=sizes, num_tokens=st.integers(0, 200), share=st.floats(0, 1))
def test_every_token_from_the_first_wanted_block_on_is_moved_once_and_to_its_place(
    source: int, sink: int, num_tokens: int, share: float
) -> None:
    first_block = int(share * (num_tokens // sink))
    pieces = plan(sized(source), sized(sink), first_block=first_block, num_tokens=num_tokens)
    tokens = [
        (piece.source * source + piece.source_token + i, piece.sink * sink + piece.sink_token + i)
        for piece in pieces
        for i in range(piece.count)
    ]
    assert tokens == [(token, token) for token in range(first_block * sink, num_tokens)]
    for piece in pieces:
        assert piece.count > 0
        assert piece.source_token + piece.count <= source
        assert piece.sink_token + piece.count <= sink


@given(source=sizes, sink=sizes, num_tokens=st.integers(1, 200), share=st.floats(0, 1), data=st.data())
def test_a_block_is_whole_when_the_last_of_its_parts_has_come_and_not_before(
    source: int, sink: int, num_tokens: int, share: float, data: st.DataObject
) -> None:
    first_block = int(share * (-(-num_tokens // sink)))
    theirs = [name(index) for index in range(-(-num_tokens // source))]
    ours = [(name(255 - index), 1000 + index) for index in range(first_block, -(-num_tokens // sink))]
    staging_buffers = StagingBuffers(sized(sink))
    landing = staging_buffers.begin(Translation(sized(source), theirs, first_block, num_tokens), ours)
    order = data.draw(st.permutations([their_name for their_name, _ in landing.wanted]))
    come: set[int] = set()
    whole: list[bytes] = []
    for their_name in order:
        come.add(theirs.index(their_name))
        whole += landing.arrived([their_name])
        ready = [
            our_name
            for (our_name, _), index in zip(ours, range(first_block, first_block + len(ours)), strict=True)
            if set(range(index * sink // source, -(-min((index + 1) * sink, num_tokens) // source))) <= come
        ]
        assert sorted(whole) == sorted(ready)
    assert len(landing.received) == len(ours)
    places = [place for _, place in landing.wanted]
    assert {target.block for place in places for target in staging_buffers.targets(place)} == {
        block for _, block in ours
    }
    staging_buffers.end(landing)
    assert len(staging_buffers) == 0
    for place in places:
        with pytest.raises(TransportUnavailable):
            staging_buffers.targets(place)


def test_places_of_two_fetches_differ() -> None:
    staging_buffers = StagingBuffers(sized(8))
    made = [staging_buffers.begin(Translation(sized(4), [name(1), name(2)], 0, 8), [(name(3), 0)]) for _ in range(2)]
    first, second = ([place for _, place in landing.wanted] for landing in made)
    assert not set(first) & set(second)


def test_blocks_that_are_not_those_of_the_tokens_are_an_error_of_the_caller() -> None:
    with pytest.raises(LocalTransferError):
        StagingBuffers(sized(8)).begin(Translation(sized(4), [name(1), name(2)], 0, 8), [])
    with pytest.raises(LocalTransferError):
        StagingBuffers(sized(8)).begin(Translation(sized(4), [name(1)], 0, 8), [(name(3), 0)])


@pytest.mark.parametrize(
    ("source", "sink", "is_possible"),
    [
        ("float32", "bfloat16", True),
        ("bfloat16", "float32", True),
        ("bfloat16", "int8", True),
        ("fp8_e4m3", "float16", True),
        ("int8", "int8", True),
        ("int8", "fp8_e4m3", False),
        ("fp8_e4m3", "fp8_e5m2", False),
    ],
)
def test_dtypes_are_converted_unless_codes_would_be_rounded_again(source: str, sink: str, is_possible: bool) -> None:
    assert (obstacle(sized(16, source), sized(32, sink)) is None) == is_possible


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"num_layers": 3}, {"head_dim": 16}, {"num_planes": 1}])
def test_other_weights_or_shapes_are_never_converted(change: dict[str, object]) -> None:
    assert obstacle(LAYOUT, msgspec.structs.replace(LAYOUT, **change)) is not None


def test_recurrent_states_are_converted_between_block_sizes_alone() -> None:
    states = msgspec.structs.replace(LAYOUT, state_bytes=5000)
    assert obstacle(states, msgspec.structs.replace(states, block_tokens=48)) is None
    assert "sizes of the recurrent states" in str(obstacle(states, msgspec.structs.replace(states, state_bytes=4000)))
    assert "equal data types" in str(obstacle(states, msgspec.structs.replace(states, dtype="bfloat16")))


def test_layers_of_different_shapes_are_compared_one_by_one() -> None:
    shapes = (KVShape(2, 8), KVShape(1, 16), KVShape(2, 8))
    mixed = msgspec.structs.replace(LAYOUT, num_layers=3, num_kv_heads=0, head_dim=0, layers=shapes)
    assert mixed.block_bytes == 3 * 2 * 16 * 16 * 4
    assert [run.num_layers for run in mixed.runs] == [1, 1, 1]
    assert obstacle(mixed, msgspec.structs.replace(mixed, block_tokens=32, dtype="int8")) is None
    swapped = msgspec.structs.replace(mixed, layers=(shapes[1], shapes[0], shapes[0]))
    assert swapped.block_bytes == mixed.block_bytes
    assert obstacle(mixed, swapped) == "the shapes of a token's KV differ"


class OlderLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Instances that do not know layers of different shapes decode layouts as this."""

    fingerprint: str
    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str
    num_planes: int = 2
    state_bytes: int = 0


def test_older_instances_read_and_send_the_same_bytes_for_equal_layers() -> None:
    older = OlderLayout(fingerprint="f", num_layers=2, num_kv_heads=3, block_tokens=16, head_dim=8, dtype="int8")
    layout = KVLayout(fingerprint="f", num_layers=2, num_kv_heads=3, block_tokens=16, head_dim=8, dtype="int8")
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.encode(layout) == codec.encode(older)
        assert codec.decode(codec.encode(older), type=KVLayout) == layout
        mixed = msgspec.structs.replace(layout, layers=(KVShape(1, 2), KVShape(1, 4, 1)))
        assert codec.decode(codec.encode(mixed), type=KVLayout) == mixed
        assert codec.decode(codec.encode(mixed), type=OlderLayout) == older


def test_a_layout_with_shapes_for_other_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 shapes for 3 layers"):
        msgspec.structs.replace(LAYOUT, num_layers=3, layers=(KVShape(1, 2), KVShape(1, 4)))
    message = msgspec.json.encode(LAYOUT)[:-1] + b',"layers":[[1,2,2]]}'
    with pytest.raises(msgspec.ValidationError, match="1 shapes for 2 layers"):
        msgspec.json.decode(message, type=KVLayout)


def test_blocks_are_narrowed_before_they_travel_and_widened_after() -> None:
    wide, narrow = sized(16, "bfloat16"), sized(32, "int8")
    assert wire_layout(wide, narrow, narrows=True) == sized(16, "int8")
    assert wire_layout(wide, narrow, narrows=False) == wide
    assert wire_layout(narrow, wide, narrows=True) == narrow


def test_names_in_one_fetch_are_in_the_order_of_their_tokens() -> None:
    landing = StagingBuffers(sized(6)).begin(
        Translation(sized(4), [name(i) for i in range(6)], 1, 22), [(name(9), 0), (name(8), 1), (name(7), 2)]
    )
    names = [their_name[0] for their_name, _ in landing.wanted]
    assert names == [1, 2, 3, 4, 5]
    assert all(a < b for a, b in pairwise(place for _, place in landing.wanted))
