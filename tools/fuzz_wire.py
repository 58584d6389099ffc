"""Fuzz all code that decodes bytes from the network, guided by coverage: `make fuzz`, or
`python tools/fuzz_wire.py [CORPUS_FOLDER] -max_total_time=60`

Needs atheris (`pip install atheris`). The first byte of an input chooses the decoder. A decoder either raises
`WireError`, or returns a message whose encoding decodes to an equal message. The last one parses a connection between
router and instance, which must give the same messages however its bytes are divided. Anything else is a finding, and
atheris writes the input to a file `crash-…`. An empty corpus folder is filled with real frames first.
"""

import copy
import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-untyped,unused-ignore]

with atheris.instrument_imports(
    include=[
        "baton_serve.contracts",
        "baton_serve.kvtransfer.control_messages",
        "baton_serve.services.common.rpc.framing",
    ]
):
    import msgspec

    from baton_serve.contracts.events import BlocksRemoved, BlocksStored, EventBatch
    from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId, TicketId
    from baton_serve.contracts.instance import InstanceRecord, Load
    from baton_serve.contracts.messages import (
        Batch,
        Cancel,
        Decode,
        Failed,
        Heartbeat,
        LoadReport,
        Pool,
        Pooled,
        Prefill,
        Registered,
        Snapshot,
        Ticket,
        ToInstance,
        Tokens,
        ToRegistry,
        ToRouter,
        Work,
    )
    from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
    from baton_serve.contracts.sampling import SamplingSpec
    from baton_serve.contracts.wire import Decoder, WireError, encode
    from baton_serve.kvtransfer.control_messages import ToConsumer, ToProducer
    from baton_serve.services.common.rpc.framing import PREAMBLE, FrameReader, ProtocolError, frame
    from tests.unit.router.fakes import record

MAX_BYTES = 1 << 16
ODDITIES: list[Any] = [None, True, 0, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.5, float("inf"), float("nan"), "", "x"]
"""Values that replace a random part of a message."""
ODDITIES += [[], [[]], {}, {"type": "tokens"}, list(range(50)), msgspec.Raw(b"\x91" * 5000 + b"\x90")]
ODDITIES += ["\0", "prefill", "\U0001f525" * 3, b"", b"\xff" * 16]
KINDS: list[object] = [
    ToInstance,
    ToRouter,
    ToRegistry,
    Registered,
    InstanceRecord,
    EventBatch,
    ToConsumer,
    ToProducer,
]
DECODERS: list[Callable[[bytes], object]] = [Decoder[object](kind, max_bytes=MAX_BYTES).decode for kind in KINDS]
FRAMING = len(DECODERS)
"""Index of the parser of connections between routers and instances."""


def seeds() -> list[bytes]:
    """Return real frames, each after the index of its decoder."""
    name, instance, generation = BlockHash(b"n" * 16), InstanceId("prefill-0"), Generation(7)
    work = Work(
        request_id=RequestId("r-1"),
        token_ids=[1, 2, 70_000],
        num_prompt_tokens=3,
        sampling=SamplingSpec(seed=3, max_tokens=16, stop_token_ids=[2], logit_bias={5: 1.5}, logprobs=2),
        root=name,
    )
    ticket = Ticket(
        ticket=TicketId("t"),
        source=instance,
        source_generation=generation,
        source_address="tcp://127.0.0.1:1",
        sink=InstanceId("decode-0"),
        sink_generation=generation,
        timeout_s=5.0,
    )
    load = Load(free_blocks=3, total_blocks=9)
    made_up = record("prefill-0", "prefill", load=load)
    pool = Pool(request_id=RequestId("p"), inputs=[PoolingInput(token_ids=[1, 2])], params=PoolingSpec(task="embed"))
    tokens = Tokens(request_id=RequestId("r-1"), sequence=0, position=0, token_ids=[5], finish_reason="stop")
    to_router: list[msgspec.Struct] = [
        Batch([tokens]),
        Failed(request_id=RequestId("r-1"), code="internal", message="m"),
        LoadReport(instance=instance, generation=generation, load=load),
        Pooled(request_id=RequestId("p"), index=0, shape=[3], data=b"\0" * 12),
        Snapshot(instance=instance, generation=generation, sequence=2, device=[name]),
    ]
    to_instance: list[msgspec.Struct] = [
        Prefill(work, ticket),
        Decode(work, ticket),
        Cancel(RequestId("r-1")),
        Heartbeat(),
        pool,
    ]
    events = EventBatch(instance, generation, 4, [BlocksStored([name]), BlocksRemoved([name])])
    found = [(0, one) for one in to_instance] + [(1, one) for one in to_router] + [(4, made_up), (5, events)]
    frames = [bytes([number]) + encode(message) for number, message in found]
    encoded = PREAMBLE + frame(encode(Heartbeat())) + frame(b"m" * 300) + frame(b"")
    return [*frames, bytes([FRAMING]) + encoded]


def one_input(data: bytes) -> None:
    """Decode one input. Raises an exception for a finding."""
    if not data:
        return
    number = data[0] % (len(DECODERS) + 1)
    if number == FRAMING:
        _divide(data[1:])
        return
    decode = DECODERS[number]
    try:
        message = decode(data[1:])
    except WireError:
        return
    encoded = msgspec.msgpack.encode(message)  # compared as bytes: a NaN equals nothing
    if msgspec.msgpack.encode(decode(encoded)) != encoded:
        raise AssertionError("the encoding of a decoded message decodes to another message")


def _divide(data: bytes) -> None:
    rng = random.Random(len(data))
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    pieces = [data[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(data)])]
    if _messages(pieces) != _messages([data]):
        raise AssertionError("the result depends on how the bytes are divided")


def _messages(pieces: list[bytes]) -> tuple[list[bytes], bool, bool]:
    """Return the messages, whether the preamble arrived, and whether the rest was refused."""
    reader, found = FrameReader(), []
    try:
        for piece in pieces:
            for message in reader.feed(piece):
                found.append(message)  # messages before a refusal count, too
    except ProtocolError:
        return found, reader.is_ready, True
    return found, reader.is_ready, False


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """Return a changed input. Half of them are real frames, or earlier changes of them, changed within their
    structure: bytes changed at random are rarely MessagePack, and msgspec, which is written in C, gives no coverage
    that would prefer better ones."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        data = data if rng.random() < 0.3 else rng.choice(SEEDS)
        try:
            value = msgspec.msgpack.decode(data[1:])
        except (msgspec.DecodeError, UnicodeDecodeError):
            value = None
        if isinstance(value, dict | list):
            for _ in range(rng.randrange(1, 4)):
                _change(value, rng)
            changed = data[:1] + msgspec.msgpack.encode(value)
            if len(changed) <= max_size:
                return changed
    return bytes(atheris.Mutate(data, max_size))


def _change(value: Any, rng: random.Random) -> None:
    """Change one place in a tree of dicts and lists."""
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not places:
        return
    place = rng.choice(places)
    inner = value[place]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
        _change(inner, rng)
    elif rng.random() < 0.1:
        del value[place]
    else:
        value[place] = copy.deepcopy(rng.choice(ODDITIES))


SEEDS = seeds()


def fill(folder: Path) -> None:
    """Write the seeds to an empty corpus folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        for number, seed in enumerate(SEEDS):
            (folder / f"seed-{number:02}").write_bytes(seed)


def main() -> None:
    for argument in sys.argv[1:]:
        if not argument.startswith("-"):
            fill(Path(argument))
    atheris.Setup(sys.argv, one_input, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
