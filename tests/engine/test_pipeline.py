"""Stages of a pipeline, each with some of the layers, give the tokens of transformers.generate."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import RequestId
from baton_serve.engine import Engine, EngineConfig, StepResult, device
from baton_serve.engine.collectives.stage_layers import Stage, partition_layers
from baton_serve.engine.collectives.stage_links import Peers, StageLinks
from baton_serve.engine.errors import ConfigError, UnsupportedModelError
from baton_serve.engine.execution.decode_graphs import DecodeGraphs
from baton_serve.engine.execution.prompt_graphs import PromptGraphs
from baton_serve.engine.kv.kv_cache import KVMemoryKind
from baton_serve.engine.model.pipeline_stage import StagedForward
from baton_serve.engine.step.in_flight import InFlightStep
from baton_serve.engine.step.step_loop import StepLoop
from tests.engine.conftest import FakeCapture, FakeGraph, References
from tests.engine.driving import hand_over, make_engine, make_work, place_kv_caches, run
from tests.families import HYBRIDS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threaded_ranks")]


def ask(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add(make_work(engine, str(number), prompt, **sampling))
    answers = run(engine)
    return [answers[str(number), 0] for number in range(len(prompts))]


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 3},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "pipeline_layer_partition": "1,2"},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)
def test_greedy_tokens_equal_transformers(settings: dict[str, Any], references: References) -> None:
    reference = references("llama")
    # Prompts of several chunks, which follow each other through the stages, beside decoding sequences.
    with make_engine(reference.folder, max_num_batched_tokens=24, **settings) as engine:
        assert ask(engine, reference.prompts) == reference.answers


# Layers of transformers and fused ones; a shared head; windows by layer; scaled embeddings; experts; latents; chunks;
# an indexer.
@pytest.mark.parametrize(
    "family",
    ["gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "granite", "phi3", "gemma3", "llama4_text", "deepseek_v32"],
)
def test_families(family: str, references: References) -> None:
    reference = references(family)
    with make_engine(reference.folder, max_num_batched_tokens=24, pipeline_parallel_size=2) as engine:
        assert ask(engine, reference.prompts) == reference.answers


@pytest.mark.parametrize("family", [family for family in HYBRIDS if family != "zamba2"])
def test_hybrids_answer_as_transformers(family: str, references: References) -> None:
    """In chunks that follow each other through the stages, and from a checkpoint. A stage may lack states or KV."""
    reference = references(family)
    with make_engine(reference.folder) as one:
        layout = one.layout
    for size in (2, 3):
        with make_engine(reference.folder, max_num_batched_tokens=24, pipeline_parallel_size=size) as engine:
            assert engine.layout == layout
            assert ask(engine, reference.prompts) == reference.answers
            before = engine.stats().prefix_hit_tokens
            assert ask(engine, reference.prompts[3:]) == reference.answers[3:]
            assert engine.stats().prefix_hit_tokens == before + 96 + 48


@pytest.mark.parametrize(
    ("family", "settings", "place"),
    [
        ("qwen3_5", {"pipeline_parallel_size": 2}, "shared"),
        ("qwen3_5", {"pipeline_parallel_size": 3}, "mirrored"),
        ("qwen3_5", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "mirrored"),
        ("qwen3_next", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "shared"),
        ("falcon_h1", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "shared"),
        ("mamba2", {"pipeline_parallel_size": 2}, "mirrored"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value.values())),
)
def test_checkpoints_of_one_stage_and_of_several_are_the_same_bytes(
    family: str,
    settings: dict[str, Any],
    place: KVMemoryKind,
    references: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts get further answers too. Stages on devices keep blocks in a mirror."""
    reference = references(family)
    prompts, answers = reference.prompts, reference.answers
    with make_engine(reference.folder) as one:
        small = {"num_gpu_blocks_override": 160 // 16 + 3 * one.layout.state_blocks, "max_model_len": 128}
        place_kv_caches(monkeypatch, place)
        with make_engine(reference.folder, max_num_batched_tokens=24, **small, **settings) as several:
            assert one.layout == several.layout
            for source, sink in ((one, several), (several, one)):
                for number in range(2):  # the second one has a prefix in the cache of both
                    work = make_work(source, f"over-{number}", prompts[3])
                    assert hand_over(source, sink, work)[f"over-{number}", 0] == answers[3]
                assert several.reset_prefix_cache() and one.reset_prefix_cache()
            assert ask(several, prompts[:3] * 2) == answers[:3] * 2
            several.add(make_work(several, "several", prompts[4], sequences=2))
            assert run(several) == {("several", number): answers[4] for number in range(2)}


@pytest.mark.parametrize("quantization", ["int8", "sym_int4"])
def test_rounded_weights_give_the_tokens_of_one_stage(quantization: str, references: References) -> None:
    reference = references("llama")
    found = []
    for size in (1, 2):
        settings = {"pipeline_parallel_size": size, "quantization": quantization, "quantization_group_size": 32}
        with make_engine(reference.folder, **settings) as engine:
            found.append(ask(engine, reference.prompts))
    assert found[0] == found[1]


def test_handoffs_between_different_numbers_of_ranks(references: References) -> None:
    """A block is one name and one piece of memory, to which each stage adds its layers."""
    reference = references("llama")
    kinds: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
    engines = [make_engine(reference.folder, max_num_batched_tokens=24, **kind) for kind in kinds]
    try:
        assert len({engine.layout for engine in engines}) == 1
        for i, (source, sink) in enumerate(zip(engines, [*engines[1:], engines[0]], strict=True)):
            for j, (one, other) in enumerate(((source, sink), (sink, source))):
                # The second handoff of a prompt finds its prefix in the cache of the one that received it.
                for prompt, answer in zip(reference.prompts[2:4], reference.answers[2:4], strict=True):
                    work = make_work(one, f"{i}-{j}-{len(prompt)}", prompt)
                    assert hand_over(one, other, work)[work.request_id, 0] == answer
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "mamba2"])
def test_preempted_sequences_of_stages_are_computed_again(family: str, references: References) -> None:
    folder = references(family).folder
    prompts = [[(7 * number + i) % 256 for i in range(16)] for number in range(16)]
    with make_engine(folder) as one:
        expected = ask(one, prompts)
        # Too few blocks for all answers at once.
        num_blocks = 10 + 2 * one.layout.state_blocks
    with make_engine(folder, pipeline_parallel_size=2, num_gpu_blocks_override=num_blocks, max_model_len=128) as two:
        assert ask(two, prompts) == expected
        assert two.stats().preemptions


