"""Call the C++ steps between a layer's matrix products, behind `LayerKernels`, and the KV store that they share with
attention.

Tensors are converted to pointers and strides here. Inputs that the library does not support go to the plain-torch twin.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.engine.kernels.cpu.linear import (
    Matrix,
    PackedLinear,
    can_pack,
    embed,
    has_packed_linear,
    pack,
    pack_codes,
)
from baton_serve.engine.kernels.interfaces import Activations, Experts, Linear, Norm, Weight, no_work
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.reference import layers as twin
from baton_serve.engine.kernels.reference.experts import activated

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes in the C++ sources."""

KV_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}
"""Numbers of the dtypes of caches with one byte for each element."""

SILU, GELU_TANH, SIGMOID = 0, 1, 2
"""Numbers of the activations of gates in the C++ sources."""

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _NormArguments(ctypes.Structure):
    """Mirrors the C struct `NormArguments` of src/layers.cpp, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("input", "weight", "bias", "input_weight", "input_bias", "residual", "output")),
        *((name, _LONG) for name in ("input_stride", "residual_stride", "num_rows")),
        *((name, _INT) for name in ("size", "dtype", "num_threads", "kind")),
        *((name, _FLOAT) for name in ("epsilon", "scale")),
    )


class _GateArguments(ctypes.Structure):
    """Mirrors the C struct `GateArguments` of src/layers.cpp, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("gate", "up", "output")),
        *((name, _LONG) for name in ("gate_stride", "up_stride", "num_rows")),
        *((name, _INT) for name in ("size", "dtype", "num_threads", "activation")),
    )


class _GatedNormArguments(ctypes.Structure):
    """Mirrors the C struct `GatedNormArguments` of src/arguments.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("input", "gate", "weight", "output")),
        *((name, _LONG) for name in ("input_stride", "gate_stride", "num_rows")),
        *((name, _INT) for name in ("num_heads", "size", "dtype", "num_threads")),
        ("epsilon", _FLOAT),
    )


class _StoreArguments(ctypes.Structure):
    """Mirrors the C struct `StoreArguments` of src/layers.cpp, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value", "cos", "sin", "cache", "slots")),
        *((name, _LONG) for name in ("query_token_stride", "query_head_stride")),
        *((name, _LONG) for name in ("key_token_stride", "key_head_stride")),
        *((name, _LONG) for name in ("value_token_stride", "value_head_stride")),
        *((name, _LONG) for name in ("cache_block_stride", "cache_value_offset")),
        *((name, _LONG) for name in ("cache_head_stride", "cache_token_stride", "num_tokens", "rotary_stride")),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, _INT) for name in ("block_tokens", "dtype", "num_threads", "interleaved", "codes")),
    )


def norm_kind(norm: Norm) -> int:
    """Return the number by which the C++ sources name the kind of a norm: 0 RMSNorm, 1 RMSNorm times 1 + weight, 2
    LayerNorm.
    """
    return 2 if norm.is_centered else int(norm.has_offset)


def reads_cache(cache: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the C++ library supports the dtype and strides of this layer's view of the KV cache, for
    activations of `dtype`.
    """
    if cache.dtype in KV_CODES:  # the scales follow the codes of a head
        return cache.stride(4) == 1 and cache.stride(3) == cache.shape[4]
    return cache.dtype == dtype and cache.stride(4) == 1


class KvStore:
    """Calls the C++ function that writes K and V to the KV cache, and that can apply rotary embeddings to query and key
    before.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.baton_store
        self._function.argtypes = [ctypes.POINTER(_StoreArguments)]

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        slots: Tensor,
        rotated: tuple[Tensor, Tensor, Tensor] | None = None,
        interleaved: bool = False,
    ) -> bool:
        """Write `key` and `value` to the positions `slots` of `cache`. `rotated` is (query, cos, sin): then the query
        is rotated in place, and the key before it is stored. Return False, with nothing done, if the library does not
        support these tensors.
        """
        dtype = DTYPE_CODES.get(key.dtype)
        rows = (key, value) if rotated is None else (key, value, rotated[0])
        if dtype is None or not reads_cache(cache, key.dtype):
            return False
        if any(t.dtype != key.dtype or t.stride(-1) != 1 for t in rows):
            return False
        block_stride, value_offset, head_stride, token_stride, _ = cache.stride()
        arguments = _StoreArguments(
            key=key.data_ptr(),
            value=value.data_ptr(),
            cache=cache.data_ptr(),
            slots=slots.data_ptr(),
            key_token_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_token_stride=value.stride(0),
            value_head_stride=value.stride(1),
            cache_block_stride=block_stride,
            cache_value_offset=value_offset,
            cache_head_stride=head_stride,
            cache_token_stride=token_stride,
            num_tokens=key.shape[0],
            num_kv_heads=cache.shape[2],
            head_dim=cache.shape[4],
            block_tokens=cache.shape[3],
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            interleaved=interleaved,
            codes=KV_CODES.get(cache.dtype, 0),
        )
        if rotated is None:
            return bool(self._function(arguments) == 0)
        query, cos, sin = rotated[0], rotated[1].float().contiguous(), rotated[2].float().contiguous()
        arguments.query, arguments.cos, arguments.sin = query.data_ptr(), cos.data_ptr(), sin.data_ptr()
        arguments.query_token_stride, arguments.query_head_stride = query.stride(0), query.stride(1)
        arguments.num_heads = query.shape[1]
        arguments.rotary_stride, arguments.rotary_dim = cos.stride(0), cos.shape[1]
        return bool(self._function(arguments) == 0)


