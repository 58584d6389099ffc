"""Reads a rank's part of a checkpoint: of each stored tensor no more than the slice that belongs to this rank."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from engine import attention
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_folder import LOAD_ERRORS, HfConfig, broken_file, first_line
from engine.parallel.shard import Shard, cut_of, cuts_head, shard_config

INDEX = "model.safetensors.index.json"


def load_shard(
    hf_config: HfConfig, config: EngineConfig, dtype: torch.dtype, target: torch.device, shard: Shard
) -> nn.Module:
    """A module of the shard's shape on `target`. Raises `ModelError`."""
    folder = Path(config.model)
    with no_init_weights():
        module = _build(hf_config, config, dtype, target, shard)
    _cut_head(module, shard)
    try:
        with ExitStack() as files:
            _fill(module, _open(folder, files), folder, shard)
    except LOAD_ERRORS as exc:
        raise ModelError(f"the weights in {broken_file(folder) or folder} cannot be loaded: {first_line(exc)}") from exc
    if (folder / "generation_config.json").is_file():
        cast(Any, module).generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return module


def make_dummy_shard(
    hf_config: HfConfig, config: EngineConfig, dtype: torch.dtype, target: torch.device, shard: Shard
) -> nn.Module:
    """Random weights. What all ranks hold is the same everywhere; the parts that differ are equal too."""
    torch.manual_seed(config.seed)
    module = _build(hf_config, config, dtype, target, shard)
    _cut_head(module, shard)
    return module


def _build(
    hf_config: HfConfig, config: EngineConfig, dtype: torch.dtype, target: torch.device, shard: Shard
) -> nn.Module:
    try:
        with torch.device(target):
            module: nn.Module = AutoModelForCausalLM.from_config(
                shard_config(hf_config, shard), dtype=dtype, attn_implementation=attention.NAME
            )
    except LOAD_ERRORS as exc:
        raise ModelError(f"{config.model} cannot be built: {first_line(exc)}") from exc
    return module


def _cut_head(module: nn.Module, shard: Shard) -> None:
    """A tied head stays a view of the embeddings, which every rank holds whole."""
    model = cast(Any, module)
    weight: Tensor = model.lm_head.weight.data
    if not cuts_head(weight.shape[0], shard):
        return
    is_tied = weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    rows = weight[shard.part(weight.shape[0])]
    with torch.device("meta"):
        head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    head.weight = nn.Parameter(rows if is_tied else rows.clone(), requires_grad=False)
    model.lm_head = head


def _open(folder: Path, files: ExitStack) -> dict[str, Any]:
    """By tensor name, the open file that holds it."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.is_file():
        paths = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    found: dict[str, Any] = {}
    for path in paths:
        file = files.enter_context(safe_open(path, framework="pt"))
        found |= dict.fromkeys(file.keys(), file)
    return found


def _fill(module: nn.Module, stored: dict[str, Any], folder: Path, shard: Shard) -> None:
    model = cast(Any, module)
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    cuts = cuts_head(model.config.vocab_size, shard)
    missing: list[str] = []
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name == "lm_head.weight" and is_tied:
                continue
            cut = cut_of(name, shard, cuts_head=cuts)
            if cut.is_zero:
                parameter.zero_()
            elif name in stored:
                parameter.copy_(_read(stored[name], name, cut.dim, shard))
            else:
                missing.append(name)
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} weights that its config asks for, such as {sorted(missing)[0]}"
        )


def _read(file: Any, name: str, dim: int | None, shard: Shard) -> Tensor:
    if dim is None:
        whole: Tensor = file.get_tensor(name)
        return whole
    stored = file.get_slice(name)
    part = shard.part(stored.get_shape()[dim])
    read: Tensor = stored[part] if dim == 0 else stored[:, part]
    return read
