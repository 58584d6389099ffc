"""Changes attention modules of transformers so that they use paged attention; latent attention (MLA) caches one latent
per token.

Some modules never call the interface; others pass more than the KV cache stores (MLA). Each class was compared with
transformers, and is changed, by its name, to call `paged_attention.attend`. Projections, rotation and merging of heads
stay the module's own.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from baton_serve.engine.model import paged_attention as attention
from baton_serve.engine.model.attention_parts import HeadRange

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes

OWN_ATTENTION = frozenset({"codegen", "falcon", "gptj", "gpt_neo"})
"""Model types that look up their attention class by the implementation's name. They are built as `eager`."""


def adapt_attention(module: nn.Module) -> None:
    """Replace functions of a transformers model's attention modules that do not call the attention interface as paged
    attention needs it, such as latent attention (MLA). Other modules stay as they are.
    """
    for part in module.modules():
        if (teach := _ADAPTERS.get(type(part).__name__)) is not None:
            teach(part)


@dataclass(frozen=True, slots=True)
class MLAProjection:
    """Implements `LatentProjection` for latent attention (MLA), which treats the cached latents as one KV head: it
    applies the up-projection of keys to the query instead, and that of values to the result of attention
    (https://arxiv.org/abs/2405.04434, 2.1.2).
    """

    keys: Tensor  # [num_heads, key size without rotation, rank]
    values: Tensor  # [num_heads, value size, rank]

    @property
    def rank(self) -> int:
        """Size of a latent (kv_lora_rank), without the rotated part of the key."""
        return self.values.shape[2]

    def absorb(self, query: Tensor) -> Tensor:
        """Project a query [1, num_heads, num_tokens, key size] by the up-projection of the keys, so that it can be
        multiplied with cached latents. The last size becomes the rank plus that of the rotated part.
        """
        size = self.keys.shape[1]
        return torch.cat([query[..., :size] @ self.keys, query[..., size:]], dim=-1)

    def restore(self, output: Tensor) -> Tensor:
        """Project the result of attention over latents, [num_tokens, num_heads, rank], to values [num_tokens,
        num_heads, value size].
        """
        return (output.transpose(0, 1) @ self.values.transpose(1, 2)).transpose(0, 1)


