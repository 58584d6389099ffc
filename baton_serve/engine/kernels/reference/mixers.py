"""The plain-torch twins of the kernels of token mixers: specification, fallback and test oracle."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels.interfaces import Norm, PackedWeight
from baton_serve.engine.kernels.mixers import ChannelDeltaHeads, DeltaHeads, LatentRows, PackedSequences
from baton_serve.engine.kernels.reference.layers import rms_norm
from baton_serve.engine.kernels.reference.state_space import lightning, selective_scan, state_space

__all__ = [
    "channel_delta_rule",
    "convolve",
    "delta_rule",
    "gated_norm",
    "latent_rows",
    "lightning",
    "multiply_heads",
    "pack_heads",
    "selective_scan",
    "sigmoid_gate",
    "state_space",
]

CHUNK_TOKENS = 64
"""Tokens of a sequence that the delta rule computes as matrix products."""
LENGTH_EPS = 1e-6


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, sequences: PackedSequences, *, has_silu: bool
) -> Tensor:
    """Return the causal convolution of each channel in plain torch, as `MixerKernels.convolve` specifies. `states` are
    updated.
    """
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    taps = weight.shape[1]
    for rows, slots in sequences.batches(states):
        new = x[rows].view(len(slots), -1, x.shape[1]).transpose(1, 2)
        joined = torch.cat([states[slots].to(x.dtype), new], dim=-1)
        states[slots] = joined[..., -taps:].to(states.dtype)
        # The state has `taps` inputs. The convolution needs one less, since the new input takes the last tap.
        inputs = joined[..., -(taps - 1 + new.shape[-1]) :]
        found = functional.conv1d(inputs, weight[:, None], bias, groups=x.shape[1])
        output[rows] = found.transpose(1, 2).flatten(0, 1)
    return functional.silu(output) if has_silu else output


class _Parts(NamedTuple):
    """The inputs of the gated delta rule for sequences of equal length, all float32 [num_seqs, num_heads, length,
    ...].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor  # the logarithm, without a last dimension if it is one number for each head
    beta: Tensor


