"""Decode steps of models with recurrent states and of latent attention through captured graphs.

On the CPU a graph is stood in for by calling the recorded function again.
"""

import pytest

from baton_serve.engine.execution.decode_graphs import DecodeGraphs
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
        decodes = captured.graphs[:4]  # of 6, 4, 2 and 1
        for attempt in range(2):
            for number, prompt in enumerate(reference.prompts):
                engine.add(make_work(engine, f"{attempt}-{number}", prompt))
            answers = run(engine)
            assert [answers[f"{attempt}-{n}", 0] for n in range(len(reference.prompts))] == reference.answers
        assert sum(graph.replays for graph in decodes) > 10
        assert not engine._executor.wrong_graphs


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "mamba"])
def test_replayed_steps_of_state_spaces_give_the_right_tokens(
    family: str, references: References, captured: FakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the C++ kernels of CPUs these layers would run in transformers' own forward, which is not captured.
    monkeypatch.setattr(selection, "load_kernels", no_kernels)
    reference = references(family)
    with make_engine(reference.folder, max_num_seqs=6, max_num_batched_tokens=24) as engine:
        decodes = captured.graphs[:4]  # of 6, 4, 2 and 1
        for number, prompt in enumerate(reference.prompts):
            engine.add(make_work(engine, str(number), prompt))
        answers = run(engine)
        assert [answers[str(number), 0] for number in range(len(reference.prompts))] == reference.answers
        assert sum(graph.replays for graph in decodes) > 10
        assert not engine._executor.wrong_graphs


def no_kernels() -> None:
    raise KernelsUnavailableError("the test has none")


def test_a_graph_that_ignores_the_states_is_not_used(
    references: References, captured: FakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references("qwen3_next")
    compute = DecodeGraphs._compute

    def forgetful(self: DecodeGraphs, size: int, slots: None) -> None:
        # The capture computes with zeros, eager work with the states.
        for view in self._state_views() if is_captured else ():
            view.zero_()
        compute(self, size, slots)

    is_captured = False
    monkeypatch.setattr(DecodeGraphs, "_compute", forgetful)
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
        assert engine._executor.wrong_graphs and not engine._executor.has_graphs
