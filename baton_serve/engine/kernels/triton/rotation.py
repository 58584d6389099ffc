"""Cosines and sines of a step's positions, in one kernel where torch's operators take nine. Twin: reference_layers."""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.triton.tiles import padded


def rotation(positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """positions int64 [num_tokens], frequencies float32 [half] in radians a token -> cos and sin times `scaling`,
    float32 [num_tokens, 2 * half], both halves alike."""
    half = frequencies.shape[0]
    both = torch.empty((2, positions.shape[0], 2 * half), dtype=torch.float32, device=positions.device)
    _rotation_kernel[(positions.shape[0],)](
        both[0], both[1], positions, frequencies, scaling, half=half, dims=padded(2 * half), num_warps=1
    )
    return both[0], both[1]


@triton.jit
def _rotation_kernel(cos, sin, positions, frequencies, scaling, half: tl.constexpr, dims: tl.constexpr):
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, dims)
    live = dim < 2 * half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + dim % half, live, other=0.0)
    tl.store(cos + token * (2 * half) + dim, tl.cos(angle) * scaling, live)
    tl.store(sin + token * (2 * half) + dim, tl.sin(angle) * scaling, live)
