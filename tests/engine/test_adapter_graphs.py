"""Decode steps with adapters replay captured graphs, and give the tokens of transformers with the adapters merged.

On the CPU a graph is stood in for by calling the recorded function again; on a device real ones are captured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.engine import Engine, device
from baton_serve.engine.config import Quantization
from baton_serve.engine.kernels import SlotRows, SlotWeights
from baton_serve.engine.kernels.reference import layers as twin
from baton_serve.engine.model.lora import slots as slots_module
from baton_serve.engine.model.lora.slots import AdapterSlots
from baton_serve.engine.model.quantized.formats import scheme
from tests.adapters import merged, write_adapter
from tests.devices import DEVICE
from tests.engine.conftest import FakeCapture
from tests.engine.driving import run
from tests.engine.test_adapters import OTHER, PROMPT, adapted, expected_of, greedy, lora_engine
from tests.engine.test_quantization import rounded
from tests.tiny_models import load_reference, write_tiny_model

NUM_SIZES = 5  # 16, 8, 4, 2 and 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def three(llama: Path) -> list[Path]:
    """Adapters of several ranks: of all layers, of attention, and of the MLP."""
    attention, mlp = ("q_proj", "v_proj", "o_proj"), ("gate_proj", "down_proj")
    return [
        write_adapter(llama.parent / "all", llama, rank=8, seed=1),
        write_adapter(llama.parent / "attention", llama, rank=3, targets=attention, seed=2),
        write_adapter(llama.parent / "mlp", llama, rank=20, targets=mlp, seed=3),
    ]


@pytest.fixture(autouse=True)
def standing_in(request: pytest.FixtureRequest) -> FakeCapture | None:
    """The graphs that stand in for real ones; None on a device."""
    return request.getfixturevalue("captured") if DEVICE == "cpu" else None


def replays(capture: FakeCapture | None) -> tuple[int, int]:
    """The replays of decode graphs without adapters and with them."""
    if capture is None:
        return 1, 1
    plain, adapting = capture.graphs[:NUM_SIZES], capture.graphs[NUM_SIZES : 2 * NUM_SIZES]
    return sum(graph.replays for graph in plain), sum(graph.replays for graph in adapting)


def add_all(engine: Engine, expected: dict[str, list[int]], prompt: list[int] = PROMPT, mark: str = "") -> None:
    for name in expected:
        engine.add(adapted(engine, f"{name}{mark}", prompt, name))


@pytest.mark.parametrize("is_async", [False, True], ids=["step by step", "ahead"])
def test_one_graph_serves_any_mixture(
    llama: Path, three: list[Path], standing_in: FakeCapture | None, is_async: bool
) -> None:
    expected, other = expected_of(llama, three, PROMPT), expected_of(llama, three, OTHER)
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    with lora_engine(llama, *three, async_scheduling=is_async) as engine:
        before = replays(standing_in)
        add_all(engine, expected)
        add_all(engine, other, OTHER, mark=" other")
        answers = run(engine)
        after = replays(standing_in)
    assert answers == {
        **{(name, 0): tokens for name, tokens in expected.items()},
        **{(f"{name} other", 0): tokens for name, tokens in other.items()},
    }
    if standing_in is not None:
        # Most steps are decode steps of all eight sequences, and each of them is one replay.
        assert after[1] - before[1] > 8


def test_a_batch_without_adapters_replays_the_plain_graph(
    llama: Path, three: list[Path], standing_in: FakeCapture | None
) -> None:
    with lora_engine(llama, *three) as engine:
        before = replays(standing_in)
        engine.add(adapted(engine, "base", PROMPT))
        assert run(engine)["base", 0] == greedy(load_reference(llama), PROMPT)
        after = replays(standing_in)
    if standing_in is not None:
        assert after[0] > before[0] and after[1] == before[1]


def test_slots_are_overwritten_when_adapters_outnumber_them(llama: Path, three: list[Path]) -> None:
    """Each adapter gives way to the next and returns; running ahead, a step is queued while its slot is overwritten."""
    expected = expected_of(llama, three, PROMPT)
    with lora_engine(llama, *three, max_loras=1, async_scheduling=True) as engine:
        for turn in range(2):
            add_all(engine, expected, mark=str(turn))
        answers = run(engine)
    assert answers == {(f"{name}{turn}", 0): tokens for name, tokens in expected.items() for turn in range(2)}


def test_an_adapter_that_is_replaced_has_its_own_slot_until_its_requests_end(llama: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", llama, seed=1)
    expected = [greedy(merged(llama, folder), PROMPT)]
    with lora_engine(llama, folder, max_loras=2) as engine:
        engine.add(adapted(engine, "old", PROMPT, "adapter"))
        first: list[int] = []
        while len(first) < 4:
            first += [token for output in engine.step().tokens for token in output.token_ids]
        write_adapter(folder, llama, seed=2, rank=5)
        expected.append(greedy(merged(llama, folder), PROMPT))
        engine.adapters.put(engine.adapters.read("adapter", str(folder)))
        engine.add(adapted(engine, "new", PROMPT, "adapter"))
        answers = run(engine)
    assert [first + answers["old", 0], answers["new", 0]] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("family", ["qwen3", "phi3", "mixtral", "gpt_oss", "gemma2", "granite", "cohere"])
def test_graphs_of_other_families(tmp_path: Path, family: str, standing_in: FakeCapture | None) -> None:
    """With norms of heads, with weights joined in the checkpoint, and with experts, which adapters leave alone."""
    model = write_tiny_model(tmp_path / "model", family)
    targets = (
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if family == "phi3" else ("q_proj", "v_proj", "o_proj")
    )
    adapter = write_adapter(tmp_path / "adapter", model, targets=targets)
    with lora_engine(model, adapter) as engine:
        before = replays(standing_in)
        for name in ("adapter", ""):
            engine.add(adapted(engine, name, PROMPT, name))
        answers = run(engine)
        after = replays(standing_in)
    assert answers["adapter", 0] == greedy(merged(model, adapter), PROMPT)
    assert answers["", 0] == greedy(load_reference(model), PROMPT)
    assert standing_in is None or after[1] > before[1] + 8


@pytest.mark.parametrize("name", ["int8", "sym_int4", "fp8"])
def test_graphs_over_quantized_weights(llama: Path, three: list[Path], name: Quantization) -> None:
    how = scheme(name, fp8_dtype="e4m3", group_size=32)
    expected = {one.name: greedy(merged(rounded(llama, how), one), PROMPT) for one in three}
    expected[""] = greedy(rounded(llama, how), PROMPT)
    with lora_engine(llama, *three, quantization=name, quantization_group_size=32) as engine:
        add_all(engine, expected)
        assert run(engine) == {(one, 0): tokens for one, tokens in expected.items()}


@pytest.mark.skipif(DEVICE != "cpu", reason="devices use these kernels anyway")
def test_the_kernels_of_devices_give_the_same_tokens(
    llama: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("baton_serve.engine.kernels.triton.lora")
    monkeypatch.setattr(slots_module, "adapter_kernels", lambda _: kernels)
    expected = expected_of(llama, three[:2], PROMPT)
    expected = {name: tokens[:5] for name, tokens in expected.items()}
    with lora_engine(llama, *three, max_num_seqs=4) as engine:
        for name in expected:
            engine.add(adapted(engine, name, PROMPT, name, max_tokens=5))
        assert run(engine) == {(name, 0): tokens for name, tokens in expected.items()}


def test_work_in_a_second_queue_may_run_until_its_result_is_needed(
    llama: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it runs as late as it may; in the other tests, as early."""
    monkeypatch.setattr(AdapterSlots, "_beside", lambda self, work: work)
    expected = expected_of(llama, three, PROMPT)
    with lora_engine(llama, *three) as engine:
        add_all(engine, expected)
        assert run(engine) == {(name, 0): tokens for name, tokens in expected.items()}


