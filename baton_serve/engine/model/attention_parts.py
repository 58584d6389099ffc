"""Decides which heads of attention a tensor-parallel rank holds, also with fewer KV heads than ranks, and cuts Q, K, V
accordingly.

Most have a product each for queries, keys and values. Others have one for all, whose outputs lie side by side, or head
by head; latent attention has a product that makes the keys and values of every head. Encoders such as BERT have
theirs in modules of their own.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from baton_serve.engine.collectives.shard import Shard

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes

OUTPUTS = ("o_proj", "dense", "out_proj", "c_proj")
"""Names of the product after attention."""
PACKED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
"""Names of a product that makes queries, keys and values."""
ENCODER_INPUTS = ("self.query", "self.key", "self.value")
"""Paths of the products of queries, keys and values in BERT and the encoders that follow it."""
ENCODER_OUTPUT = "output.dense"
"""The path of the product after attention, or after an MLP, in these encoders."""
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_WIDTHS, _KV_WIDTHS = ("embed_dim", "split_size", "all_head_size"), ("kv_dim",)
"""Attributes with the number of columns of all heads, and of all KV heads."""


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The attention heads of one layer that a rank holds, `part`, and the number of heads of all ranks, `total`."""

    total: int
    part: slice

    @property
    def count(self) -> int:
        """Return the number of this rank's heads."""
        return int(self.part.stop - self.part.start)

    def scaled(self, columns: int) -> slice:
        """Return the range of columns that belongs to this rank's heads, if `columns` are divided equally among all
        heads.
        """
        size = columns // self.total
        return slice(self.part.start * size, self.part.stop * size)


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Which part of an attention module's weights and heads one tensor-parallel rank holds."""

    layer: int
    heads: HeadRange
    kv_heads: HeadRange
    """The heads in the KV cache: with latent attention the one latent, which each rank has."""
    rows: Mapping[str, tuple[slice, ...]]
    """Ranges of the outputs of linear layers."""
    output: str
    """The product after attention, of which the rank has the inputs of its heads."""
    blocks: int = 0
    """This rank's share of the blocks in which CodeGen stores heads; 0 for other models."""


def output_size(linear: Module) -> int:
    """Return the number of outputs of a linear layer, which may be an nn.Linear or transformers' Conv1D."""
    return int(linear.nf if is_turned(linear) else linear.out_features)


def input_size(linear: Module) -> int:
    """Return the number of inputs of a linear layer, which may be an nn.Linear or transformers' Conv1D."""
    return int(linear.weight.shape[0] if is_turned(linear) else linear.in_features)


def is_turned(linear: Module) -> bool:
    """Return whether a linear layer is transformers' Conv1D, which stores its weight as [inputs, outputs]."""
    return type(linear).__name__ == "Conv1D"


def child(module: Module, path: str) -> Module:
    """Return the module at `path`, such as "output.dense", below `module`; None if there is none."""
    for leaf in path.split("."):
        module = getattr(module, leaf, None)
    return module


