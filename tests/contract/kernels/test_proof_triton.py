"""Triton's kernels and torch's own attention pass the proof, as on a GPU. A failure here would be a false alarm."""

from dataclasses import replace
from functools import partial
from typing import cast

import pytest
import torch

from baton_serve.engine.kernels import AttentionSpec
from baton_serve.engine.kernels.interfaces import LayerKernels
from baton_serve.engine.kernels.library_kernels import LibraryAttention
from baton_serve.engine.kernels.operations import WHOLE_ROW, ProofShapes, WeightFormat
from baton_serve.engine.kernels.proved_kernels import KernelCandidates, prove_kernels
from baton_serve.engine.kernels.prover import KernelCandidate
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.argmax import argmax
from baton_serve.engine.kernels.triton.attention import TritonAttention
from baton_serve.engine.kernels.triton.tiles import DeviceLimits
from tests.contract.kernels.triton_batches import DEVICE

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
LIMITS = DeviceLimits(processors=8, shared_bytes=65536, descriptors=False)
SHAPES = ProofShapes(
    dtype=DTYPE,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_planes=2,
    block_tokens=64,
    scale_rows=0,
    cache_dtype=DTYPE,
    vocab_size=320,
    specs=(AttentionSpec(0.25), AttentionSpec(0.25, sliding_window=48)),
)
PRODUCTS = replace(SHAPES, num_planes=1, num_kv_heads=1, specs=())
"""Without attention and the rotary store, which other cases prove."""
LAYERS = cast(LayerKernels, triton_layers)
CANDIDATES = KernelCandidates(
    attention=(
        KernelCandidate("Triton", partial(TritonAttention, DEVICE, limits=LIMITS)),
        KernelCandidate("SDPA", LibraryAttention, frozenset({"prefill attention", "mixed attention"}), is_last=True),
    ),
    layers=(KernelCandidate("Triton", lambda: LAYERS),),
    argmax=(KernelCandidate("Triton", lambda: argmax),),
)


@pytest.mark.parametrize(
    "shapes",
    [
        SHAPES,
        replace(SHAPES, cache_dtype=torch.int8, scale_rows=2, specs=SHAPES.specs[:1], block_tokens=16),
        replace(SHAPES, num_planes=1, num_kv_heads=1, head_dim=80, specs=(AttentionSpec(0.1, value_dim=64),)),
        replace(PRODUCTS, formats=(WeightFormat("int4", 32, DTYPE, has_zeros=False),)),
        replace(PRODUCTS, formats=(WeightFormat("int8", WHOLE_ROW, DTYPE, has_zeros=False),)),
        replace(PRODUCTS, has_experts=True),
    ],
    ids=["plain", "int8 cache", "latents", "int4", "int8", "experts"],
)
def test_tritons_kernels_are_right(shapes: ProofShapes) -> None:
    kernels = prove_kernels(CANDIDATES, shapes, DEVICE, folder=None, is_timed=False)
    assert [verdict for verdict in kernels.verdicts if not verdict.is_right] == []
    assert kernels.layers is LAYERS and kernels.mixes_prompts
    if shapes.specs:
        assert isinstance(kernels.attention, TritonAttention)
        assert {verdict.candidate for verdict in kernels.verdicts} == {"Triton", "SDPA"}
