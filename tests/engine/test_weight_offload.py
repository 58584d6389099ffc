"""Weights in host memory give the same tokens, in eager steps and in graphs. The CPU stands in for a device here."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_serve.engine import Engine, EngineConfig
from baton_serve.engine import device as devices
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.model import weight_offload
from baton_serve.engine.model.weight_offload import WeightOffload, choose_layers, piece_sizes
from tests.engine.conftest import FakeCapture, greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.engine.rank_threads import use_threads
from tests.tiny_models import load_reference, write_tiny_model

PROMPTS = [[random.Random(length).randrange(256) for _ in range(length)] for length in (5, 33, 70)]
SOME = 100_000 / (1 << 30)
"""A size in GiB that some of the layers have, but not all."""
SIZES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 4},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"] * 4},
}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[WeightOffload]:
    """Accept the CPU as a device, and fill buffers with numbers that are not weights until their copy is waited for."""
    made: list[WeightOffload] = []

    def begin(self: WeightOffload, device: torch.device, layers: list[int], common: list[torch.Tensor]) -> None:
        original(self, device, layers, common)
        self._beside = late
        made.append(self)

    def late(work: Any) -> Any:
        return work  # as late as a device may copy: when the layer is entered

    def leave(self: WeightOffload, layer: int) -> None:
        if layer in self:
            self._buffers[self._order[layer] % weight_offload.NUM_BUFFERS].fill_(255)
        left(self, layer)

    original, left = WeightOffload.__init__, WeightOffload.leave
    monkeypatch.setattr(WeightOffload, "__init__", begin)
    monkeypatch.setattr(WeightOffload, "leave", leave)
    monkeypatch.setattr(weight_offload, "refuse_offload", lambda device, num_gib: None)
    for place in ("native.loader", "transformers_loader"):
        monkeypatch.setattr(f"baton_serve.engine.loading.{place}.refuse_offload", lambda device, num_gib: None)
    return made


def answers(engine: Engine) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        engine.add(make_work(engine, str(number), prompt))
    found = run(engine)
    return [found[str(number), 0] for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", num_hidden_layers=7)


def test_fused_layers_and_graphs(llama: Path, held: list[WeightOffload], captured: FakeCapture) -> None:
    model = load_reference(llama)
    with make_engine(llama, dtype="float32", cpu_offload_gb=SOME) as engine:
        assert answers(engine) == [greedy_answer(model, prompt, 12) for prompt in PROMPTS]
        assert sum(graph.replays for graph in captured.graphs) > 10
    (offload,) = held
    assert 2 < len(offload._layers) < 7 and offload.saved_bytes >= 100_000


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"quantization": "sym_int4", "cpu_offload_gb": 1e-6}),
        ("qwen2_moe", {"quantization": "fp8"}),
        ("gpt_oss", {}),
        ("qwen3_5", {"cpu_offload_gb": 1e-6}),
        ("nemotron", {}),
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2, "cpu_offload_gb": 1e-6}),
    ],
)
def test_other_formats_families_and_ranks(
    family: str,
    settings: dict[str, Any],
    held: list[WeightOffload],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_threads(monkeypatch)
    folder = write_tiny_model(tmp_path / family, family, num_hidden_layers=8, **SIZES.get(family, {}))
    offloaded = {"dtype": "float32", "cpu_offload_gb": SOME, **settings}
    plain = {**offloaded, "cpu_offload_gb": 0.0}
    with make_engine(folder, **plain) as engine:
        expected = answers(engine)
    assert not held
    with make_engine(folder, **offloaded) as engine:
        assert answers(engine) == expected
    assert len(held) == settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    assert all(offload.saved_bytes > 0 for offload in held)


def test_layers_are_spread_and_pay_for_their_buffers() -> None:
    assert choose_layers([10] * 12, 20) == [2, 5, 8, 11]
    assert choose_layers([10] * 12, 1000) == list(range(12))
    assert choose_layers([10] * 2, 1) == []
    assert piece_sizes(5 << 30) == [4 << 30, 1 << 30] and piece_sizes((33 << 20) + 3) == [32 << 20, (1 << 20) + 3]


def test_a_cpu_and_a_negative_size_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="cpu_offload_gb is 1, but the device is the CPU"):
        make_engine(llama, cpu_offload_gb=1.0)
    with pytest.raises(ConfigError, match="must not be negative"):
        EngineConfig(model=str(llama), cpu_offload_gb=-1.0).check()
    with pytest.raises(ConfigError, match="use one of the two"):
        EngineConfig(model=str(llama), cpu_offload_gb=1.0, enable_lora=True).check()
    assert devices.weights_device(torch.device("meta"), 0.0).type == "meta"
