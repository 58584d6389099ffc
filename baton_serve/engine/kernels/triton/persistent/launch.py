"""Run all layers of one row over four-bit weights in one kernel, whose programs wait for each other after each step of
a layer.

A launch costs more than such a barrier, which takes a microsecond. All programs must run at the same time, or they
would wait for ever: how many can is computed from what the compiler and the device report, and if one of them does not
report it, this module is not used. A program that has waited for some seconds continues, and all results are NaN
from then on. Twin: the separate steps (engine.model.fused_forward).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec, Linear, RowLayer
from baton_serve.engine.kernels.quantized_kv import is_coded
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.triton.persistent.kernel import layers_kernel
from baton_serve.engine.kernels.triton.tiles import narrowest_columns, padded

MAX_SPINS = 1 << 23
"""How often a program polls within one step before it gives up; each poll takes about half a microsecond."""
SCALE_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Dtypes of scales that the kernel reads."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Tile sizes and number of programs of the kernel that computes all layers for one token. They were measured
    (docs/log/low-bit-formats.md, "All layers of one row in one kernel").
    """

    programs: int
    depth: int  # inputs of a tile: 256 or 512
    tile: int = 64  # outputs
    warps: int = 4
    stages: int = 3
    token_tile: int = 64
    max_splits: int = 32  # the new token is one
    down_runs: bool = False
    """True if the tiles of the down product are divided as those of all other products; see
    `triton.persistent.products.share_of`.
    """


