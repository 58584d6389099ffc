"""A dense decoder's weights under the names of checkpoints, and its rotary frequencies.

It has no forward; the fused layers compute it (engine/model/fused_forward.py).
"""

import math

import torch
from torch import Tensor, nn

from baton_serve.engine.loading.native.dense_config import DenseConfig, StretchedRope
from baton_serve.engine.model.quantized.modules import EmptyEmbedding, EmptyLinear


class DenseNorm(nn.Module):
    """Holds the weight of an RMSNorm. It computes nothing: the engine's kernels do."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.variance_epsilon = eps


class DenseAttention(nn.Module):
    """Holds the weights of the attention in one layer."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.q_proj = EmptyLinear(hidden, queries, bias=config.has_qkv_bias)
        self.k_proj = EmptyLinear(hidden, keys, bias=config.has_qkv_bias)
        self.v_proj = EmptyLinear(hidden, keys, bias=config.has_qkv_bias)
        self.o_proj = EmptyLinear(queries, hidden, bias=config.has_output_bias)
        if config.has_head_norms:
            self.q_norm = DenseNorm(head_dim, config.norm_eps)
            self.k_norm = DenseNorm(head_dim, config.norm_eps)


class DenseMlp(nn.Module):
    """Holds the weights of the gated MLP in one layer."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
        self.gate_proj = EmptyLinear(hidden, inner, bias=bias)
        self.up_proj = EmptyLinear(hidden, inner, bias=bias)
        self.down_proj = EmptyLinear(inner, hidden, bias=bias)


class DenseLayer(nn.Module):
    """Holds the weights of one decoder layer: attention, MLP and two norms."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.input_layernorm = DenseNorm(config.hidden_size, config.norm_eps)
        self.self_attn = DenseAttention(config)
        self.post_attention_layernorm = DenseNorm(config.hidden_size, config.norm_eps)
        self.mlp = DenseMlp(config)


class Rotary(nn.Module):
    """Computes the cosines and sines that rotary embeddings need. The frequencies are float32, on the given device."""

    inv_freq: Tensor

    def __init__(self, config: DenseConfig, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(config).to(device), persistent=False)

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary angles at `positions` [1, num_tokens], each [1, num_tokens,
        head_dim]; both halves of head_dim are equal. They have the dtype of `like`."""
        halves = positions[..., None].float() * self.inv_freq
        angles = torch.cat((halves, halves), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class DenseDecoder(nn.Module):
    """Holds the weights of a decoder without its head: the embedding, all layers and the last norm."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.embed_tokens = EmptyEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DenseLayer(config) for _ in range(config.num_layers))
        self.norm = DenseNorm(config.hidden_size, config.norm_eps)


class DenseModel(nn.Module):
    """Holds the weights of a decoder with its head. New modules are on torch's default device and not initialized."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DenseDecoder(config)
        self.lm_head = EmptyLinear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def tie(self) -> None:
        """Let the head use the embedding's weight if the config says that both are the same."""
        if self.config.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def frequencies(config: DenseConfig) -> Tensor:
    """Return the rotary frequencies in radians per position, float32 [head_dim / 2], on the host.

    The operations are those of transformers in the same order: other rounding would change the model's results.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    return plain if config.rope_stretch is None else _stretched(plain, config.rope_stretch)


def _stretched(plain: Tensor, rule: StretchedRope) -> Tensor:
    """Return the rotary frequencies `plain` scaled for longer contexts, as Llama 3.1 does: low frequencies are divided
    by a factor, high ones kept, and those in between blended.

    See https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, apply_scaling.
    """
    longest, shortest = rule.original_length / rule.low_freq_factor, rule.original_length / rule.high_freq_factor
    waves = 2 * math.pi / plain
    scaled = torch.where(waves > longest, plain / rule.factor, plain)
    kept = (rule.original_length / waves - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    blended = (1 - kept) * scaled / rule.factor + kept * scaled
    return torch.where((waves >= shortest) & (waves <= longest), blended, scaled)
