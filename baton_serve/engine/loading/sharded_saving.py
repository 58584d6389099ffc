"""Writes checkpoints of the load format `sharded_state`: for each rank its parts of the weights, with layers joined.

The names, the division and the order within joined layers are those of vLLM's `save_sharded_state`, so that vLLM and
`sharded_state` read the files. Weights are read from the model's files, one rank after the other.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from baton_serve.contracts.loader_options import SHARD_PATTERN, loader_options
from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ConfigError, ModelError
from baton_serve.engine.loading.sharded_state import BY_INPUTS, FAMILIES, GATE_UP, QKV, VOCABULARY
from baton_serve.engine.loading.weight_files import INDEX, map_tensors
from baton_serve.engine.model_folder import LOAD_ERRORS, PICKLE_INDEX, weights_error

VOCABULARY_MULTIPLE = 64
"""vLLM adds rows to the vocabulary, up to a multiple of this."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def save_sharded_state(
    config: EngineConfig,
    target: Path,
    *,
    pattern: str | None = None,
    max_size: int | None = None,
) -> None:
    """Write the weights of the model in `config` to the folder `target` in vLLM's format sharded_state, divided for
    `tensor_parallel_size` ranks, and copy its config and tokenizer.

    `pattern` is how the files are named; None: as in vLLM. `max_size` is the largest size of a file in bytes; None: one
    file for each rank. Raises `ConfigError` for a model or a target that cannot be used, and `ModelError` if the
    weights cannot be read.
    """
    folder, num_ranks = Path(config.model), config.tensor_parallel_size
    names = loader_options("sharded_state", {"pattern": pattern or SHARD_PATTERN}).pattern
    stated = _checked(config, folder, num_ranks)
    # Older files of another number of ranks would be read together with the new ones.
    if target.is_dir() and any(target.glob("*.safetensors")):
        raise ConfigError(f"{target} has weights already: give a new folder")
    try:
        stored = map_tensors(folder, config.load_format, config.loader.pattern)
    except LOAD_ERRORS as exc:
        raise weights_error(folder, exc) from exc
    dtype = None if config.dtype == "auto" else devices.DTYPES[config.dtype]
    target.mkdir(parents=True, exist_ok=True)
    # One rank after the other, so that the parts of one rank alone are in memory beside the mapped files.
    for rank in range(num_ranks):
        parts = {
            name: part if dtype is None else part.to(dtype) for name, part in _parts(stored, stated, rank, num_ranks)
        }
        for number, some in enumerate(_files(parts, max_size)):
            save_file(some, target / names.format(rank=rank, part=number), metadata={"format": "pt"})
    # An index would name the weight files of the original folder.
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and path.name not in (INDEX, PICKLE_INDEX):
            shutil.copyfile(path, target / path.name)


def _checked(config: EngineConfig, folder: Path, num_ranks: int) -> Mapping[str, int]:
    """Return the content of the model's config.json. Raises `ConfigError` if this model cannot be saved, or not for
    `num_ranks` ranks, and `ModelError` if the file cannot be read."""
    if not folder.is_dir():
        raise ConfigError(f"save_sharded_state: {folder} is not a folder; only models in folders can be saved")
    if config.enable_lora:
        raise ConfigError("save_sharded_state saves no adapters: leave out enable_lora")
    try:
        stated = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as exc:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {exc}") from exc
    kind = stated.get("model_type")
    if kind not in FAMILIES or stated.get("quantization_config") or config.rounding is not None:
        raise ConfigError(
            f"save_sharded_state: a model of type {kind} cannot be saved;"
            f" {', '.join(FAMILIES)} without quantization can"
        )
    heads, kv_heads = stated["num_attention_heads"], _kv_heads(stated)
    if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads) or VOCABULARY_MULTIPLE % num_ranks:
        raise ConfigError(
            f"save_sharded_state: {heads} heads, {kv_heads} KV heads and the vocabulary cannot be divided among"
            f" {num_ranks} ranks"
        )
    found: Mapping[str, int] = stated
    return found


def _kv_heads(stated: Mapping[str, int]) -> int:
    return stated.get("num_key_value_heads") or stated["num_attention_heads"]


def _parts(
    stored: Mapping[str, Tensor], stated: Mapping[str, int], rank: int, num_ranks: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of one rank with the names that vLLM gives them. `stored` has the whole weights by the
    checkpoint's names; `stated` is config.json."""
    copies = max(1, num_ranks // _kv_heads(stated))
    for name, weight in stored.items():
        if ".q_proj." in name:
            kv = [stored[name.replace(".q_proj.", other)] for other in (".k_proj.", ".v_proj.")]
            # Several ranks share the K and V of a head if there are more ranks than heads.
            own = [each.chunk(num_ranks // copies)[rank // copies] for each in kv]
            yield name.replace(".q_proj.", QKV), torch.cat([weight.chunk(num_ranks)[rank], *own])
        elif ".gate_proj." in name:
            both = (weight, stored[name.replace(".gate_proj.", ".up_proj.")])
            yield name.replace(".gate_proj.", GATE_UP), torch.cat([each.chunk(num_ranks)[rank] for each in both])
        elif name.endswith(VOCABULARY):
            if name.startswith("lm_head.") and stated.get("tie_word_embeddings"):
                continue  # vLLM keeps a shared weight once
            padding = weight.new_zeros(-len(weight) % VOCABULARY_MULTIPLE, weight.shape[1])
            yield name, torch.cat([weight, padding]).chunk(num_ranks)[rank].contiguous()
        elif name.endswith(BY_INPUTS):
            yield name, weight.chunk(num_ranks, dim=1)[rank].contiguous()
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.", "rotary_emb.inv_freq")):
            yield name, weight


def _files(parts: Mapping[str, Tensor], max_size: int | None) -> Iterator[dict[str, Tensor]]:
    """Divide the weights of one rank into files: yield the tensors of each, of at most `max_size` bytes together (None:
    one file)."""
    some: dict[str, Tensor] = {}
    for name in sorted(parts):
        if some and max_size is not None and sum(each.nbytes for each in some.values()) + parts[name].nbytes > max_size:
            yield some
            some = {}
        some[name] = parts[name]
    yield some
