"""Computes which part of a decoder each rank holds, from names and numbers only.

Attention heads, KV heads and the width of the MLP are divided evenly. Each rank holds a copy of everything else.
"""

import copy
from dataclasses import dataclass
from typing import Any

from baton_serve.engine.errors import ConfigError, UnsupportedModelError

ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Architectures whose layers were compared with transformers: it is known which products are split by
rows or columns.
"""

COLUMN_PARALLEL = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
"""Modules whose outputs are divided between ranks, both weight and bias."""
ROW_PARALLEL = {"o_proj", "down_proj"}
"""Modules whose inputs are divided between ranks. The outputs are summed, so only one rank adds the bias."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Identifies one rank of a tensor-parallel model: its number among `size` ranks."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    def part(self, total: int) -> slice:
        """Divide `total` items, such as heads, into equal ranges, and return the range of this rank."""
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


UNSHARDED = Shard()
"""The shard of a single rank: everything."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The part of a stored tensor that a rank reads: a range along `dim`, or the whole tensor if `dim` is None. With
    `is_zero` the rank uses zeros instead.
    """

    dim: int | None = None
    is_zero: bool = False


def tensor_slice(name: str, shard: Shard, *, shards_head: bool) -> TensorSlice:
    """Return which part of a parameter a rank reads. `name` is the parameter's name, such as
    `model.layers.0.self_attn.q_proj.weight`.
    """
    *_, module, kind = ("", *name.split("."))
    if module in COLUMN_PARALLEL or (module == "lm_head" and shards_head):
        return TensorSlice(dim=0)
    if module in ROW_PARALLEL:
        return TensorSlice(dim=1) if kind == "weight" else TensorSlice(is_zero=shard.rank > 0)
    return TensorSlice()


def shards_head(vocab_size: int, shard: Shard) -> bool:
    """Return whether each rank computes its own columns of the logits. Otherwise every rank computes all columns."""
    return not shard.is_whole and vocab_size % shard.size == 0


def check_shardable(name: str, text_config: Any, size: int) -> None:
    """Check that a model can be divided over `size` ranks. Raises `ConfigError` or `UnsupportedModelError`."""
    if size == 1:
        return
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}, but {name} cannot be split over devices; supported are:"
            f" {', '.join(sorted(ARCHITECTURES))}. Set tensor_parallel_size to 1"
        )
    if getattr(text_config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}, but the weights of this {name} are quantized, which cannot be split;"
            " set tensor_parallel_size to 1"
        )
    for what, count in (
        ("attention heads", text_config.num_attention_heads),
        ("KV heads", text_config.num_key_value_heads),
        ("the MLP's width", text_config.intermediate_size),
    ):
        if count % size:
            raise ConfigError(
                f"tensor_parallel_size is {size}, which does not divide this model's {what} ({count});"
                f" choose one that does, such as {_largest_divisor(text_config, size)}"
            )


def shard_config(hf_config: Any, shard: Shard) -> Any:
    """Return the config of a model that has only one rank's part of the heads and weights."""
    if shard.is_whole:
        return hf_config
    config = copy.deepcopy(hf_config)
    # Fix head_dim before the number of heads changes, since transformers would compute it from the two.
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.num_attention_heads //= shard.size
    config.num_key_value_heads //= shard.size
    config.intermediate_size //= shard.size
    return config


def _largest_divisor(config: Any, size: int) -> int:
    """Return the largest number of ranks below `size` that divides heads, KV heads and the MLP's width."""
    counts = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    return max(n for n in range(1, size) if not any(count % n for count in counts))
