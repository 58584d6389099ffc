"""Drives engines in tests: works, runs to the end, and a handoff by copying the blocks' bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_serve.contracts.block_hash import root_hash
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine import Engine, EngineConfig, KVCache, NamedBlock, SequenceOutput, StepResult
from baton_serve.engine.core.outputs import Reservation
from baton_serve.engine.kv.kv_cache import KVMemoryKind
from baton_serve.engine.model.vision.image_types import NO_PIXELS, Pixels
from tests.devices import DEVICE

Answers = dict[tuple[str, int], list[int]]


def make_engine(folder: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "device": DEVICE,
        "block_size": 16,
        "kv_cache_bytes": 4 << 20,
        "max_num_seqs": 16,
    }
    return Engine(EngineConfig(model=str(folder), **{**defaults, **settings}))


def make_work(
    engine: Engine,
    request_id: str,
    tokens: list[int],
    *,
    num_prompt_tokens: int | None = None,
    sequences: int = 1,
    itl_s: float | None = None,
    **sampling: Any,
) -> Work:
    values: dict[str, Any] = {"seed": 7, "max_tokens": 12, "temperature": 0.0, **sampling}
    layout = engine.layout
    return Work(
        request_id=RequestId(request_id),
        token_ids=tokens,
        num_prompt_tokens=num_prompt_tokens or len(tokens),
        sampling=SamplingSpec(**values),
        root=root_hash(fingerprint=layout.fingerprint, kv_dtype=layout.dtype, block_tokens=layout.block_tokens),
        sequences=list(range(sequences)),
        itl_s=itl_s,
    )


def run(engine: Engine, see: Callable[[StepResult], None] = lambda result: None) -> Answers:
    """Run the engine until no sequence can advance, and return the answers. Checks positions and invariants after each
    step."""
    answers: Answers = {}
    starts: dict[tuple[str, int], int] = {}
    for _ in range(5000):
        if not engine.has_work():
            return answers
        result = engine.step()
        engine.check_invariants()
        see(result)
        for output in result.tokens:
            key = (str(output.request_id), output.sequence)
            reported = answers.setdefault(key, [])
            assert output.position == starts.setdefault(key, output.position) + len(reported)
            reported += output.token_ids
    raise AssertionError("the engine does not come to rest")


def outputs_of(engine: Engine) -> list[SequenceOutput]:
    found: list[SequenceOutput] = []
    run(engine, lambda result: found.extend(result.tokens))
    return found


def hand_over(source: Engine, sink: Engine, work: Work, pixels: Pixels = NO_PIXELS) -> Answers:
    """Prefill on `source`, copy the bytes of the missing blocks, decode on `sink`: all tokens of the answer."""
    return hand_over_all(source, sink, [work], pixels)


def hand_over_all(source: Engine, sink: Engine, works: list[Work], pixels: Pixels = NO_PIXELS) -> Answers:
    """As `hand_over`, for several requests: `source` computes their prompts, and `sink` their answers, in one batch."""
    reservations: dict[RequestId, Reservation] = {}
    for work in works:
        reservation = sink.reserve(work)
        assert reservation is not None
        reservations[work.request_id] = reservation
    completed: dict[RequestId, list[NamedBlock]] = {name: [] for name in reservations}
    held: list[RequestId] = []

    def see(result: StepResult) -> None:
        for done in result.completed:
            completed[done.request_id].extend(done.blocks)
        held.extend(result.held)

    for work in works:
        source.add(work, mode="prefill", pixels=pixels)
    answers = run(source, see)
    assert sorted(held) == sorted(reservations)
    for request_id, reservation in reservations.items():
        assert [block.name for block in completed[request_id]] == reservation.names
        where = dict(completed[request_id])
        for name, block in reservation.missing:
            copy_block(source, where[name], sink, block)
        sink.mark_received(request_id, [name for name, _ in reservation.missing])
        source.release(request_id)
        first = {index: tokens[0] for (request, index), tokens in answers.items() if request == request_id}
        sink.admit(request_id, first)
    for key, tokens in run(sink).items():
        answers[key] += tokens
    return answers


def copy_block(source: Engine, block: int, sink: Engine, target: int) -> None:
    """As a transport does: from where the source shows its blocks to where the sink takes them."""
    size = source.kv.block_bytes
    ours, theirs = source.kv.host_view, sink.kv.host_view
    if ours is None and theirs is None:
        sink.kv.device_tensor[target].copy_(source.kv.device_tensor[block])
        return
    # An engine of several ranks shows whole blocks in host memory alone.
    if ours is None:
        content = source.kv.device_tensor[block].contiguous().flatten().view(torch.uint8).cpu()
    else:
        content = torch.frombuffer(bytearray(ours[block * size : (block + 1) * size]), dtype=torch.uint8)
    if theirs is None:
        to = sink.kv.device_tensor[target]
        to.copy_(content.view(to.dtype).view(to.shape))
    else:
        theirs[target * size : (target + 1) * size] = content.numpy().tobytes()


def place_kv_caches(monkeypatch: pytest.MonkeyPatch, place: KVMemoryKind) -> None:
    """Let engines that are made from now on keep their KV cache in memory of the kind `place`, with ranks in threads
    too."""

    def make(*arguments: Any, **settings: Any) -> KVCache:
        return KVCache(*arguments, **settings | {"place": place})

    monkeypatch.setattr("baton_serve.engine.step.cache_sizing.KVCache", make)
    monkeypatch.setattr("baton_serve.engine.parallel.tp_worker.KVCache", make)
