"""The Llama-shaped network: its configuration, and a training forward over rows of several lengths at once.

Weights live in transformers' LlamaForCausalLM, so that exactly what is trained is saved. Outside of attention, the
forward is flat ([num_tokens, hidden]), so that rows of any length share one compiled graph. Tests compare it with
transformers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model.batches import Layout


def demo_config(*, vocab_size: int, bos: int, eos: int, pad: int, is_tiny: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128 if is_tiny else 256,
        intermediate_size=256 if is_tiny else 640,
        num_hidden_layers=4 if is_tiny else 8,
        num_attention_heads=4 if is_tiny else 8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def initialise(model: LlamaForCausalLM, *, seed: int) -> None:
    """Initialize the weights: wider than transformers' default at this width, and small for matrices that write to the
    residual stream."""
    torch.manual_seed(seed)
    depth = model.config.num_hidden_layers
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.ones_(weight)
        elif "embed_tokens" in name:
            torch.nn.init.normal_(weight, std=0.02)
        else:
            std = weight.shape[1] ** -0.5
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(weight, std=std / (2 * depth) ** 0.5 if is_output else std)


class TrainingForward:
    """Computes hidden states and losses of a batch. With `compiled`, the three functions that have one shape each are
    compiled."""

    def __init__(self, model: LlamaForCausalLM, *, compiled: bool) -> None:
        self._model = model
        self._project = torch.compile(_project, dynamic=False) if compiled else _project
        self._finish = torch.compile(_finish, dynamic=False) if compiled else _finish
        self._token_losses = torch.compile(_token_losses, dynamic=False) if compiled else _token_losses
        self._angles: dict[Layout, tuple[Tensor, Tensor]] = {}

    def hidden(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Return the hidden states before the last norm: tokens [num_tokens] -> [num_tokens, hidden]."""
        config = self._model.config
        cos, sin = self._rotation(layout, tokens.device)
        x: Tensor = self._model.model.embed_tokens(tokens)
        for layer in self._model.model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            before = (layer.input_layernorm.weight, attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
            q, k, v = self._project(x, before, cos, sin, config.head_dim, config.rms_norm_eps)
            mixed = _attend(q, k, v, layout)
            after = (attn.o_proj.weight, layer.post_attention_layernorm.weight, mlp.gate_proj.weight,
                       mlp.up_proj.weight, mlp.down_proj.weight)  # fmt: skip
            x = self._finish(x, mixed, after, config.rms_norm_eps)
        return x

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of each token: [num_tokens, hidden], [num_tokens] -> [num_tokens]."""
        model = self._model
        return self._token_losses(
            x, model.model.norm.weight, model.model.embed_tokens.weight, targets, model.config.rms_norm_eps
        )

    def predictions(self, x: Tensor) -> Tensor:
        """Return the most likely next token at each position: [num_tokens, hidden] -> [num_tokens]."""
        model = self._model
        x = _norm(x, model.model.norm.weight, model.config.rms_norm_eps)
        return F.linear(x, model.model.embed_tokens.weight).argmax(-1)

    def _rotation(self, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
        if layout not in self._angles:
            config = self._model.config
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            frequencies = config.rope_parameters["rope_theta"] ** -exponents
            positions = torch.cat([torch.arange(length).repeat(rows) for length, rows in layout.segments])
            angles = positions[:, None].float() * frequencies  # [num_tokens, head_dim / 2]
            angles = torch.cat((angles, angles), -1)[:, None].to(device)  # [num_tokens, 1, head_dim]
            self._angles[layout] = (angles.cos(), angles.sin())
        return self._angles[layout]


def _project(
    x: Tensor, weights: tuple[Tensor, ...], cos: Tensor, sin: Tensor, head_dim: int, eps: float
) -> tuple[Tensor, ...]:
    norm, to_q, to_k, to_v = weights
    h = _norm(x, norm, eps)
    q, k, v = (F.linear(h, weight).view(len(x), -1, head_dim) for weight in (to_q, to_k, to_v))
    return _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype), v


def _attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Compute causal attention within each row: q [num_tokens, heads, head_dim] -> [num_tokens, heads * head_dim]."""
    mixed, start = [], 0
    for length, rows in layout.segments:
        end = start + length * rows
        row_q, row_k, row_v = (t[start:end].view(rows, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(row_q, row_k, row_v, is_causal=True, enable_gqa=True)
        mixed.append(out.transpose(1, 2).reshape(end - start, -1))
        start = end
    return torch.cat(mixed)


def _finish(x: Tensor, mixed: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
    output, norm, gate, up, down = weights
    x = x + F.linear(mixed, output)
    h = _norm(x, norm, eps)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def _token_losses(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, eps: float) -> Tensor:
    logits = F.linear(_norm(x, norm, eps), embedding)
    return F.cross_entropy(logits.float(), targets, reduction="none")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.float()
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), -1) * sin
