"""Weights that cannot replace those of the loaded model are found by their configs and headers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton_serve.engine.errors import ModelError
from baton_serve.engine.loading.weight_replacement import check_replacement
from baton_serve.engine.model.fingerprint import versioned

CONFIG = {"model_type": "llama", "hidden_size": 4, "torch_dtype": "float32"}
TENSORS = {"layer.weight": (4, 4), "lm_head.weight": (8, 4)}


def write(folder: Path, config: Mapping[str, Any] = CONFIG, tensors: Mapping[str, Any] = TENSORS) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def test_another_checkpoint_of_the_same_architecture_fits(tmp_path: Path) -> None:
    old = write(tmp_path / "old")
    config = CONFIG | {"torch_dtype": "bfloat16", "transformers_version": "5", "use_cache": False, "more": 1}
    check_replacement(old, write(tmp_path / "new", config), "auto")
    # Tied embeddings are left out by some programs.
    check_replacement(old, write(tmp_path / "tied", tensors={"layer.weight": (4, 4)}), "auto")
    check_replacement(old, old, "auto")


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        (CONFIG | {"hidden_size": 8}, TENSORS, "hidden_size is 8 instead of 4"),
        (CONFIG | {"model_type": "qwen3"}, TENSORS, "another architecture"),
        (CONFIG, TENSORS | {"layer.weight": (4, 2)}, r"layer.weight has the shape \[4, 2\] instead of \[4, 4\]"),
        (CONFIG, {"lm_head.weight": (8, 4)}, "layer.weight is missing"),
    ],
)
def test_other_shapes_are_refused_with_the_difference(
    tmp_path: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], reason: str
) -> None:
    old = write(tmp_path / "old")
    with pytest.raises(ModelError, match=reason):
        check_replacement(old, write(tmp_path / "new", config, tensors), "auto")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    old = write(tmp_path / "old")
    with pytest.raises(ModelError, match=r"nowhere/config\.json cannot be read"):
        check_replacement(old, str(tmp_path / "nowhere"), "auto")
    new = Path(write(tmp_path / "new"))
    (new / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        check_replacement(old, str(new), "auto")
    (new / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weight files"):
        check_replacement(old, str(new), "auto")
    (new / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        check_replacement(old, str(new), "auto")


def test_each_version_of_the_weights_has_its_own_fingerprint() -> None:
    assert versioned("f", "") == "f"
    assert len({versioned("f", version) for version in ("", "a", "b")} | {versioned("g", "a")}) == 4
