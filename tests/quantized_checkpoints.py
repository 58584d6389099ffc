"""Tiny checkpoints with quantized weights, written from each format's specification.

Each is a tiny model whose linear layers were replaced by what a writer makes of them; the writer also says which
numbers its codes stand for, by arithmetic of its own.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny_models import write_tiny_model


@dataclass(frozen=True)
class Written:
    """`parts` by the ends of their names; `numbers` float32 [outputs, inputs]."""

    parts: dict[str, Tensor]
    numbers: Tensor


Writer = Callable[[Tensor], Written]


def write_checkpoint(
    folder: Path, writer: Writer, quantization_config: dict[str, Any], *, family: str = "llama", **overrides: Any
) -> torch.nn.Module:
    """Makes `folder`, whose linear layers but the head are quantized. Returns transformers' model of their numbers."""
    plain = folder.with_name(folder.name + "-plain")
    write_tiny_model(plain, family, **overrides)
    write_tiny_model(folder, family, **overrides)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    tensors = load_file(plain / "model.safetensors")
    numbers: dict[str, Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        layer = name.removesuffix(".weight")
        written = writer(tensors.pop(name))
        numbers[name] = written.numbers
        tensors |= {layer + end: part.contiguous() for end, part in written.parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    state = {**load_file(plain / "model.safetensors"), **numbers}
    save_file(state, plain / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    add_to_config(folder, quantization_config)
    return model


def add_to_config(folder: Path, quantization_config: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization_config}))


@dataclass(frozen=True)
class Rounded:
    """`(codes - zeros) * scales`: codes int [outputs, inputs], scales and zeros [outputs, groups]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of_input: Tensor

    @property
    def numbers(self) -> Tensor:
        zeros, scales = (part[:, self.group_of_input].float() for part in (self.zeros, self.scales))
        return (self.codes.float() - zeros) * scales


def round_unsigned(
    weight: Tensor, bits: int, group: int, *, is_symmetric: bool, scale_dtype: torch.dtype = torch.float16,
    group_of_input: Tensor | None = None,
) -> Rounded:  # fmt: skip
    """Codes from 0 to 2 ** bits - 1; symmetric ones have the middle for their zero."""
    outputs, inputs = weight.shape
    index = torch.arange(inputs) // group if group_of_input is None else group_of_input
    order = torch.argsort(index, stable=True)
    grouped = weight[:, order].view(outputs, -1, group)
    top = 2**bits - 1
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if is_symmetric:
        scales = (torch.maximum(-low, high) * 2 / top).to(scale_dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        scales = ((high - low) / top).to(scale_dtype)
        zeros = (-low / scales.float()).round().int().clamp(0, top)
    codes = (weight / scales.float()[:, index]).round() + zeros[:, index]
    return Rounded(codes.clamp(0, top).int(), scales, zeros.int(), index)


def pack_words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """int [rows, n] -> int32 [rows, n * bits / 32]: field `i` of a word is code `order[i]` of its run."""
    per_word = 32 // bits
    runs = codes.to(torch.int64).view(len(codes), -1, per_word)
    words = torch.zeros(runs.shape[:2], dtype=torch.int64)
    for field, place in enumerate(order or range(per_word)):
        words |= runs[:, :, place] << bits * field
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