def _mla(module: Module) -> None:
    """Make a DeepSeek attention module (MLA) pass latents to attention instead of the keys and values of every head."""
    num_heads, rank = module.num_heads, module.kv_lora_rank
    up = module.kv_b_proj.weight.view(num_heads, -1, rank)
    keys, values = up.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)

    def compressed(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latent and the rotated part of the key, concatenated, [..., latent size], twice: as key and as
        value.
        """
        both = torch.cat([latent, rotated], dim=-1)
        # The same tensor twice: `attend` recognizes a latent by identity, and the cache then has one plane.
        return both, both

    module.expand_kv = compressed
    module.baton_latent = MLAProjection(keys, values)


def _indexed(module: Module) -> None:
    """Make a module with latent attention and an indexer (DeepSeek's sparse attention) attend to all tokens.

    `layer_probe.check_index` has made sure that no context is longer than the number of tokens that the indexer
    chooses, so that it would choose all.
    """
    _mla(module)
    forward = module.forward
    if module.indexer is not None:
        module.indexer.forward = _no_choice

    def attend_to_all(*args: Any, **arguments: Any) -> Any:
        # The module cuts a part out of the mask for its indexer, and layers without one expect the choice of another.
        arguments["attention_mask"] = _UNUSED_MASK
        if module.indexer is None:
            arguments["prev_topk_indices"] = _UNUSED_MASK
        return forward(*args, **arguments)

    module.forward = attend_to_all


_UNUSED_MASK = torch.zeros(1, 1, 1, 1)


def _no_choice(*_: object, **__: object) -> None:
    """Compute nothing and return None: stands for the forward of a sparse-attention indexer whose choice is not
    needed.
    """


def _scores(module: Module, *, scale: float, window: int | None = None) -> None:
    """Replace the method `_attn(query, key, value, mask)` of an attention module, which computes scores itself, by
    paged attention. Its arguments are [1, num_heads, num_tokens, head_dim]; `scale` multiplies scores, `window` is the
    sliding window in tokens.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        # These modules rotate in float32; the KV cache has the model's dtype.
        rotated = query.to(value.dtype), key.to(value.dtype)
        output, _ = attention.attend(module, *rotated, value, mask, scaling=scale, sliding_window=window)
        return output.transpose(1, 2), None

    module._attn = attend


def _gptj(module: Module) -> None:
    # Since transformers 5.24 these modules call the attention interface themselves.
    if not hasattr(module, "_attn"):
        return
    # GPT-J stores the divisor of the scores.
    _scores(module, scale=1.0 / float(module.scale_attn))


def _gpt_neo(module: Module) -> None:
    # GPT-Neo does not scale the scores.
    _scores(module, scale=1.0, window=module.config.window_size if module.attention_type == "local" else None)


def _bloom(module: Module) -> None:
    """Replace the forward of a BLOOM attention module, which adds ALiBi biases itself, by one with paged attention."""
    slopes = _slopes(module, module.dense.weight.device)

    def forward(hidden_states: Tensor, residual: Tensor, **_: object) -> tuple[Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        output, _unused = attention.attend(
            module, query, key, value, None, scaling=module.inv_norm_factor, alibi=slopes
        )
        return residual + module.dense(output.flatten(2)), None

    module.forward = forward


def _falcon(module: Module) -> None:
    """Replace the forward of a Falcon attention module, which computes scores itself, by one with paged attention."""
    slopes: Tensor | None = None
    if module.config.alibi:  # Falcon adds the bias before it scales the scores, so the slopes are scaled here
        steps = _slopes(module, module.dense.weight.device)
        slopes = steps.bfloat16().float() * module.inv_norm_factor  # Falcon rounds them to bfloat16
    rotate = importlib.import_module("transformers.models.falcon.modeling_falcon").apply_rotary_pos_emb

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: object
    ) -> tuple[Tensor, None]:
        heads = module._split_heads(module.query_key_value(hidden_states))
        query, key, value = (part.transpose(1, 2) for part in heads)
        # the module repeats K and V for each query head of a group; paged attention does not need it
        if module.new_decoder_architecture:
            group = module.num_heads // module.num_kv_heads
            key, value = key[:, ::group], value[:, ::group]
        if position_embeddings is not None and slopes is None:
            query, key = rotate(query, key, *position_embeddings)
        output, _unused = attention.attend(
            module, query, key, value, None, scaling=module.inv_norm_factor, alibi=slopes
        )
        return module.dense(output.flatten(2)), None

    module.forward = forward


def _masked_window(module: Module) -> None:
    """Store the sliding window in an attention module, so that paged attention applies it.

    The transformers model has the window in the mask only, and paged attention ignores masks.
    """
    # Modules of families with several types of layers have a window of their own, others only that of the config.
    module.baton_window = getattr(module, "sliding_window", None)


def _phimoe(module: Module) -> None:
    module.sliding_window = module.config.sliding_window
    _masked_window(module)


def _llama4(module: Module) -> None:
    """Make a Llama 4 attention module state its chunk size to paged attention, since its model has chunks in the mask
    only. In layers without rotation, compute the scales of queries from the tokens' positions in their sequences; the
    module itself counts from the start of the batch.
    """
    if module.config.layer_types[module.layer_idx] == "chunked_attention":
        module.baton_chunk = int(module.config.attention_chunk_size)
    if module.attn_temperature_tuning and not module.use_rope:
        floor, factor = module.floor_scale, module.attn_scale
        module.attn_temperature_tuning = False

        def scales(positions: Tensor) -> Tensor:
            steps = torch.floor((positions.float() + 1.0) / floor)
            scaled: Tensor = torch.log1p(steps) * factor + 1.0
            return scaled

        module.baton_scales = scales


def _slopes(module: Module, device: torch.device) -> Tensor:
    """Return the ALiBi slopes of the heads of an attention module that this rank holds, float32 [num_heads]: how much
    each head's scores change from one position to the next.
    """
    # A rank has some of the heads.
    heads: HeadRange | None = getattr(module, "baton_heads", None)
    num_heads = int(module.num_heads) if heads is None else heads.total
    # Positions 0 and 1 give biases 0 and the slope.
    build = importlib.import_module("transformers.models.bloom.modeling_bloom").build_alibi_tensor
    biases: Tensor = build(torch.ones((1, 2), dtype=torch.int64, device=device), num_heads, torch.float32)
    slopes = biases.view(num_heads, 2)[:, 1]
    return (slopes if heads is None else slopes[heads.part]).contiguous()


_ADAPTERS: dict[str, Callable[[Module], None]] = {
    "AXK1Attention": _mla,
    "AXK2Attention": _indexed,
    "BailingHybridAttention": _mla,
    "BloomAttention": _bloom,
    "CodeGenAttention": _gptj,
    "DeepseekV2Attention": _mla,
    "DeepseekV3Attention": _mla,
    "DeepseekV32Attention": _indexed,
    "FalconAttention": _falcon,
    "GPTJAttention": _gptj,
    "GPTNeoSelfAttention": _gpt_neo,
    "Glm4MoeLiteAttention": _mla,
    "GlmMoeDsaAttention": _indexed,
    "HYV4Attention": _indexed,
    "KimiLinearAttention": _mla,
    "Llama4TextAttention": _llama4,
    "LongcatFlashMLA": _mla,
    "MiniCPM3Attention": _mla,
    "PhimoeAttention": _phimoe,
    "Qwen2MoeAttention": _masked_window,
    "YoutuAttention": _mla,
}