@pytest.mark.parametrize("fixture", ["references", "captured"], ids=["eager", "graphs"])
def test_sampling_logprobs_and_several_sequences(
    references: References, request: pytest.FixtureRequest, fixture: str
) -> None:
    """The head and the sampler are on the first stage, whatever a request asks for."""
    request.getfixturevalue(fixture)
    reference = references("llama")
    found = []
    for size in (1, 2):
        with make_engine(reference.folder, pipeline_parallel_size=size) as engine:
            for number, prompt in enumerate(reference.prompts[:3]):
                engine.add(make_work(engine, f"s{number}", prompt, sequences=2, temperature=0.9, top_p=0.9))
            engine.add(make_work(engine, "p", reference.prompts[0], prompt_logprobs=1, logprobs=2))
            found.append(run(engine))
    assert found[0] == found[1]


def test_every_stage_has_a_step_while_prompts_have_chunks(references: References) -> None:
    reference = references("llama")
    with make_engine(reference.folder, max_num_batched_tokens=32, pipeline_parallel_size=2) as engine:
        engine.add(make_work(engine, "long", reference.prompts[3]))
        engine.step()
        # The first step is finished, and before that the first stage got two chunks more, as the first samples nothing.
        chunks = [(chunk.start, chunk.length) for step in engine._steps._in_stages for chunk in step.plan.chunks]
        assert chunks == [(16, 16), (32, 16), (48, 16)]
        assert run(engine)["long", 0] == reference.answers[3]