class GateKernel:
    """Calls the C++ functions that multiply rows by an activation of a gate. `library` is the result of
    `load_kernels`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._gate = library.baton_gate
        self._gate.argtypes = [ctypes.POINTER(_GateArguments)]
        self._gated_norm = library.baton_gated_norm
        self._gated_norm.argtypes = [ctypes.POINTER(_GatedNormArguments)]

    def __call__(self, gate: Tensor, up: Tensor, activation: int) -> Tensor | None:
        """Return activation(gate) * up, both [rows, width], or None if the library does not support their dtypes.
        `activation` is the number that the C++ sources give it.
        """
        dtype = DTYPE_CODES.get(gate.dtype)
        if dtype is None or gate.dtype != up.dtype:
            return None
        gate, up = _as_rows(gate), _as_rows(up)
        output = torch.empty(gate.shape, dtype=gate.dtype)
        arguments = _GateArguments(
            gate=gate.data_ptr(),
            up=up.data_ptr(),
            output=output.data_ptr(),
            gate_stride=gate.stride(0),
            up_stride=up.stride(0),
            num_rows=gate.shape[0],
            size=gate.shape[1],
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            activation=activation,
        )
        return output if self._gate(arguments) == 0 else None

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm) -> Tensor | None:
        """Return the RMSNorm of x times silu(gate), as `MixerKernels.gated_norm` specifies, or None if the library does
        not support these tensors.
        """
        dtype = DTYPE_CODES.get(x.dtype)
        if dtype is None or {gate.dtype, norm.weight.dtype} != {x.dtype} or norm_kind(norm) != 0:
            return None
        num_rows, num_heads, size = x.shape
        rows, gates = _as_rows(x.reshape(num_rows, -1)), _as_rows(gate.reshape(num_rows, -1))
        output = torch.empty(x.shape, dtype=x.dtype)
        arguments = _GatedNormArguments(
            input=rows.data_ptr(),
            gate=gates.data_ptr(),
            weight=norm.weight.data_ptr(),
            output=output.data_ptr(),
            input_stride=rows.stride(0),
            gate_stride=gates.stride(0),
            num_rows=num_rows,
            num_heads=num_heads,
            size=size,
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            epsilon=norm.eps,
        )
        return output if self._gated_norm(arguments) == 0 else None


@dataclass(frozen=True, slots=True)
class PackedStacks(Experts):
    """Experts whose weights are packed matrices, with their biases; the fields of stacked weights are empty."""

    matrices: tuple[tuple[Matrix, Matrix], ...] = ()

    @property
    def num_experts(self) -> int:
        return len(self.matrices)


class CpuLayers:
    """Implements `LayerKernels` by C++ kernels. `library` is the result of `load_kernels`; `dtype` is that of the
    model's activations. Plain torch computes what the library does not support.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.library = library
        self._can_pack = dtype == torch.bfloat16 and has_packed_linear(library)
        self._packed_linear = PackedLinear(library)
        self._store = KvStore(library)
        self._norm = library.baton_norm
        self._norm.argtypes = [ctypes.POINTER(_NormArguments)]
        self._gate = GateKernel(library)

    def pack(self, weight: Tensor | QuantizedWeight) -> Weight:
        if isinstance(weight, Tensor):
            # torch multiplies a few rows by a bf16 matrix several times more slowly than memory delivers the matrix.
            is_packed = self._can_pack and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
            return pack(self.library, [weight], None) if is_packed else weight
        return pack_codes(self.library, [weight], None) if self._can_pack and can_pack(weight) else weight

    def embed(self, token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        if not isinstance(weight, Matrix):
            return twin.embed(token_ids, weight, dtype)
        return embed(weight, token_ids.reshape(-1), dtype).view(*token_ids.shape, weight.inputs)

    def linear(self, x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        if not isinstance(weight, Matrix):
            return twin.linear(x, weight, bias)
        product = self._packed_linear(x, weight)
        return product if bias is None else product + bias

    def route(
        self, logits: Tensor, top_k: int, *, renormalize: bool, num_shared: int = 0, has_gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        return twin.route(logits, top_k, renormalize=renormalize, num_shared=num_shared, has_gate=has_gate)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        return twin.mix(x, weights, chosen, experts, self._one_expert if isinstance(experts, PackedStacks) else None)

    def _one_expert(self, x: Tensor, experts: Experts, number: int) -> Tensor:
        """Return the output of one packed expert for `x` [rows, hidden]."""
        assert isinstance(experts, PackedStacks)
        up, down = experts.matrices[number]
        return self._packed_linear(activated(self._packed_linear(x, up), experts), down)

    def pack_experts(self, experts: Experts) -> Experts:
        """Return the experts with a packed matrix for each product, without the stacked weights, which the caller
        frees; the experts themselves if the library does not multiply by such weights.
        """
        gate_up, down = experts.gate_up, experts.down
        if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or not self._can_pack:
            return experts
        if gate_up.dtype != torch.bfloat16 or gate_up.shape[2] % 2 or down.shape[2] % 2:
            return experts
        biases = [
            [None] * len(down) if bias is None else list(bias) for bias in (experts.gate_up_bias, experts.down_bias)
        ]
        first, second = (
            [pack(self.library, [weight], bias) for weight, bias in zip(stack, own, strict=True)]
            for stack, own in zip((gate_up, down), biases, strict=True)
        )
        return PackedStacks(
            gate_up=gate_up.new_empty(0),
            down=down.new_empty(0),
            is_interleaved=experts.is_interleaved,
            limit=experts.limit,
            alpha=experts.alpha,
            is_part=experts.is_part,
            matrices=tuple(zip(first, second, strict=True)),
        )

    def norm_for(self, x: Tensor, norm: Norm, then: Weight, *, residual: Tensor | None = None) -> Activations:
        return self.rms_norm(x, norm.weight, norm.eps, residual=residual)

    def linear_norm(
        self,
        x: Activations,
        product: Linear,
        residual: Tensor,
        norm: Norm,
        then: Weight | None = None,
        *,
        before_norm: Callable[[], None] = no_work,
    ) -> Activations:
        output = self.linear(x, product.weight, product.bias)
        before_norm()
        return self.rms_norm(output, norm.weight, norm.eps, residual=residual)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        unit_offset: bool = False,
    ) -> Tensor:
        output = self._normed(x, Norm(weight, eps, has_offset=unit_offset), residual)
        if output is not None:
            return output
        return twin.rms_norm(x, weight, eps, residual=residual, unit_offset=unit_offset)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        output = self._normed(x, norm, None) if norm.weight.dim() == 1 else None
        return twin.norm(x, norm) if output is None else output

    def _normed(self, x: Tensor, norm: Norm, residual: Tensor | None) -> Tensor | None:
        """Return the norm of x, or of x + `residual`, which becomes that sum. Return None, with nothing done, if the
        library does not support these tensors.
        """
        dtype = DTYPE_CODES.get(x.dtype)
        operands = [part for part in (norm.weight, norm.bias, residual) if part is not None]
        contiguous = residual is None or residual.is_contiguous()
        if dtype is None or not contiguous or any(t.dtype != x.dtype or t.stride(-1) != 1 for t in operands):
            return None
        rows, output = _as_rows(x), torch.empty(x.shape, dtype=x.dtype)
        arguments = _NormArguments(
            input=rows.data_ptr(),
            weight=norm.weight.data_ptr(),
            bias=None if norm.bias is None else norm.bias.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            output=output.data_ptr(),
            input_stride=rows.stride(0),
            residual_stride=rows.shape[1],
            num_rows=rows.shape[0],
            size=rows.shape[1],
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            kind=norm_kind(norm),
            epsilon=norm.eps,
            scale=1.0,
        )
        return output if self._norm(arguments) == 0 else None

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        output = self._gated(gate_up, SILU)
        return twin.silu_mul(gate_up) if output is None else output

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        output = self._gated(gate_up, GELU_TANH)
        return twin.gelu_mul(gate_up) if output is None else output

    def _gated(self, gate_up: Tensor, activation: int) -> Tensor | None:
        """Return activation(gate) * up of `gate_up` [..., 2 * width], or None if the library does not support its
        dtype. `activation` is the number that the C++ sources give it.
        """
        rows, width = _as_rows(gate_up), gate_up.shape[-1] // 2
        output = self._gate(rows[:, :width], rows[:, width:], activation)
        return None if output is None else output.view(*gate_up.shape[:-1], width)

    def gated_linear(self, x: Activations, gate_up: Linear, then: Weight) -> Activations:
        return self.silu_mul(self.linear(x, gate_up.weight, gate_up.bias))

    def rotation(self, positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return twin.rotation(positions, frequencies, scaling)

    def rotary_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        *,
        interleaved: bool = False,
    ) -> None:
        if not self._store(key, value, cache, slots, (query, *rotation), interleaved):
            twin.rotary_store(query, key, value, rotation, cache, slots, interleaved=interleaved)


def _as_rows(x: Tensor) -> Tensor:
    """Return a tensor [..., size] as [rows, size] whose rows are contiguous. It is copied only if its strides require
    it.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
