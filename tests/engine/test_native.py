"""Dense decoders loaded without transformers equal the same models loaded with transformers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_serve.engine import EngineConfig
from baton_serve.engine.loading.native.loader import load_dense
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model.loaded_model import LoadedModel
from tests.families import FAMILIES
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "wide heads": ("llama", {"head_dim": 48}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def both(folder: Path, dtype: Literal["auto", "bfloat16"] = "auto") -> tuple[LoadedModel, LoadedModel]:
    config = EngineConfig(model=str(folder), device="cpu", dtype=dtype)
    ours = load_dense(config, CPU, lambda what, fraction: None)
    assert ours is not None
    return ours, load_model(config, CPU, lambda what, fraction: None)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_they_are_equal_in_everything(tmp_path: Path, case: str, dtype: Literal["auto", "bfloat16"]) -> None:
    family, overrides = CASES[case]
    ours, theirs = both(write_tiny_model(tmp_path / "model", family, **overrides), dtype)
    assert replace(ours, module=theirs.module) == theirs
    weights, expected = ours.module.state_dict(), theirs.module.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    positions = torch.tensor([[0, 1, 77, 511]])
    like = torch.empty(0)
    angles = zip(
        ours.module.get_submodule("model.rotary_emb")(like, positions),
        theirs.module.get_submodule("model.rotary_emb")(like, positions),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in angles)


def test_the_families_known_by_heart_are_read_so(tmp_path: Path) -> None:
    """So that a new release of transformers, which writes configs in another way, is noticed."""
    read = {
        name
        for name in FAMILIES
        if load_dense(
            EngineConfig(model=str(write_tiny_model(tmp_path / name, name)), device="cpu"), CPU, lambda *_: None
        )
    }
    assert read >= {"llama", "qwen2", "qwen3"}


def test_the_end_of_sequence_is_read_from_both_files(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    ours, theirs = both(folder)
    assert ours.eos_token_ids == theirs.eos_token_ids
    (folder / "generation_config.json").unlink()
    ours, theirs = both(folder)
    assert ours.eos_token_ids == theirs.eos_token_ids


@pytest.mark.parametrize("change", ["missing", "unknown", "another shape", "a head of its own"])
def test_weights_that_do_not_fit_are_left_to_transformers(tmp_path: Path, change: str) -> None:
    is_tied = change == "a head of its own"
    folder = write_tiny_model(tmp_path / "model", tie_word_embeddings=is_tied)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unknown":
        tensors["model.layers.0.mlp.extra"] = torch.zeros(2)
    elif change == "another shape":
        tensors[name] = tensors[name].T.contiguous()
    else:
        tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_dense(EngineConfig(model=str(folder), device="cpu"), CPU, lambda *_: None) is None


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"load_format": "dummy"}], ids=lambda options: next(iter(options))
)
def test_weights_that_are_not_taken_as_stored_are_left_to_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_tiny_model(tmp_path / "model")
    assert load_dense(EngineConfig(model=str(folder), device="cpu", **options), CPU, lambda *_: None) is None


def test_such_an_engine_never_imports_transformers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    code = (
        "import sys; from baton_serve.engine import Engine, EngineConfig;"
        f"Engine(EngineConfig(model={str(folder)!r}, device='cpu', kv_cache_bytes=4 << 20)).close();"
        "sys.exit(sum(name in sys.modules for name in ('transformers', 'torch._dynamo', 'sympy', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
