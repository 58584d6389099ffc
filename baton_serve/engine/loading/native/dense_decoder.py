"""Holds a dense decoder's weights as modules with the names of checkpoints.

It has no forward; the fused layers compute it (engine/model/fused_forward.py).
"""

import torch
from torch import nn

from baton_serve.engine.loading.native.dense_config import DenseConfig
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