def test_graphs_that_cannot_contain_two_queues_are_captured_with_one(
    llama: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forks: list[object] = []

    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        forks.append(work)
        raise RuntimeError("a second queue cannot be captured")

    monkeypatch.setattr(device, "beside", lambda _: refuse)
    expected = expected_of(llama, three, PROMPT)
    with lora_engine(llama, *three) as engine:
        assert len(forks) == 1 and engine._executor.has_adapter_graphs
        assert "cannot capture" not in caplog.text
        add_all(engine, expected)
        assert run(engine) == {(name, 0): tokens for name, tokens in expected.items()}


def test_steps_with_prompts_use_the_slots_unless_all_rows_have_one_adapter(
    llama: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside sequences that write, with the logits of some rows only."""
    sizes: list[tuple[int, bool]] = []
    expected = expected_of(llama, three, PROMPT)
    with lora_engine(llama, *three, max_num_batched_tokens=40) as engine:
        slot_rows = engine._executor._slot_rows  # type: ignore[attr-defined]

        def counted(arrays: Any) -> Any:
            found = slot_rows(arrays)
            sizes.append((len(arrays.adapters), found is not None))
            return found

        monkeypatch.setattr(engine._executor, "_slot_rows", counted)
        add_all(engine, expected)
        assert run(engine) == {(name, 0): tokens for name, tokens in expected.items()}
    assert {uses for count, uses in sizes if count > 1} == {True}
    assert (1, False) in sizes and max(count for count, _ in sizes) >= 2


def test_a_kernel_that_is_wrong_on_a_device_is_not_used(
    llama: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class ForgettingTheLastRow:
        low_rank, shrink = staticmethod(twin.low_rank), staticmethod(twin.shrink)

        @staticmethod
        def expand(output: Tensor, low: Tensor, weights: SlotWeights, rows: SlotRows) -> None:
            twin.expand(output[:-1], low[:-1], weights, SlotRows(rows.slots[:-1], rows.order, rows.groups))

    monkeypatch.setattr(slots_module, "adapter_kernels", lambda _: ForgettingTheLastRow())
    expected = expected_of(llama, three[:1], PROMPT)
    with lora_engine(llama, *three) as engine:
        assert "cannot capture graphs for LoRA adapters" in caplog.text and "differ from plain torch" in caplog.text
        assert engine._executor.has_graphs and not engine._executor.has_adapter_graphs
        add_all(engine, expected)
        assert run(engine) == {(name, 0): tokens for name, tokens in expected.items()}


def test_without_graphs_no_memory_is_taken_for_slots(
    llama: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(AdapterSlots, "__init__", lambda self, *arguments, **settings: made.append(self))
    with lora_engine(llama, *three, enforce_eager=True) as engine:
        expected = expected_of(llama, three[:1], PROMPT)
        add_all(engine, expected)
        assert run(engine) == {(name, 0): tokens for name, tokens in expected.items()}
    assert not made


def test_slots_hold_zeros_where_an_adapter_has_nothing(llama: Path, three: list[Path]) -> None:
    """Otherwise what the previous adapter of the slot has left there would be added."""
    with lora_engine(llama, *three, max_loras=1) as engine:
        slots = engine._executor._graphs._slots  # type: ignore[attr-defined]
        fingerprints = {one.name: one.fingerprint for one in engine.adapters.records()}
        slots.assign([fingerprints["all"]])
        assert slots._memory.count_nonzero() == slots._memory.numel() * 8 // 64  # of rank 8, in slots of rank 64
        slots.assign([fingerprints["attention"]])
        written = {number for number, weights in enumerate(slots._weights) if torch.any(weights.down != 0)}
        assert written and all(number % 4 in (0, 1) for number in written)


def test_slots_have_the_dtype_of_the_adapters(llama: Path, three: list[Path], standing_in: FakeCapture | None) -> None:
    """Set `--lora-dtype`, which may differ from the dtype of the model."""
    answers: list[dict[tuple[str, int], list[int]]] = []
    for enforce_eager in (False, True):
        with lora_engine(llama, *three, lora_dtype="bfloat16", enforce_eager=enforce_eager) as engine:
            for one in ("all", "attention", "mlp", ""):
                engine.add(adapted(engine, one, PROMPT, one, max_tokens=6))
            answers.append(run(engine))
    assert replays(standing_in)[1] > 3
    assert answers[0] == answers[1]
