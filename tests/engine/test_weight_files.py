"""Parameters loaded directly from checkpoint files equal the ones that transformers loads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from baton_serve.engine.collectives.shard import Shard
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.loading import weight_files
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.loading.weight_files import TensorCopy, fill, map_tensors, tensor_copies
from tests.tiny_models import write_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {}), ("gpt2", {}), ("phi3", {})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parameters_are_those_that_transformers_loads(
    family: str, overrides: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "model", family, **overrides)
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 1000)  # so that each is cut
    with no_init_weights():
        made: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    made.tie_weights()
    pieces = tensor_copies(made, map_tensors(folder))
    assert pieces is not None
    reported: list[float] = []
    fill(list(pieces.values()), CPU, reported.append)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    found = made.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert reported == sorted(reported) and reported[-1] == 1.0


def test_what_transformers_converts_is_left_to_it(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    stored = map_tensors(folder)
    name = next(iter(stored))
    assert tensor_copies(module, {n: t for n, t in stored.items() if n != name}) is None
    assert tensor_copies(module, {**stored, "other.weight": torch.zeros(1)}) is None
    assert tensor_copies(module, {**stored, name: torch.zeros(3)}) is None


@pytest.mark.parametrize("differs", [True, False])
def test_a_tied_head_that_is_stored_with_values_of_its_own_is_left_to_transformers(
    differs: bool, tmp_path: Path
) -> None:
    """It does not tie them then, as in Qwen2.5-Omni."""
    folder = write_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    module: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    module.tie_weights()
    stored = map_tensors(folder)
    head = stored["model.embed_tokens.weight"].clone()
    head[-1, -1] += differs
    assert (tensor_copies(module, {**stored, "lm_head.weight": head}) is None) == differs


def test_slices_of_every_dtype(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),  # what follows is not aligned
        "wide": torch.randn(6, 8),
        "half": torch.randn(6, 8).half(),
        "code": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "none": torch.zeros(0),
        "scalar": torch.tensor(3.0),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    stored = map_tensors(tmp_path)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    columns = torch.zeros(6, 3, dtype=torch.bfloat16)
    pieces = [TensorCopy(targets[name], stored[name]) for name in tensors]
    fill([*pieces, TensorCopy(columns, stored["wide"][:, 2:5])], CPU, lambda fraction: None)
    assert all(
        torch.equal(targets[n].view(torch.uint8), tensors[n].view(torch.uint8)) for n in ("wide", "half", "code")
    )
    assert targets["odd"].tolist() == [0, 1, 2] and targets["scalar"].item() == 3.0
    assert torch.equal(columns, tensors["wide"][:, 2:5].bfloat16())
    with pytest.raises(ValueError, match=r"shape \[6, 8\] is stored for one of \[8, 6\]"):
        fill([TensorCopy(torch.zeros(8, 6), stored["wide"])], CPU, lambda fraction: None)


def test_weights_are_copied_by_as_many_threads_as_the_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int | None] = []

    class RecordingPool(ThreadPoolExecutor):
        def __init__(self, max_workers: int | None = None, **options: Any) -> None:
            counts.append(max_workers)
            super().__init__(max_workers, **options)

    monkeypatch.setattr(weight_files, "ThreadPoolExecutor", RecordingPool)
    folder = write_tiny_model(tmp_path / "model")
    given: list[dict[str, object]] = [
        {"enable_multithread_load": True, "num_threads": 5}, {"enable_multithread_load": False, "num_threads": 5}, {},
    ]  # fmt: skip
    for settings in given:
        config = EngineConfig(model=str(folder), tensor_parallel_size=2, model_loader_extra_config=settings)
        load_model(config, CPU, lambda what, fraction: None, Shard(1, 2))
    assert counts[:2] == [5, 1] and counts[2] not in (None, 5)
    assert len(counts) == 3