def test_a_token_is_not_delayed_by_one_more_step(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step is waited for behind one other step alone, and so is any step beside sequences that decode."""
    reference, behind = references("llama"), list[tuple[bool, int]]()
    plain = StepLoop._choose

    def choose(self: StepLoop, launched: InFlightStep, result: StepResult) -> InFlightStep | None:
        behind.append((bool(launched.plan.rows), len(self._in_stages) - 1))
        return plain(self, launched, result)

    monkeypatch.setattr(StepLoop, "_choose", choose)
    with make_engine(reference.folder, max_num_batched_tokens=32, pipeline_parallel_size=2) as engine:
        engine.add(make_work(engine, "decoding", reference.prompts[0]))
        while not engine.step().tokens:
            assert engine.has_work()
        engine.add(make_work(engine, "long", reference.prompts[3]))
        behind.clear()
        assert run(engine)["long", 0] == reference.answers[3]
        assert {count for _, count in behind} <= {0, 1} and (False, 1) in behind
        engine.add(make_work(engine, "alone", reference.prompts[3][::-1]))
        behind.clear()
        run(engine)
        assert max(count for is_sampled, count in behind if not is_sampled) == 2


def test_the_head_is_computed_only_for_steps_that_sample(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, counts = references("llama"), list[int]()
    plain = StagedForward.finish

    def finish(self: StagedForward, num_rows: int) -> torch.Tensor:
        counts.append(num_rows)
        return plain(self, num_rows)

    with make_engine(reference.folder, max_num_batched_tokens=32, pipeline_parallel_size=2) as engine:
        monkeypatch.setattr(StagedForward, "finish", finish)
        # Its prompt of 100 tokens has 7 chunks, and only the last one is sampled.
        assert ask(engine, [reference.prompts[3]]) == [reference.answers[3]]
    assert counts == [1] * len(reference.answers[3])


def test_only_blocks_that_all_stages_have_computed_are_shown_to_transports(references: References) -> None:
    with make_engine(references("llama").folder, max_num_batched_tokens=32, pipeline_parallel_size=2) as engine:
        work = make_work(engine, "long", references("llama").prompts[3])
        engine.add(work)
        engine.step()
        # One chunk of a block is finished; three more are registered, and the stages still compute them.
        names = hash_blocks(work.root, work.token_ids[:96], 16)
        assert len(engine.cached_block_hashes()) == 4
        assert [name for name, _ in engine.pin(RequestId("pull"), names)] == names[:1]
        engine.unpin(RequestId("pull"))
        run(engine)
        assert len(engine.pin(RequestId("pull"), names)) == len(names)
        engine.unpin(RequestId("pull"))


def graphs_of(captured: FakeCapture, kind: type) -> list[FakeGraph]:
    """Return the graphs that objects of the class `kind` have captured, in all ranks."""
    return [graph for graph in captured.graphs if isinstance(graph.call.func.__self__, kind)]


def replays_of(graphs: list[FakeGraph]) -> int:
    return sum(graph.replays for graph in graphs)


@pytest.mark.parametrize(
    ("family", "stages", "size"),
    [
        *((family, *sizes) for family in ("llama", "qwen3_moe") for sizes in ((2, 1), (3, 1), (2, 2))),
        # The first of its stages has recurrent states alone, and the last one attention alone.
        ("qwen3_5", 3, 1),
    ],
)
def test_steps_of_all_stages_are_replayed(
    family: str, stages: int, size: int, references: References, captured: FakeCapture
) -> None:
    reference = references(family)
    settings = {"pipeline_parallel_size": stages, "tensor_parallel_size": size, "max_num_seqs": 8}
    with make_engine(reference.folder, max_num_batched_tokens=24, **settings) as engine:
        decodes, prompts = graphs_of(captured, DecodeGraphs), graphs_of(captured, PromptGraphs)
        # For batches of 8, 4, 2 and 1 sequences.
        assert len(decodes) == 4 * stages * size
        # For prompts alone and beside others, of each size up to the largest step: 12 or 8 prompt tokens, and 8 others.
        assert len(prompts) == 2 * {2: len([16, 20]), 3: len([16])}[stages] * stages * size
        assert not engine._executor.wrong_graphs
        before = [replays_of(graphs) for graphs in (decodes, prompts)]
        assert ask(engine, reference.prompts) == reference.answers
        after = [replays_of(graphs) for graphs in (decodes, prompts)]
        assert min(np.subtract(after, before)) > 10 * stages * size


class NumberedEvent:
    """Stands in for an event of a device: `number` counts the events of its thread."""

    counts: ClassVar[Counter[int]] = Counter()

    def __init__(self, _: torch.device) -> None:
        self.counts[threading.get_ident()] += 1
        self.number = self.counts[threading.get_ident()]

    def query(self) -> bool:
        return False


class RecordedStream:
    """Stands in for a second stream of a device: it records how many events of the thread came after each event for
    which it waits.
    """

    later: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, _: torch.device) -> None:
        self.later.setdefault(threading.get_ident(), [])

    def wait(self, event: NumberedEvent) -> None:
        thread = threading.get_ident()
        self.later[thread].append(event.counts[thread] - event.number)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_copies_to_the_mirror_do_not_wait_for_steps_behind_them(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references("llama")
    place_kv_caches(monkeypatch, "mirrored")
    for name, fake in (("record", NumberedEvent), ("SideStream", RecordedStream), ("has_side_streams", bool)):
        monkeypatch.setattr(device, name, fake)
    NumberedEvent.counts.clear()
    RecordedStream.later.clear()
    with make_engine(reference.folder, max_num_batched_tokens=32, pipeline_parallel_size=2) as engine:
        for number in (2, 3):  # prompts of 33 and 100 tokens, in steps of 16
            engine.add(make_work(engine, f"{number}", reference.prompts[number]), mode="prefill")
        run(engine)
        by_stage = [waits for waits in RecordedStream.later.values() if waits]
        # When the first prompt is complete, the stages have three steps of the second one.
        assert [max(waits) for waits in by_stage] == [3, 3]
        assert [min(waits) for waits in by_stage] == [0, 0]


@pytest.mark.parametrize("broken", ["cannot be captured", "computes nothing"])
def test_if_graphs_of_one_stage_fail_decode_steps_use_none(
    broken: str, references: References, captured: FakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first stage or the last one, whichever captures later."""
    reference, threads = references("llama"), list[int]()

    def capture(call: Callable[[], None]) -> FakeGraph:
        threads.append(threading.get_ident())
        if threads[-1] == threads[0]:
            return captured(call)
        if broken == "cannot be captured":
            raise RuntimeError("no graphs today")
        return FakeGraph(lambda: None)

    monkeypatch.setattr(device, "Capturing", lambda _: capture)
    with make_engine(reference.folder, pipeline_parallel_size=2, max_num_seqs=8) as engine:
        assert len(set(threads)) == 2
        assert not engine._executor.has_graphs
        # A stage may replay its steps with prompts, which the others compute without a graph.
        decodes = graphs_of(captured, DecodeGraphs)
        before = [graph.replays for graph in decodes]
        assert ask(engine, reference.prompts) == reference.answers
        assert [graph.replays for graph in decodes] == before


def test_stages_of_transformers_layers_are_not_captured(references: References, captured: FakeCapture) -> None:
    reference = references("gpt2")
    with make_engine(reference.folder, pipeline_parallel_size=2) as engine:
        assert not captured.graphs and not engine._executor.has_graphs


def test_cancelled_while_steps_are_in_the_stages(references: References) -> None:
    reference = references("llama")
    with make_engine(reference.folder, max_num_batched_tokens=16, pipeline_parallel_size=2) as engine:
        for number in range(2):
            engine.add(make_work(engine, f"{number}", reference.prompts[3 - number]))
        engine.step()
        engine.cancel(RequestId("0"))
        assert run(engine)["1", 0] == reference.answers[2]
        assert engine.stats().free_blocks + engine.stats().cached_blocks >= engine.stats().total_blocks


@pytest.mark.parametrize(
    ("family", "settings", "error", "words"),
    [
        ("llama", {"pipeline_parallel_size": 9}, ConfigError, "has 3 layers only"),
        ("llama", {"pipeline_parallel_size": 2, "pipeline_layer_partition": "1,1"}, ConfigError, "whose sum is 3"),
        ("llama", {"pipeline_layer_partition": "3"}, ConfigError, "set pipeline_parallel_size too"),
        ("llama", {"pipeline_parallel_size": 2, "enable_lora": True}, ConfigError, "enable_lora"),
        ("zamba2", {"pipeline_parallel_size": 2}, UnsupportedModelError, "share weights"),
        ("gemma4", {"pipeline_parallel_size": 2}, UnsupportedModelError, "read the KV of other layers"),
        ("glm_moe_dsa", {"pipeline_parallel_size": 2}, UnsupportedModelError, "indexer of another layer"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    family: str, settings: dict[str, Any], error: type[Exception], words: str, references: References
) -> None:
    with pytest.raises(error, match=words):
        make_engine(references(family).folder, **settings)


def test_layers_are_divided_evenly_or_by_memory() -> None:
    assert partition_layers(32, 2, None) == (16, 16)
    # The first stage has the embedding and the head too.
    assert partition_layers(33, 2, None) == (16, 17)
    assert partition_layers(10, 3, None) == (3, 4, 3)
    assert partition_layers(10, 3, "2,5,3") == (2, 5, 3)
    assert partition_layers(36, 2, None, [24e9, 12e9]) == (24, 12)
    # Equal cards get equal stages, although something else takes some of the memory of one.
    assert partition_layers(36, 2, None, [23.5e9, 24e9]) == (18, 18)
    assert partition_layers(4, 3, None, [40e9, 1e9, 1e9]) == (2, 1, 1)
    with pytest.raises(ConfigError, match="10,x"):
        partition_layers(20, 2, "10,x")


def test_stages_know_their_layers() -> None:
    stages = [Stage(number, (2, 3, 1)) for number in range(3)]
    assert [stage.layers for stage in stages] == [range(2), range(2, 5), range(5, 6)]
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
    assert Stage().is_whole
    assert Stage().is_first
    assert Stage().is_last


def test_settings_name_the_ranks() -> None:
    assert EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=3).num_ranks == 6


class RecordedGroup:
    """Stands in for a process group of a device: it records the calls."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _get_backend(self, _: torch.device) -> "RecordedGroup":
        return self

    def _start_coalescing(self, _: torch.device) -> None:
        self.calls.append("begin")

    def _end_coalescing(self, _: torch.device) -> "RecordedGroup":
        self.calls.append("end")
        return self

    def send(self, tensors: list[torch.Tensor], peer: int, _: int) -> None:
        self.calls.append(f"send {tuple(tensors[0].shape)} to {peer}")

    def recv(self, tensors: list[torch.Tensor], peer: int, _: int) -> None:
        self.calls.append(f"receive {tuple(tensors[0].shape)} from {peer}")

    def wait(self) -> None:
        self.calls.append("wait")


def test_each_send_and_receive_of_a_device_is_a_batch() -> None:
    """Libraries warn of others."""
    forward, back = RecordedGroup(), RecordedGroup()
    links = StageLinks(forward, back, Peers(0, None, 0, 1), torch.empty(0, 8), is_first=False, max_in_flight=4)
    received = links.receive(3)
    assert received is not None
    links.send(received[:2])
    assert forward.calls == ["begin", "receive (3, 8) from 0", "end", "wait"]
    assert back.calls == ["begin", "send (2, 8) to 0", "end"]
    for _ in range(3):
        links.send(received)
    assert back.calls.count("wait") == 0
    links.send(received)
    # The fifth one waits for the first, whose memory is free then.
    assert back.calls.count("wait") == 1
