"""Bytes of a stranger: each decoder of the wire takes them, or refuses them with its own error."""

from collections.abc import Callable

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_serve.contracts.events import EventBatch
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.messages import Registered, ToInstance, ToRegistry, ToRouter
from baton_serve.contracts.wire import Decoder, WireError
from baton_serve.kvtransfer.control_messages import ToConsumer, ToProducer

DECODERS: dict[str, Callable[[bytes], object]] = {
    name: Decoder[object](kind, max_bytes=10_000).decode
    for name, kind in {
        "ToInstance": ToInstance,
        "ToRouter": ToRouter,
        "ToRegistry": ToRegistry,
        "Registered": Registered,
        "InstanceRecord": InstanceRecord,
        "EventBatch": EventBatch,
        "ToConsumer": ToConsumer,
        "ToProducer": ToProducer,
    }.items()
}
TAGS = ("prefill", "decode", "generate", "cancel", "tokens", "batch", "failed", "snapshot", "load", "register", "leave")

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
tagged = st.dictionaries(
    st.sampled_from("work ticket request_id token_ids sampling messages position record ttl_s".split()),
    values,
).flatmap(lambda fields: st.sampled_from(TAGS).map(lambda tag: {"type": tag, **fields}))
frames = st.binary(max_size=200) | (values | tagged).map(lambda value: msgpack.packb(value, strict_types=False))


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None)
@given(frame=frames)
def test_a_frame_is_decoded_or_refused(name: str, frame: bytes) -> None:
    try:
        message = DECODERS[name](frame)
    except WireError:
        return
    again = msgspec.msgpack.encode(message)
    assert DECODERS[name](again) == message or message != message, "what was taken can be said again"


def test_a_frame_nested_too_deeply_is_refused() -> None:
    nested = b"\x83\xa4type\xa6cancel\xaarequest_id\xa1r\xa5extra" + b"\x91" * 5000 + b"\x90"
    with pytest.raises(WireError):
        DECODERS["ToInstance"](nested)


def test_lengths_are_bounded_before_anything_is_allocated() -> None:
    claims_4_gib = b"\xdd\xff\xff\xff\xff"
    for decode in DECODERS.values():
        with pytest.raises(WireError):
            decode(claims_4_gib)
        with pytest.raises(WireError, match="exceeds"):
            decode(b"\x90" * 10_001)