@dataclass(frozen=True, slots=True)
class RowShape:
    """The sizes that all layers of a decoder must share for the kernel that computes them for one token."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int


MAX_PROGRAMS_PER_PROCESSOR = 2
"""Programs that the plan starts on each processor."""


class RowLayers:
    """Implements `RowKernel` for one model with four-bit weights: all layers of a step of one token in one kernel."""

    def __init__(
        self,
        layers: Sequence[RowLayer],
        shape: RowShape,
        scale: float,
        plan: RowPlan,
        limits: dict[str, int] | None = None,
    ) -> None:
        """Keep the layers' weights, and allocate some megabytes of scratch memory. `shape` must come from `shape_of`.
        `limits` are those of the device; None allows only a plan of one program, which always fits.
        """
        self._layers, self._shape, self._scale, self._plan, self._limits = layers, shape, scale, plan, limits
        assert limits is not None or plan.programs == 1
        self._safe: dict[tuple[int, int], bool] = {}
        like = layers[0].input_norm.weight
        self._dtype, self._device = like.dtype, like.device
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        splits = shape.heads * plan.max_splits
        # Three words: the number of programs that have reached the barrier, NaN after a barrier that failed (see
        # `wait`), and NaN if a sum of this launch overflowed or was NaN.
        self.state = torch.zeros(3, dtype=torch.int32, device=self._device)
        self._other = torch.empty(shape.hidden, dtype=self._dtype, device=self._device)
        self._sums = [
            torch.zeros(size, dtype=torch.int64, device=self._device)
            for size in (qkv, 2 * shape.hidden, 2 * shape.width)
        ]
        self._floats = [
            torch.empty(size, dtype=torch.float32, device=self._device)
            for size in (splits * shape.head_dim, splits, shape.hidden // 128)
        ]
        self._anchor = _weight(layers[0].qkv).codes.view(torch.int8)
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def __call__(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], caches: list[Tensor], meta: AttentionMetadata
    ) -> bool:
        """Compute all layers in place in `residual` [1, hidden], and write the token's K and V to the cache. Return
        False, with nothing done, if this step is not supported.
        """
        if not self._takes(residual, rotation, caches, meta):
            return False
        given, constants = self._arguments(residual, rotation, caches, meta), self._constants(caches[0])
        if not self._is_safe(given, constants):
            return False
        layers_kernel[(self._plan.programs,)](*given, **constants)
        return True

    def _is_safe(self, given: tuple[Any, ...], constants: dict[str, Any]) -> bool:
        """Return whether the device runs all programs of the kernel at the same time, which they need, by the registers
        and the memory that the compiled kernel takes.
        """
        if self._limits is None:
            return True
        key = (constants["block_tokens"], constants["head_rows"])
        if key not in self._safe:
            kernel = layers_kernel.warmup(*given, grid=(self._plan.programs,), **constants)
            has_loaded = kernel.run is not None  # Triton knows the registers only after loading the kernel
            count = resident(kernel.n_regs, kernel.metadata.shared, self._plan.warps, self._limits)
            self._safe[key] = has_loaded and count * self._limits["multiprocessor_count"] >= self._plan.programs
        return self._safe[key]

    def _takes(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], caches: list[Tensor], meta: AttentionMetadata
    ) -> bool:
        if residual.shape[0] != 1 or meta.context_lens.shape[0] != 1 or meta.max_query_len != 1:
            return False
        cache, shape = caches[0], self._shape
        is_plain = cache.dtype == self._dtype and not is_coded(cache) and cache.stride(1) != 0
        is_whole = rotation[0].shape[-1] == shape.head_dim and rotation[0].is_contiguous()
        has_heads = (cache.shape[2], cache.shape[4]) == (shape.kv_heads, shape.head_dim)
        return is_plain and is_whole and has_heads and residual.dtype == self._dtype and residual.is_contiguous()

    def _table(self, caches: list[Tensor]) -> Tensor:
        """Return the addresses of each layer's 11 tensors, int64 [layers, 11]. The table is made once for a cache,
        before a graph is captured, because every step runs once before its capture.
        """
        key = tuple(cache.data_ptr() for cache in caches)
        if key not in self._tables:
            rows = [_tensors(layer, cache) for layer, cache in zip(self._layers, caches, strict=True)]
            places = torch.tensor([[one.data_ptr() for one in row] for row in rows]) - self._anchor.data_ptr()
            self._tables[key] = (places // 16).to(self._device)
        return self._tables[key]

    def _arguments(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], caches: list[Tensor], meta: AttentionMetadata
    ) -> tuple[Any, ...]:
        return (
            self.state,
            self.state[1:].view(torch.float32),
            residual,
            self._other,
            self._anchor,
            self._table(caches),
            *self._sums,
            *self._floats,
            *rotation,
            meta.block_tables,
            meta.context_lens,
            meta.slots,
            len(self._layers),
            self._scale,
            self._layers[0].input_norm.eps,
            caches[0].stride(0),
        )

    def _constants(self, cache: Tensor) -> dict[str, Any]:
        shape, plan = self._shape, self._plan
        return {
            "hidden": shape.hidden,
            "width": shape.width,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "block_tokens": cache.shape[3],
            "head_rows": cache.stride(2) // shape.head_dim,
            "scale_dtype": SCALE_DTYPES[_weight(self._layers[0].qkv).scales.dtype],
            "entries": len(_tensors(self._layers[0], cache)),
            "rows": max(16, padded(shape.heads // shape.kv_heads)),
            "few": padded(shape.heads // shape.kv_heads),
            "token_tile": plan.token_tile,
            "max_splits": plan.max_splits,
            "tile": plan.tile,
            "depth": plan.depth,
            "columns": narrowest_columns(self._device),
            "programs": plan.programs,
            "stages": plan.stages,
            "down_runs": plan.down_runs,
            "patience": MAX_SPINS,
            "num_warps": plan.warps,
        }


def row_layers(
    layers: Sequence[RowLayer], specs: Sequence[AttentionSpec], head_dim: int, kv_heads: int
) -> RowLayers | None:
    """Return the kernel that computes all of these layers for one token. Return None if the layers are not supported,
    or if the device does not report how many programs it runs at the same time.
    """
    shape = shape_of(layers, specs, head_dim, kv_heads)
    if shape is None:
        return None
    device = layers[0].input_norm.weight.device
    limits = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    if not {"max_num_regs", "max_shared_mem", "multiprocessor_count", "warpSize"} <= limits.keys():
        return None
    plan = RowPlan(MAX_PROGRAMS_PER_PROCESSOR * limits["multiprocessor_count"], depth_of(shape))
    if plan.programs < shape.width // plan.depth:
        return None
    return RowLayers(layers, shape, specs[0].scale, plan, limits)


def resident(registers: int, shared: int, warps: int, limits: dict[str, int]) -> int:
    """Return how many programs of a kernel one multiprocessor (SM) runs at the same time. `registers` are those of a
    thread, rounded up here to a multiple of eight. `shared` is the shared memory of a program in bytes; one KiB, which
    the device takes for each program, is added here. `limits` are Triton's properties of the device.
    """
    threads = warps * limits["warpSize"]
    by_registers = limits["max_num_regs"] // (-(-registers // 8) * 8 * threads)
    return min(by_registers, (limits["max_shared_mem"] + 1024) // (shared + 1024))


def shape_of(
    layers: Sequence[RowLayer], specs: Sequence[AttentionSpec], head_dim: int, kv_heads: int
) -> RowShape | None:
    """Return the shape of a decoder's layers, or None if the kernel does not support them. It needs layers of one shape
    with four-bit weights in groups of 128, attention over the whole context, no bias, and sizes in whole tiles.
    """
    first = layers[0]
    products = [part for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if not all(part is not None and is_taken(part) for part in products):
        return None
    if any(layer.query_norm is not None for layer in layers):
        return None
    if len({_weight(cast(Linear, part)).scales.dtype for part in products}) > 1:
        return None
    if any(replace(spec, scale=0.0) != AttentionSpec(0.0) or spec.scale != specs[0].scale for spec in specs):
        return None
    if len({layer.input_norm.eps for layer in layers} | {layer.mlp_norm.eps for layer in layers}) > 1:
        return None
    hidden, attended = _weight(first.output).outputs, _weight(first.output).inputs
    width = _weight(cast(Linear, first.down)).inputs
    wanted = [attended + 2 * kv_heads * head_dim, hidden, 2 * width, hidden] * len(layers)
    is_even = all(size % 256 == 0 for size in (hidden, attended, width)) and wanted[0] % 128 == 0
    has_shapes = [_weight(cast(Linear, part)).outputs for part in products] == wanted
    is_padded = padded(head_dim) == head_dim and 16 <= head_dim <= 256 and attended // head_dim // kv_heads <= 16
    if not (is_even and has_shapes and is_padded) or first.input_norm.weight.dtype not in SCALE_DTYPES:
        return None
    return RowShape(hidden, width, attended // head_dim, kv_heads, head_dim)


def depth_of(shape: RowShape) -> int:
    """Return the number of inputs that a tile of the kernel has for layers of these sizes: 256 or 512."""
    sizes = (shape.hidden, shape.width, shape.heads * shape.head_dim)
    return 512 if all(size % 512 == 0 for size in sizes) else 256


def is_taken(product: Linear) -> bool:
    """Return whether the kernel for all layers supports the quantized weight of this linear layer."""
    weight = product.weight
    if product.bias is not None or not isinstance(weight, QuantizedWeight):
        return False
    is_four = weight.codebook == "int4" and weight.group == 128 and weight.zeros is None
    is_placed = weight.codes.data_ptr() % 16 == 0 and weight.scales.data_ptr() % 16 == 0
    return is_four and is_placed and weight.codes.is_contiguous() and weight.scales.dtype in SCALE_DTYPES


def _tensors(layer: RowLayer, cache: Tensor) -> list[Tensor]:
    """Return the tensors of a layer that the kernel reads, in the order of its table of addresses."""
    qkv, output = _weight(layer.qkv), _weight(layer.output)
    gate_up, down = _weight(cast(Linear, layer.gate_up)), _weight(cast(Linear, layer.down))
    start = [layer.input_norm.weight, qkv.codes, qkv.scales, output.codes, output.scales, layer.mlp_norm.weight]
    return [*start, gate_up.codes, gate_up.scales, down.codes, down.scales, cache]


def _weight(product: Linear) -> QuantizedWeight:
    return cast(QuantizedWeight, product.weight)