def delta_rule(heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute the gated delta rule in plain torch, as `MixerKernels.delta_rule` specifies. `states` are updated;
    sequences with several tokens run in chunks.
    """
    shape = (len(heads.qkv), heads.num_heads, heads.value_size)
    output = torch.zeros(shape, dtype=heads.qkv.dtype, device=heads.qkv.device)
    for rows, slots in sequences.batches(states):
        parts = _parts(heads, rows, len(slots))
        compute = _one_step if sequences.max_len == 1 else _in_chunks
        found, states[slots] = compute(parts, states[slots])
        output[rows] = found.transpose(1, 2).flatten(0, 1).to(output.dtype)
    return output


def channel_delta_rule(heads: ChannelDeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute the gated delta rule with a decay for each channel in plain torch, as `MixerKernels.channel_delta_rule`
    specifies. `states` are updated; sequences with several tokens run in chunks.
    """
    num_heads, key_size = heads.num_heads, heads.key_size
    keys = num_heads * key_size
    output = heads.qkv.new_zeros(len(heads.qkv), num_heads, heads.value_size)
    for rows, slots in sequences.batches(states):

        def split(x: Tensor, count: int = len(slots)) -> Tensor:
            """Divide the columns of `x` into heads: float32 [num_seqs, num_heads, length, size]."""
            return x.reshape(count, -1, num_heads, x.shape[1] // num_heads).transpose(1, 2).float()

        query, key, value = map(split, torch.split(heads.qkv[rows], [keys, keys, num_heads * heads.value_size], dim=1))
        parts = _Parts(
            _unit(query) * key_size**-0.5,
            _unit(key),
            value,
            split(heads.decay[rows].flatten(1)),
            split(torch.sigmoid(heads.beta[rows])),
        )
        state, found = states[slots], []
        for start in range(0, value.shape[2], CHUNK_TOKENS):
            chunk = _Parts(*(part[:, :, start : start + CHUNK_TOKENS] for part in parts))
            outputs, state = _channel_chunk(chunk, state)
            found.append(outputs)
        states[slots] = state
        output[rows] = torch.cat(found, dim=2).transpose(1, 2).flatten(0, 1).to(output.dtype)
    return output


def gated_norm(x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
    """Return the RMSNorm of x times silu(gate) in plain torch, as `MixerKernels.gated_norm` specifies."""
    return (rms_norm(x, norm.weight, norm.eps) * functional.silu(gate.float())).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x times sigmoid(gate) in plain torch, as `MixerKernels.sigmoid_gate` specifies."""
    return x * torch.sigmoid(gate)


def latent_rows(rows: LatentRows, query: Tensor) -> Tensor:
    """Return what the KV cache of latent attention (MLA) stores for each token, and store the rotated end of each query
    head in `query`, in plain torch, as `MixerKernels.latent_rows` specifies.
    """
    size = rows.rotation[0].shape[1]
    latent, key = rows.latents[:, :-size], rows.latents[:, -size:]
    query[..., -size:] = _rotated(rows.query[..., -size:], rows)
    return torch.cat([rms_norm(latent, rows.norm.weight, rows.norm.eps), _rotated(key[:, None], rows)[:, 0]], -1)[
        :, None
    ]


def pack_heads(weights: Tensor) -> Tensor | PackedWeight:
    """Return `weights` unchanged, as plain torch reads them."""
    return weights


def multiply_heads(x: Tensor, weights: Tensor | PackedWeight, output: Tensor) -> None:
    """Store the products of heads with their own weights in `output`, in plain torch, as `MixerKernels.multiply_heads`
    specifies.
    """
    assert isinstance(weights, Tensor)  # `pack_heads` returned it
    torch.matmul(x.transpose(0, 1), weights, out=output.transpose(0, 1))


def _rotated(x: Tensor, rows: LatentRows) -> Tensor:
    """Return x [num_tokens, num_heads, size] after rotary embedding by the cos and sin of `rows`, computed in
    float32.
    """
    wide, half = x.float(), x.shape[-1] // 2
    cos, sin = (part[:, None, :half] for part in rows.rotation)
    first, second = (wide[..., ::2], wide[..., 1::2]) if rows.is_interleaved else wide.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    return (torch.stack(pair, dim=-1).flatten(-2) if rows.keeps_order else torch.cat(pair, dim=-1)).to(x.dtype)


def _parts(heads: DeltaHeads, rows: Tensor | slice, num_seqs: int) -> _Parts:
    def split(x: Tensor, count: int) -> Tensor:
        """Divide the columns of `x` into `count` heads: float32 [num_seqs, num_heads, length, size]."""
        parted = x.view(num_seqs, -1, count, x.shape[1] // count).transpose(1, 2).float()
        return parted if count == heads.num_heads else parted.repeat_interleave(heads.num_heads // count, dim=1)

    keys = heads.num_key_heads * heads.key_size
    query, key, value = torch.split(heads.qkv[rows], [keys, keys, heads.qkv.shape[1] - 2 * keys], dim=1)
    step = functional.softplus(heads.step[rows].float() + heads.step_bias)
    query, key = (_unit(split(part, heads.num_key_heads)) for part in (query, key))
    return _Parts(
        query * heads.key_size**-0.5,
        key,
        split(value, heads.num_heads),
        split(-torch.exp(heads.log_rate) * step, heads.num_heads)[..., 0],
        split(torch.sigmoid(heads.beta[rows]), heads.num_heads)[..., 0],
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)


def _one_step(parts: _Parts, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule for one token of each sequence. Return (output [num_seqs, num_heads, 1, value_size],
    the new state).
    """
    state = state * parts.decay[..., None].exp()
    delta = (parts.value - parts.key @ state) * parts.beta[..., None]
    state = state + parts.key.transpose(-1, -2) @ delta
    return parts.query @ state, state


def _channel_chunk(parts: _Parts, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one chunk of the gated delta rule with decays [num_seqs, num_heads, length, key_size] and step sizes
    [num_seqs, num_heads, length, 1]. Return (outputs, the state behind the chunk).

    Decays differ by channel, so the products of keys and of queries with keys are sums over decayed channels.
    """
    query, key, total = parts.query, parts.key, parts.decay.cumsum(2)
    length = total.shape[2]
    lower = torch.ones(length, length, dtype=torch.bool, device=state.device).tril()
    # Above the diagonal the exponent is positive and might overflow.
    between = total[:, :, :, None] - total[:, :, None]
    decayed = between.masked_fill(~lower[..., None], float("-inf")).exp() * key[:, :, None]
    mixing = (key[:, :, :, None] * decayed).sum(-1) * parts.beta
    scores = (query[:, :, :, None] * decayed).sum(-1)
    both = torch.cat([parts.value * parts.beta, key * parts.beta * total.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(mixing, both, upper=False, unitriangular=True)
    new_values, seen_keys = torch.split(solved, [parts.value.shape[-1], key.shape[-1]], dim=-1)
    update = new_values - seen_keys @ state
    output = (query * total.exp()) @ state + scores @ update
    last = total[:, :, -1:]
    rest = (key * (last - total).exp()).transpose(-1, -2)
    return output, state * last.transpose(-1, -2).exp() + rest @ update


def _in_chunks(parts: _Parts, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule for several tokens, chunk by chunk. Return (outputs [num_seqs, num_heads, length,
    value_size], the last state), as in section 3.3 of the paper.

    Within a chunk the updates of the state depend on each other through a triangular system of equations.
    """
    length = parts.decay.shape[2]
    missing = -length % CHUNK_TOKENS
    # Zeros change nothing: they decay nothing and update nothing.
    padded = (functional.pad(part, (0,) * (2 * (part.dim() - 3)) + (0, missing)) for part in parts)
    chunks = _Parts(*(part.view(*part.shape[:2], -1, CHUNK_TOKENS, *part.shape[3:]) for part in padded))
    total = chunks.decay.cumsum(-1)
    lower = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=state.device).tril()
    # Above the diagonal the exponent is positive and might overflow.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    beta, grown = chunks.beta[..., None], total[..., None].exp()
    mixing = (chunks.key @ chunks.key.transpose(-1, -2)) * between * beta
    # Values and keys are right-hand sides of one system: [..., chunk, value_size + key_size].
    both = torch.cat([chunks.value * beta, chunks.key * (beta * grown)], dim=-1)
    # `unitriangular` means a diagonal of ones: the diagonal of `mixing` itself is not read.
    solved = torch.linalg.solve_triangular(mixing, both, upper=False, unitriangular=True)
    new_values, seen_keys = torch.split(solved, [chunks.value.shape[-1], chunks.key.shape[-1]], dim=-1)
    scores = (chunks.query @ chunks.key.transpose(-1, -2)) * between
    query = chunks.query * grown
    key = (chunks.key * (total[..., -1:] - total)[..., None].exp()).transpose(-1, -2)
    outputs = []
    for n in range(total.shape[2]):
        update = new_values[:, :, n] - seen_keys[:, :, n] @ state
        outputs.append(query[:, :, n] @ state + scores[:, :, n] @ update)
        state = state * total[:, :, n, -1:, None].exp() + key[:, :, n] @ update
    return torch.cat(outputs, dim=2)[:, :, :length], state
