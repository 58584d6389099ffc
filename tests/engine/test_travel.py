"""Handoffs between engines whose devices each hold a part of every block: CPU engines with a mirror all the same."""

import os
from pathlib import Path

import pytest
import torch

from baton_serve.contracts.identity import RequestId
from baton_serve.engine import Engine, device
from baton_serve.engine.kv.kv_cache import CopyOrder
from baton_serve.engine.step.in_flight import has_prefill_requests
from tests.engine.conftest import References
from tests.engine.driving import hand_over, make_engine, make_work, place_kv_caches, run
from tests.engine.test_ahead import Ahead
from tests.engine.test_pipeline import NumberedEvent, RecordedStream
from tests.tiny_models import write_tiny_model

PROMPT = [5 + (7 * i * i + i) % 200 for i in range(75)]
TOKENS = {"max_tokens": 9, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Blocks of 16 tokens are then 16 KiB, whole pages, so that host memory really goes back.
    return write_tiny_model(tmp_path, "llama", num_hidden_layers=2)


@pytest.fixture
def mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    place_kv_caches(monkeypatch, "mirrored")


def host_bytes(engine: Engine) -> int:
    """Memory that the mirror's file takes."""
    assert engine.kv.shared_fd is not None
    return os.fstat(engine.kv.shared_fd).st_blocks * 512


@pytest.mark.usefixtures("mirrored")
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_handoff_through_the_mirror_changes_no_token(folder: Path, sequences: int) -> None:
    with make_engine(folder) as alone, make_engine(folder) as source, make_engine(folder) as sink:
        alone.add(make_work(alone, "alone", PROMPT, sequences=sequences, **TOKENS))
        expected = {("w", index): tokens for (_, index), tokens in run(alone).items()}
        assert hand_over(source, sink, make_work(source, "w", PROMPT, sequences=sequences, **TOKENS)) == expected
        assert host_bytes(source) == host_bytes(sink) == 0, "host memory was not given back"


@pytest.mark.usefixtures("mirrored")
def test_a_prefix_that_two_held_requests_share_stays_until_both_end(folder: Path) -> None:
    with make_engine(folder) as source:
        for name in ("a", "b"):
            source.add(make_work(source, name, PROMPT, **TOKENS), mode="prefill")
            run(source)
        shared = host_bytes(source)
        block = bytes(source.kv.host_view[source.kv.block_bytes : 2 * source.kv.block_bytes])  # type: ignore[index]
        source.cancel(RequestId("a"))
        source.check_invariants()
        assert 0 < host_bytes(source) < shared  # only its own last block went
        assert bytes(source.kv.host_view[source.kv.block_bytes : 2 * source.kv.block_bytes]) == block  # type: ignore[index]
        source.release(RequestId("b"))
        source.check_invariants()
        assert host_bytes(source) == 0


@pytest.mark.usefixtures("mirrored")
@pytest.mark.parametrize("steps_before", [0, 2, 99])
def test_blocks_that_ranks_send_are_mirrored_on_demand_at_any_time(folder: Path, steps_before: int) -> None:
    request = RequestId("w")
    with make_engine(folder, max_num_batched_tokens=16) as source:
        source.add(make_work(source, "v", PROMPT, **TOKENS), mode="prefill")
        run(source)
        whole = host_bytes(source)
        source.release(RequestId("v"))
        source.reset_prefix_cache()
        source.add(make_work(source, "w", PROMPT, **TOKENS), mode="prefill", sends_parts=True)
        for _ in range(steps_before):
            if source.has_work():
                source.step()
        assert host_bytes(source) == 0
        source.mirror(request)
        run(source)
        assert host_bytes(source) == whole > 0
        source.mirror(request)  # again, and for a request that has ended: nothing happens
        source.release(request)
        source.mirror(request)
        source.check_invariants()
        assert host_bytes(source) == 0


@pytest.mark.usefixtures("mirrored")
def test_a_cancelled_reservation_gives_its_host_memory_back(folder: Path) -> None:
    with make_engine(folder) as sink:
        reservation = sink.reserve(make_work(sink, "w", PROMPT, **TOKENS))
        assert reservation is not None and sink.kv.host_view is not None
        for _, block in reservation.missing:
            sink.kv.host_view[block * sink.kv.block_bytes] = 1
        assert host_bytes(sink) > 0
        sink.cancel(RequestId("w"))
        assert host_bytes(sink) == 0


@pytest.mark.usefixtures("threaded_ranks")
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_checkpoints_travel_through_the_mirror_of_a_single_rank(
    family: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are in the memory of the device, as those of KV, and in the mirror only during a transfer."""
    reference = references(family)
    with make_engine(reference.folder) as plain:
        place_kv_caches(monkeypatch, "mirrored")
        with make_engine(reference.folder) as one, make_engine(reference.folder, pipeline_parallel_size=2) as stages:
            for source, sink in ((plain, one), (one, plain), (stages, one), (one, stages)):
                for number in range(2):  # the second handoff finds its prefix at both ends
                    work = make_work(source, f"w{number}", reference.prompts[3])
                    assert hand_over(source, sink, work)[f"w{number}", 0] == reference.answers[3]
                assert source.reset_prefix_cache() and sink.reset_prefix_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("threaded_ranks")
@pytest.mark.parametrize("has_streams", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_prompts_of_ranks_follow_each_other_and_their_blocks_wait_for_their_own_step_alone(
    family: str, has_streams: bool, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a stream of their own, copies would wait for a step that was launched ahead, so none is."""
    reference = references(family)
    settings = {"tensor_parallel_size": 2, "async_scheduling": True, "max_num_batched_tokens": 24}
    with make_engine(reference.folder) as sink:
        place_kv_caches(monkeypatch, "mirrored")
        if has_streams:
            for name, fake in (("record", NumberedEvent), ("SideStream", RecordedStream), ("has_side_streams", bool)):
                monkeypatch.setattr(device, name, fake)
        NumberedEvent.counts.clear()
        RecordedStream.later.clear()
        with make_engine(reference.folder, **settings) as source:
            ahead = Ahead(source, monkeypatch)
            for number, prompt in enumerate(reference.prompts):
                RecordedStream.later = {thread: [] for thread in RecordedStream.later}
                answers = hand_over(source, sink, make_work(source, str(number), prompt))
                assert answers[str(number), 0] == reference.answers[number]
            assert any(has_prefill_requests(plan) for plan in ahead.plans) == has_streams
            if has_streams and family == "llama":
                waits = [set(waits) for waits in RecordedStream.later.values() if waits]
                assert waits == [{0, 1}, {0, 1}]


def test_a_copy_to_the_mirror_waits_for_its_step_and_for_other_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, made = list[str](), list[str]()

    class Event:
        def __init__(self, _: torch.device) -> None:
            made.append(f"event {len(made)}")
            self.name = made[-1]

        def query(self) -> bool:
            return False

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cpu"

        def wait(self, event: Event) -> None:
            waits.append(event.name)

        def __enter__(self) -> None:
            waits.append("enter")

        def __exit__(self, *_: object) -> None:
            waits.append("exit")

    for name, fake in (("record", Event), ("SideStream", Stream), ("has_side_streams", bool)):
        monkeypatch.setattr(device, name, fake)
    order = CopyOrder(torch.device("cpu"), has_copies=True)

    def waited(blocks: list[int], steps_after: int | None) -> list[str]:
        waits.clear()
        with order.copying(blocks, steps_after):
            waits.append("copy")
        return waits[:-3]

    for _ in range(3):
        order.end_step()  # events 0 to 2
    assert waited([1], 2) == ["event 0"]
    assert waits[-3:] == ["enter", "copy", "exit"]
    assert waited([1], 0) == ["event 2"]
    # A forgotten step ended before the oldest that is known.
    assert waited([1], 9) == ["event 0"]
    # All work that is queued, for callers that do not know the step.
    assert waited([1], None) == ["event 3"]
    # A fork, or KV that was received, may be written after the step.
    order.end_use([1, 2])
    assert waited([0, 1, 2], 2) == ["event 0", "event 4"]
    assert waited([0], 2) == ["event 0"]