def is_linear(module: object) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def attention_parts(module: Module, config: Module, shard: Shard) -> AttentionParts | None:
    """Return which part of an attention module the rank `shard` holds; None if `module` is not attention, or of a kind
    that cannot be divided.

    `config` is that of the decoder. If a number of heads is not divisible by the ranks, the ranges are wrong and the
    caller must not use them.
    """
    if all(is_linear(child(module, path)) for path in (*ENCODER_INPUTS, ENCODER_OUTPUT)):
        return _encoder(module, config, shard)
    layer = getattr(module, "layer_idx", getattr(module, "layer_id", None))
    if isinstance(layer, int) and is_linear(getattr(module, "Wqkv", None)) and is_linear(getattr(module, "Wo", None)):
        return _side_by_side(module, layer, config, shard)
    output = next((leaf for leaf in OUTPUTS if is_linear(getattr(module, leaf, None))), None)
    # Towers of CLIP and its like keep no KV, so that their layers have no numbers.
    if layer is None and getattr(module, "is_causal", None) is False and is_linear(getattr(module, "q_proj", None)):
        layer = 0
    if not isinstance(layer, int) or output is None:
        return None
    # Layers of one model may have different numbers of heads, which the modules know.
    total = int(getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", 0) or config.num_heads)
    heads = HeadRange(total, shard.part(total))
    if is_linear(getattr(module, "kv_b_proj", None)):
        return _latent(module, layer, heads, output)
    packed = next((leaf for leaf in PACKED if is_linear(getattr(module, leaf, None))), None)
    if packed is not None:
        return _packed(module, layer, heads, shard, (packed, output))
    if is_linear(getattr(module, "q_proj", None)):
        return _separate(module, layer, heads, config, shard, output)
    return None


def _encoder(module: Module, config: Module, shard: Shard) -> AttentionParts:
    """Return a rank's part of the attention of BERT, which has as many key heads as query heads."""
    total = int(getattr(module.self, "num_attention_heads", None) or config.num_attention_heads)
    heads = HeadRange(total, shard.part(total))
    rows = {path: (heads.scaled(output_size(child(module, path))),) for path in ENCODER_INPUTS}
    # No KV is kept, so the number of the layer does not matter.
    return AttentionParts(0, heads, heads, rows, ENCODER_OUTPUT)


def _side_by_side(module: Module, layer: int, config: Module, shard: Shard) -> AttentionParts:
    """Return a rank's part of the attention of ModernBERT: one product for the queries, keys and values, in this order,
    each with as many heads.
    """
    total = int(config.num_attention_heads)
    heads = HeadRange(total, shard.part(total))
    size = output_size(module.Wqkv) // (3 * total)
    rows = tuple(
        slice((start + heads.part.start) * size, (start + heads.part.stop) * size) for start in (0, total, 2 * total)
    )
    return AttentionParts(layer, heads, heads, {"Wqkv": rows}, "Wo")


def _latent(module: Module, layer: int, heads: HeadRange, output: str) -> AttentionParts | None:
    """Return a rank's part of latent attention (MLA): the latents whole, and the weights of its `heads`. `output` is
    the name of the product after attention. None if the module has no known query product.
    """
    query = next((leaf for leaf in ("q_b_proj", "q_proj") if is_linear(getattr(module, leaf, None))), None)
    if query is None:
        return None
    # `q_a_proj` and `kv_a_proj_with_mqa` are not listed: all heads read their outputs.
    rows = {leaf: (heads.scaled(output_size(getattr(module, leaf))),) for leaf in (query, "kv_b_proj")}
    return AttentionParts(layer, heads, HeadRange(1, slice(0, 1)), rows | _gate(module, heads), output)


def _separate(
    module: Module, layer: int, heads: HeadRange, config: Module, shard: Shard, output: str
) -> AttentionParts | None:
    """Return a rank's part of attention with one product each for queries, keys and values; `output` names the product
    after attention. Layers that read the KV of another layer have no products for keys and values.
    """
    if not hasattr(module, "head_dim"):
        return None
    key = getattr(module, "k_proj", None)
    # The size of the product comes before the config: layers of one model may have different numbers of KV heads.
    total = int(config.num_key_value_heads) if key is None else output_size(key) // int(module.head_dim)
    kv = HeadRange(total, _kv_part(total, shard))
    rows = {"q_proj": (heads.scaled(output_size(module.q_proj)),)}
    for leaf in ("k_proj", "v_proj"):
        if is_linear(linear := getattr(module, leaf, None)):
            rows[leaf] = (kv.scaled(output_size(linear)),)
    return AttentionParts(layer, heads, kv, rows | _gate(module, heads), output)


def _gate(module: Module, heads: HeadRange) -> dict[str, tuple[slice, ...]]:
    """Return the rows of the product that gates the output of each head or each of its columns; {} if there is none."""
    for name in ("g_proj", "gate_proj"):
        gate = getattr(module, name, None)
        if is_linear(gate) and output_size(gate) % heads.total == 0:
            return {name: (heads.scaled(output_size(gate)),)}
    return {}


def _packed(
    module: Module, layer: int, heads: HeadRange, shard: Shard, names: tuple[str, str]
) -> AttentionParts | None:
    """Return a rank's part of attention with one product for queries, keys and values together. `names` are that
    product and the one after attention. None if the order of its outputs is unknown.
    """
    kind, packed = type(module).__name__, names[0]
    columns = output_size(getattr(module, packed))
    head_dim = int(getattr(module, "head_dim", None) or module.head_size)
    # The product has the columns of all query heads, and of as many key heads as value heads.
    total = (columns // head_dim - heads.total) // 2
    kv, blocks = HeadRange(total, _kv_part(total, shard)), 0
    ordered = ("Phi3Attention", "GPT2Attention", "DbrxAttention")
    is_side_by_side = kind in ordered or getattr(module, "multi_query", False)
    if kind == "FalconAttention" and module.new_decoder_architecture:
        is_side_by_side = False
    # The order of the outputs is not in their number, so these classes were read one by one.
    if is_side_by_side:
        starts = (0, heads.total, heads.total + total)
        rows = tuple(
            slice((part.start + start) * head_dim, (part.stop + start) * head_dim)
            for part, start in zip((heads.part, kv.part, kv.part), starts, strict=True)
        )
    elif kind in ("BloomAttention", "FalconAttention", "GPTNeoXAttention", "GPTBigCodeAttention"):
        # Each KV head follows its query heads.
        rows = (kv.scaled(columns),)
        if total < shard.size:
            # This rank has some of the query heads before its KV head.
            # The columns of a KV head are `group` queries, one key and one value, `head_dim` each.
            group, size = heads.total // total, columns // total
            first = kv.part.start * size + (heads.part.start - kv.part.start * group) * head_dim
            key = kv.part.start * size + group * head_dim
            rows = (slice(first, first + heads.count * head_dim), slice(key, key + 2 * head_dim))
    # CodeGen has the heads in blocks, as it was trained on four devices.
    elif kind == "CodeGenAttention" and module.mp_num % shard.size == 0:
        blocks = int(module.mp_num) // shard.size
        rows = (heads.scaled(columns),)
    else:
        return None
    return AttentionParts(layer, heads, kv, {packed: rows}, names[1], blocks)


def _kv_part(total: int, shard: Shard) -> slice:
    """Return which of `total` KV heads a rank holds: an equal share, or one head that neighbouring ranks share if there
    are fewer heads than ranks.
    """
    if total >= shard.size:
        return shard.part(total)
    # Neighbouring ranks share a head, as the query heads that belong to it are neighbours.
    own = shard.rank * total // shard.size
    return slice(own, own + 1)


def narrow_attention(module: Module, parts: AttentionParts) -> None:
    """Set the numbers of heads and columns in the attributes of an attention module to those of this rank, after its
    weights were cut.
    """
    heads, kv = parts.heads, parts.kv_heads
    # Slopes of positions (ALiBi) belong to heads by their number among all.
    module.baton_heads = heads
    kinds = ((_HEAD_COUNTS, heads), (_KV_HEAD_COUNTS, kv), (_WIDTHS, heads), (_KV_WIDTHS, kv))
    # In BERT a module within has the numbers.
    owner = getattr(module, "self", module)
    for name, own in ((name, own) for names, own in kinds for name in names):
        if isinstance(whole := getattr(owner, name, None), int):
            # For a number of heads `whole // own.total` is 1; for a number of columns it is the size of a head.
            setattr(owner, name, whole // own.total * own.count)
    if parts.blocks:
        module.mp_num = parts.blocks
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = heads.count // kv.count
    # All layers share the config, so each module gets a copy before the numbers in it change.
    if getattr(module, "config", None) is not None and hasattr(module, "head_dim"):
        module.config = _own_config(module, heads, kv)


def _own_config(module: Module, heads: HeadRange, kv: HeadRange) -> Module:
    """Return a copy of an attention module's config in which the numbers of heads are those of this rank."""
    own = copy.deepcopy(module.config)
    # Before the number of heads, from which some configs compute it. Modules of Falcon do not read it.
    if not isinstance(getattr(type(own), "head_dim", None), property):
        own.head_dim = module.head_dim
    own.num_attention_heads, own.num_key_value_heads = heads.count, kv.count
    return own
