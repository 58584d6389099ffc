"""Steps of models with recurrent states and of latent attention through captured graphs.

On the CPU a graph is stood in for by calling the recorded function again.
"""

from collections.abc import Callable

import pytest
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.execution.decode_graphs import DecodeGraphs
from baton_serve.engine.execution.prompt_graphs import PromptGraphs
from baton_serve.engine.kernels import selection
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError
from tests.engine.conftest import FakeCapture, References
from tests.engine.driving import make_engine, make_work, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3"])
def test_replayed_steps_give_the_right_tokens(family: str, references: References, captured: FakeCapture) -> None:
    reference = references(family)
    # Prompts in chunks beside sequences that write, batches with padding, and slots that are used again.
    with make_engine(reference.folder, max_num_seqs=6, max_num_batched_tokens=24) as engine:
        decodes, prompts = captured.graphs[:4], captured.graphs[4:]  # decode steps of 6, 4, 2 and 1
        for attempt in range(2):
            for number, prompt in enumerate(reference.prompts):
                engine.add(make_work(engine, f"{attempt}-{number}", prompt))
            answers = run(engine)
            assert [answers[f"{attempt}-{n}", 0] for n in range(len(reference.prompts))] == reference.answers
        assert sum(graph.replays for graph in decodes) > 10
        assert sum(graph.replays for graph in prompts) > 2 * len(prompts), "more than those of the proof"
        assert not engine._executor.wrong_graphs


@pytest.mark.parametrize(
    "family", ["bamba", "falcon_h1", "mamba", "granitemoehybrid", "jamba", "kimi_linear", "minimax", "nemotron_h"]
)
def test_replayed_steps_of_transformers_layers_give_the_right_tokens(
    family: str, references: References, captured: FakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the C++ kernels of CPUs these layers would run in transformers' own forward, which is not captured.
    monkeypatch.setattr(selection, "load_kernels", no_kernels)
    monkeypatch.setattr(devices, "has_grouped_products", lambda *_: True)
    reference = references(family)
    with make_engine(reference.folder, max_num_seqs=6, max_num_batched_tokens=24) as engine:
        decodes, prompts = captured.graphs[:4], captured.graphs[4:]  # decode steps of 6, 4, 2 and 1
        for number, prompt in enumerate(reference.prompts):
            engine.add(make_work(engine, str(number), prompt))
        answers = run(engine)
        assert [answers[str(number), 0] for number in range(len(reference.prompts))] == reference.answers
        assert sum(graph.replays for graph in decodes) > 10
        assert sum(graph.replays for graph in prompts) > 2 * len(prompts), "more than those of the proof"
        assert not engine._executor.wrong_graphs


def no_kernels() -> None:
    raise KernelsUnavailableError("the test has none")


Spoil = Callable[[Tensor, int], Tensor]
"""Returns the rows that a wrong graph does not change, of one layer's states in all rows and the number of slots."""


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        (DecodeGraphs, lambda view, num_slots: view),
        (PromptGraphs, lambda view, num_slots: view),
        (PromptGraphs, lambda view, num_slots: view[num_slots:]),
    ],
    ids=["decode steps", "prompt steps", "inner checkpoints of prompt steps"],
)
def test_a_graph_that_loses_the_states_is_not_used(
    kind: type[DecodeGraphs] | type[PromptGraphs],
    spoil: Spoil,
    references: References,
    captured: FakeCapture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = references("qwen3_next")
    compute = kind._compute

    def forgetful(self: DecodeGraphs | PromptGraphs, *shape: object) -> None:
        lost = [spoil(view, self._limits.max_num_seqs) for layer in self._states.values() for view in layer.values()]
        before = [rows.clone() for rows in lost]
        compute(self, *shape)  # type: ignore[arg-type]
        # The capture leaves the old states, eager work the new ones.
        for rows, old in zip(lost, before, strict=True) if is_captured else ():
            rows.copy_(old)

    is_captured = False
    monkeypatch.setattr(kind, "_compute", forgetful)
    replay = captured.__call__

    def capture(call):  # type: ignore[no-untyped-def]
        graph = replay(call)
        original = graph.replay

        def spoiled() -> None:
            nonlocal is_captured
            is_captured = True
            original()
            is_captured = False

        graph.replay = spoiled  # type: ignore[method-assign]
        return graph

    monkeypatch.setattr("baton_serve.engine.device.Capturing", lambda _: capture)
    with make_engine(reference.folder, max_num_seqs=2) as engine:
        assert {verdict.operation for verdict in engine._executor.wrong_graphs} == {
            "decode graph" if kind is DecodeGraphs else "prompt graph"
        }
        assert engine._executor.has_graphs == (kind is PromptGraphs)
