"""An engine whose kernels or graphs are wrong finds it at its start, names them, and answers with right tokens."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor

from baton_serve.engine import Engine, device
from baton_serve.engine.execution import kernel_shapes
from baton_serve.engine.kernels.interfaces import AttentionBackend, AttentionMetadata, AttentionSpec, LayerKernels
from baton_serve.engine.kernels.proved_kernels import KernelCandidates
from baton_serve.engine.kernels.prover import KernelCandidate
from baton_serve.engine.kernels.reference import layers as twin
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from tests.engine.conftest import FakeCapture, FakeGraph, References
from tests.engine.driving import make_engine, make_work, run

pytestmark = pytest.mark.slow

FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v2", "qwen3_next", "bamba"])


class PerturbedNorm:
    """The twin's operations, with one that is wrong."""

    def __getattr__(self, name: str) -> object:
        return getattr(twin, name)

    def rms_norm(self, x: Tensor, *given: Any, **rules: Any) -> Tensor:
        normed: Tensor = twin.rms_norm(x, *given, **rules)
        return normed + 0.2 * normed.abs()

    norm_for = linear_norm = None  # both contain the norm


class RaisingAttention(ReferenceAttention):
    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        raise RuntimeError("the device does not have this instruction")


class UnmixedAttention(ReferenceAttention):
    """Wrong for steps with prompts and answers, like kernels on Arc. It counts the steps of each kind."""

    def __init__(self) -> None:
        self.num_mixed = self.num_plain = 0

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        lengths = meta.query_starts.diff()
        output = super().attend(query, cache, meta, spec)
        if bool((lengths == 1).any() and (lengths > 1).any()):
            self.num_mixed += 1
            return output + 1
        self.num_plain += 1
        return output


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Let engines choose from these candidates instead of the device's."""

    def candidates(*, attention: AttentionBackend | None = None, layers: object = None) -> None:
        found = KernelCandidates(
            attention=() if attention is None else (KernelCandidate("injected", lambda: attention),),
            layers=() if layers is None else (KernelCandidate("injected", lambda: cast(LayerKernels, layers)),),
        )
        monkeypatch.setattr(kernel_shapes, "kernel_candidates", lambda device, dtype: found)
        monkeypatch.setattr(kernel_shapes, "proof_folder", lambda: tmp_path)

    yield candidates


def wrong(engine: Engine) -> list[str]:
    return list(dict.fromkeys(one.operation for one in engine.kernel_verdicts if not one.is_right))


def ask(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers to prompts that arrive one after another, while others are answered."""
    waiting = list(enumerate(prompts))
    number, prompt = waiting.pop(0)
    engine.add(make_work(engine, str(number), prompt))
    steps = 0

    def add_next(_: object) -> None:
        nonlocal steps
        steps += 1
        if waiting and steps % 3 == 0:
            number, prompt = waiting.pop(0)
            engine.add(make_work(engine, str(number), prompt))

    answers = run(engine, add_next)
    return [answers[str(number), 0] for number in range(len(prompts))]


def test_a_perturbed_kernel_is_found_at_start_and_the_twin_serves(
    references: References, inject: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    reference = references("llama")
    inject(layers=PerturbedNorm())
    with caplog.at_level(logging.WARNING), make_engine(reference.folder) as engine:
        assert wrong(engine) == ["norm", "fused products"]
        assert ask(engine, reference.prompts) == reference.answers
    assert any(
        "the kernel for norm of injected is wrong" in line and "hidden size 64" in line for line in caplog.messages
    )


def test_a_kernel_that_raises_is_found_at_start_and_the_twin_serves(
    references: References, inject: Callable[..., None]
) -> None:
    reference = references("llama")
    inject(attention=RaisingAttention())
    with make_engine(reference.folder) as engine:
        assert wrong(engine) == ["decode attention", "prefill attention", "mixed attention"]
        assert "this instruction" in next(one.error for one in engine.kernel_verdicts if not one.is_right)
        assert ask(engine, reference.prompts) == reference.answers


@FAMILIES
@pytest.mark.parametrize("is_async", [False, True], ids=["step by step", "ahead"])
def test_attention_that_must_not_mix_gets_steps_of_one_kind(
    family: str, is_async: bool, references: References, inject: Callable[..., None]
) -> None:
    reference, attention = references(family), UnmixedAttention()
    inject(attention=attention)
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "async_scheduling": is_async}
    with make_engine(reference.folder, **settings) as engine:
        assert wrong(engine) == ["mixed attention"] and not engine.limits.mixes_prompts
        proved, attention.num_plain = attention.num_mixed, 0
        assert ask(engine, reference.prompts) == reference.answers
    assert attention.num_mixed == proved and attention.num_plain > 10


class SeenAttention(UnmixedAttention):
    """Right for all steps."""

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        before = self.num_mixed
        output = super().attend(query, cache, meta, spec)
        return output - (self.num_mixed - before)


@FAMILIES
def test_prompts_and_answers_mixed_in_one_step_are_right(
    family: str, references: References, inject: Callable[..., None]
) -> None:
    """For attention with and without windows, latent attention, and both kinds of recurrent layers."""
    reference, attention = references(family), SeenAttention()
    inject(attention=attention)
    with make_engine(reference.folder, max_num_batched_tokens=24, max_num_seqs=8) as engine:
        assert not wrong(engine) and engine.limits.mixes_prompts
        proved = attention.num_mixed
        assert ask(engine, reference.prompts) == reference.answers
    assert attention.num_mixed > proved


class WrongGraph(FakeGraph):
    """Writes something else than its work from the second replay on."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(call)
        self._work = call

    def replay(self) -> None:
        self.replays += 1
        if self.replays == 1:
            self._work()


class WrongCapture(FakeCapture):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __call__(self, call: Callable[[], None]) -> FakeGraph:
        call()
        self.graphs.append(WrongGraph(call) if len(self.graphs) == self._number else FakeGraph(call))
        return self.graphs[-1]


@pytest.mark.parametrize(("number", "operation"), [(2, "decode graph"), (6, "prompt graph")])
def test_a_graph_whose_replay_differs_is_named_and_not_used(
    number: int,
    operation: str,
    references: References,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reference, capture = references("llama"), WrongCapture(number)
    monkeypatch.setattr(device, "has_graphs", lambda _: True)
    monkeypatch.setattr(device, "Capturing", lambda _: capture)
    with caplog.at_level(logging.WARNING), make_engine(reference.folder, max_num_seqs=8) as engine:
        assert wrong(engine) == [operation]
        replays = [graph.replays for graph in capture.graphs]
        assert ask(engine, reference.prompts) == reference.answers
        used = [graph.replays - before for graph, before in zip(capture.graphs, replays, strict=True)]
    # The graphs of decode steps come first; those of prompts need them.
    assert not sum(used[4:]) and (sum(used[:4]) > 0) == (operation == "prompt graph")
    assert any(f"the {operation} for a " in line for line in caplog.messages)


def test_right_graphs_are_replayed_twice_before_their_use(references: References, captured: FakeCapture) -> None:
    reference = references("llama")
    with make_engine(reference.folder, max_num_seqs=8) as engine:
        assert not wrong(engine) and all(graph.replays >= 2 for graph in captured.graphs[:4])
        assert ask(engine, reference.prompts) == reference.answers
