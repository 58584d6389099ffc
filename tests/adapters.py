"""Writes low-rank adapters as PEFT does, and transformers' models with such adapters merged into their weights."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import load_reference

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, model: Path, *, rank: int = 8, targets: Sequence[str] = ALL, seed: int = 0, **config: Any
) -> Path:
    """Random and strong enough to change answers. `config` goes into adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, part in load_reference(model).named_modules():
        if isinstance(part, torch.nn.Linear) and name.rsplit(".", 1)[-1] in targets:
            prefix = f"base_model.model.{name}"
            down = torch.randn(rank, part.in_features, generator=generator) * 0.3
            up = torch.randn(part.out_features, rank, generator=generator) * 0.3
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank // 2, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


def merged(model: Path | torch.nn.Module, adapter: Path) -> Any:
    """W + up @ down * alpha / rank, by transformers alone."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    reference: Any = load_reference(model) if isinstance(model, Path) else model
    with torch.no_grad():
        for name, part in reference.named_modules():
            key = f"base_model.model.{name}"
            if f"{key}.lora_A.weight" in tensors:
                part.weight += scale * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
    reference.generation_config.eos_token_id = None
    return reference
