"""Reads checkpoints that vLLM's `save_sharded_state` wrote: for each rank its parts of the weights, with layers joined.

The parts are joined again, and layers are separated, so that the result has the names of the model's own checkpoint.
Only dense decoders whose layers vLLM divides in the same way are read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton_serve.engine.model_folder import shard_paths

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models, as in config.json."""
QKV, GATE_UP = ".qkv_proj.", ".gate_up_proj."
BY_INPUTS = (".o_proj.weight", ".down_proj.weight")
"""Weights whose inputs are divided among the ranks."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Weights whose rows are tokens; vLLM adds rows at the end."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """How many rows of Q, and of K and V, one rank has in the format sharded_state. `copies` is the number of ranks
    that hold the same K and V."""

    q_rows: int
    kv_rows: int
    copies: int


def joined_tensors(folder: Path, pattern: str, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the ranks' weights of a folder in the format sharded_state. Return them by the names of the model's own
    checkpoint. `pattern` is how the files are named; `read` returns the tensors of a file.

    With one rank they are views of the files, else copies in host memory. Raises `ValueError` for a model of another
    family, and if files of a rank are missing.
    """
    config = json.loads((folder / "config.json").read_text())
    if (kind := config.get("model_type")) not in FAMILIES or config.get("quantization_config"):
        raise ValueError(
            f"sharded_state of a model of type {kind} is not supported ({', '.join(FAMILIES)} without quantization"
            " are): give the checkpoint that it was made from"
        )
    ranks: dict[int, dict[str, Tensor]] = {}
    for rank, paths in shard_paths(folder, pattern).items():
        for path in paths:
            ranks.setdefault(rank, {}).update(read(path))
    if not ranks or sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"it has the ranks {sorted(ranks)}; sharded_state needs {pattern} of all")
    heads = _heads(config, len(ranks))
    joined: dict[str, Tensor] = {}
    for name in ranks[0]:
        joined |= _join(name, [ranks[rank][name] for rank in range(len(ranks))], heads, int(config["vocab_size"]))
    return joined


def _heads(config: Mapping[str, int], num_ranks: int) -> _Heads:
    """Return how the rows of Q, K and V are divided among `num_ranks` ranks. `config` is config.json."""
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    kv_heads = max(1, num_kv_heads // num_ranks)
    return _Heads(num_heads // num_ranks * head_dim, kv_heads * head_dim, max(1, num_ranks // num_kv_heads))


def _join(name: str, parts: list[Tensor], heads: _Heads, vocab_size: int) -> dict[str, Tensor]:
    """Join the parts of all ranks of the stored tensor `name`. Return the weights that it contains, by the names of the
    model's checkpoint: Q, K and V, for example, are stored together."""
    if QKV in name:
        sizes = [heads.q_rows, heads.kv_rows, heads.kv_rows]
        q, k, v = zip(*(torch.split(part, sizes) for part in parts), strict=True)
        layers = {".q_proj.": q, ".k_proj.": k[:: heads.copies], ".v_proj.": v[:: heads.copies]}
        return {name.replace(QKV, layer): _cat(list(found), 0) for layer, found in layers.items()}
    if GATE_UP in name:
        gate, up = zip(*(part.chunk(2) for part in parts), strict=True)
        halves = {".gate_proj.": gate, ".up_proj.": up}
        return {name.replace(GATE_UP, layer): _cat(list(found), 0) for layer, found in halves.items()}
    if name.endswith(VOCABULARY):
        return {name: _cat(parts, 0)[:vocab_size]}
    return {name: _cat(parts, 1) if name.endswith(BY_INPUTS) else parts[0]}


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
