"""The plain-torch twins of the kernels of state spaces (Mamba-2, Mamba-1) and of lightning attention: specification,
fallback and test oracle.
"""

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels.mixers import LightningHeads, PackedSequences, ScanChannels, StateSpaceHeads

__all__ = ["lightning", "scan", "selective_scan", "state_space"]

CHUNK_TOKENS = 64
"""Tokens of a sequence that Mamba-2's recurrence computes as matrix products."""


def state_space(heads: StateSpaceHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute Mamba-2's recurrence in plain torch, as `MixerKernels.state_space` specifies. `states` are updated;
    sequences with several tokens run in chunks (section 6 of the paper).
    """
    output = heads.xbc.new_zeros(len(heads.xbc), heads.num_heads, heads.head_dim)
    for rows, slots in sequences.batches(states):
        num_seqs, state = len(slots), states[slots]
        x, b, c = _split(heads, heads.xbc[rows].view(num_seqs, -1, heads.xbc.shape[1]))
        step = functional.softplus(heads.step[rows].view(num_seqs, -1, heads.num_heads).float() + heads.step_bias)
        if step.shape[1] > 1:
            step = step.clamp(*heads.step_limits)
        step = step.transpose(1, 2)  # [num_seqs, num_heads, length]
        decay = -torch.exp(heads.log_rate.float())[:, None] * step
        found = []
        for start in range(0, step.shape[2], CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            inputs = x[:, :, chunk] * step[:, :, chunk, None]
            outputs, state = _chunk(inputs, b[:, :, chunk], c[:, :, chunk], decay[:, :, chunk], state)
            found.append(outputs)
        states[slots] = state
        added = torch.cat(found, dim=2) + x * heads.skip.float()[:, None, None]
        output[rows] = added.transpose(1, 2).flatten(0, 1).to(output.dtype)
    return output


def lightning(heads: LightningHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute lightning attention in plain torch, as `MixerKernels.lightning` specifies. `states` are updated.

    It is a state space whose inputs, B and C are values, keys and queries, with a constant decay and no time steps.
    """
    num_heads, size = heads.num_heads, heads.size
    output = heads.qkv.new_zeros(len(heads.qkv), num_heads, size)
    for rows, slots in sequences.batches(states):
        parts = heads.qkv[rows].view(len(slots), -1, num_heads, 3, size).permute(3, 0, 2, 1, 4).float()
        query, key, value = parts.unbind(0)  # [num_seqs, num_heads, length, size]
        decay = -heads.rate[:, None].expand(query.shape[:3])
        # The state of a state space is [values, keys].
        state, found = states[slots].transpose(-1, -2), []
        for start in range(0, query.shape[2], CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            inputs, into, out_of = value[:, :, chunk], key[:, :, chunk], query[:, :, chunk]
            outputs, state = _chunk(inputs, into, out_of, decay[:, :, chunk], state)
            found.append(outputs)
        states[slots] = state.transpose(-1, -2)
        output[rows] = torch.cat(found, dim=2).transpose(1, 2).flatten(0, 1).to(output.dtype)
    return output


def _split(heads: StateSpaceHeads, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs, B and C of each head, float32 [num_seqs, num_heads, length, size]."""
    width = heads.num_groups * heads.state_size
    parts = torch.split(xbc, [xbc.shape[2] - 2 * width, width, width], dim=2)
    x, b, c = (
        part.reshape(*part.shape[:2], count, -1).transpose(1, 2).float()
        for part, count in zip(parts, (heads.num_heads, heads.num_groups, heads.num_groups), strict=True)
    )
    group = heads.num_heads // heads.num_groups
    return x, b.repeat_interleave(group, dim=1), c.repeat_interleave(group, dim=1)


def _chunk(x: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the outputs of a chunk of tokens, without the skip, the state after it). `x` are the inputs times their
    time steps, and `decay` is the logarithm.
    """
    total = decay.cumsum(-1)
    lower = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).tril()
    # Above the diagonal the exponent is positive and might overflow.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    output = (c @ b.transpose(-1, -2) * between) @ x + (c @ state.transpose(-1, -2)) * total[..., None].exp()
    # A token's input decays until the end of the chunk.
    rest = (total[..., -1:] - total).exp()[..., None]
    return output, state * total[..., -1, None, None].exp() + (x * rest).transpose(-1, -2) @ b


def selective_scan(channels: ScanChannels, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute Mamba-1's recurrence in plain torch, as `MixerKernels.selective_scan` specifies. `states` are updated;
    the tokens of a sequence run one after another.
    """
    output = torch.zeros_like(channels.x, memory_format=torch.contiguous_format)
    rates = -torch.exp(channels.log_rate.float())
    for rows, slots in sequences.batches(states):
        x, gate, step, b, c = (
            part[rows].view(len(slots), -1, part.shape[1]).float()
            for part in (channels.x, channels.gate, channels.step, channels.b, channels.c)
        )
        wide = x.transpose(1, 2)
        found, states[slots] = scan(wide, functional.softplus(step).transpose(1, 2), rates, b, c, states[slots])
        added = found.transpose(1, 2) + x * channels.skip.float()
        output[rows] = (added * functional.silu(gate)).flatten(0, 1).to(output.dtype)
    return output


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [batch, channels, length] of Mamba-1's recurrence for `x`, and the state after the last token.
    All tensors are float32.

    `x` and `dt` are [batch, channels, length], `a` [channels, state size], `b` and `c` [batch, length, state size] and
    `state` [batch, channels, state size] (https://arxiv.org/abs/2312.00752, algorithm 2).
    """
    outputs = []
    for t in range(x.shape[-1]):
        step = dt[:, :, t, None]
        state = torch.exp(step * a) * state + step * b[:, t, None] * x[:, :, t, None]
        outputs.append((state @ c[:, t, :, None]).squeeze(-1))
    return torch.stack(outputs, dim=-1), state
