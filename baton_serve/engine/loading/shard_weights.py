"""Loads a rank's part of a checkpoint. Of each stored tensor only this rank's slice is read."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from baton_serve.engine.collectives.shard import Shard, shard_config, shards_head, tensor_slice
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ModelError
from baton_serve.engine.loading.weight_files import TensorCopy, fill, map_tensors
from baton_serve.engine.model import paged_attention as attention
from baton_serve.engine.model.loaded_model import LoadProgress
from baton_serve.engine.model_folder import LOAD_ERRORS, HfConfig, first_line, weights_error


def load_shard(
    hf_config: HfConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    target: torch.device,
    shard: Shard,
    progress: LoadProgress,
) -> nn.Module:
    """Load a module of the shard's shape on `target`. Raises `ModelError`."""
    folder = Path(config.model)
    with no_init_weights():  # random numbers would be overwritten immediately
        module = _build(hf_config, config, dtype, target, shard)
    cast(Any, module).tie_weights()
    _cut_head(module, shard)
    try:
        pieces = _pieces(module, map_tensors(folder, config.load_format, config.loader.pattern), folder, shard)
        fill(pieces, target, lambda fraction: progress("loading weights", fraction), config.loader.copy_threads)
    except LOAD_ERRORS as exc:
        raise weights_error(folder, exc) from exc
    if (folder / "generation_config.json").is_file():
        cast(Any, module).generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return module


def make_dummy_shard(
    hf_config: HfConfig, config: EngineConfig, dtype: torch.dtype, target: torch.device, shard: Shard
) -> nn.Module:
    """Build a shard with random weights. All ranks draw the same numbers.

    So weights that every rank holds are equal, as they must be. The divided weights are equal too, which does not
    matter.
    """
    torch.manual_seed(config.seed)
    module = _build(hf_config, config, dtype, target, shard)
    _cut_head(module, shard)
    return module


def _build(
    hf_config: HfConfig, config: EngineConfig, dtype: torch.dtype, target: torch.device, shard: Shard
) -> nn.Module:
    """Build a module of the shard's shape. Raises `ModelError`."""
    try:
        with torch.device(target):
            module: nn.Module = AutoModelForCausalLM.from_config(
                shard_config(hf_config, shard), dtype=dtype, attn_implementation=attention.NAME
            )
    except LOAD_ERRORS as exc:
        raise ModelError(f"{config.model} cannot be built: {first_line(exc)}") from exc
    return module


def _cut_head(module: nn.Module, shard: Shard) -> None:
    """Reduce the head to this rank's rows. A tied head stays a view of the embeddings, which every rank holds whole."""
    model = cast(Any, module)
    weight: Tensor = model.lm_head.weight.data
    if not shards_head(weight.shape[0], shard):
        return
    # `tie_weights` has applied the config; two parameters of the same memory are one weight.
    is_tied = weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    rows = weight[shard.part(weight.shape[0])]
    # The meta device allocates nothing for the weight that is replaced immediately.
    with torch.device("meta"):
        head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    head.weight = nn.Parameter(rows if is_tied else rows.clone(), requires_grad=False)
    model.lm_head = head


def _pieces(module: nn.Module, stored: dict[str, Tensor], folder: Path, shard: Shard) -> list[TensorCopy]:
    """Return the copies that this rank needs. Raises `ModelError` if weights are missing."""
    model = cast(Any, module)
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    cuts = shards_head(model.config.vocab_size, shard)
    pieces: list[TensorCopy] = []
    missing: list[str] = []
    for name, parameter in module.named_parameters():
        if name == "lm_head.weight" and is_tied:
            continue  # it is a view of the embeddings
        cut = tensor_slice(name, shard, shards_head=cuts)
        if cut.is_zero:
            # Outputs are summed over ranks, so a bias that every rank added would count several times.
            parameter.data.zero_()
        elif name in stored:
            pieces.append(TensorCopy(parameter.data, _part(stored[name], cut.dim, shard)))
        else:
            missing.append(name)
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} weights that its config asks for, such as {sorted(missing)[0]}"
        )
    return pieces


def _part(stored: Tensor, dim: int | None, shard: Shard) -> Tensor:
    """Return this rank's slice of a stored tensor."""
    if dim is None:
        return stored
    part = shard.part(stored.shape[dim])
    return stored[part] if dim == 0 else stored[:, part]
