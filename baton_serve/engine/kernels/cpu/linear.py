"""Pack weights in the order that the C++ products read (src/linear.h): once at load, as bf16 or as codes of four or
eight bits.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine.device import one_thread
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, code_bits, code_values

PANEL = 32
"""Number of outputs that lie together in a packed matrix."""
SIGN = 0x80
"""Sign bit of an eight-bit code; the other bits are a place in a table of magnitudes."""

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix in the order in which the C++ products read it; implements `PackedWeight`. For a quantized
    weight, `scales` and `zeros` are float32 [groups, padded outputs], and `table` (bf16) has the values of the codes.
    """

    words: Tensor
    bias: Tensor | None
    inputs: int
    outputs: int
    bits: int = 16
    group: int = 0
    scales: Tensor | None = None
    zeros: Tensor | None = None
    table: Tensor | None = None


class PackedMatrix(ctypes.Structure):
    """Mirrors the C struct `PackedMatrix` of src/linear.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("words", "bias", "scales", "zeros", "table")),
        *((name, _INT) for name in ("inputs", "outputs", "bits", "group")),
    )


def has_packed_linear(library: ctypes.CDLL) -> bool:
    """Return whether this CPU has the instructions that the C++ products of packed weights need: dot products of bf16
    pairs, and byte look-ups.
    """
    return bool(library.baton_has_packed_linear())


def pack(library: ctypes.CDLL, parts: Sequence[Tensor], bias: Tensor | None, *, takes_turns: bool = False) -> Matrix:
    """Join the matrices `parts`, each bf16 [outputs, inputs] with an even number of inputs, along their outputs, and
    return them in the order of the C++ products. The parts are not kept. With `takes_turns`, the rows of the two parts
    gate and up alternate in runs of 16, as in `gated`.
    """
    inputs, outputs = parts[0].shape[1], sum(len(part) for part in parts)
    parts = [part if part.stride() == (inputs, 1) else part.contiguous() for part in parts]
    # The addresses of all rows: the C++ code reads the parts where they lie, without joining them first.
    rows = np.concatenate([part.data_ptr() + np.arange(len(part)) * (2 * inputs) for part in parts])
    if takes_turns:
        rows = rows.reshape(2, -1, PANEL // 2).swapaxes(0, 1).ravel()
    words = torch.empty((-(-outputs // PANEL), inputs // 2, PANEL), dtype=torch.int32)
    rows = np.ascontiguousarray(rows, dtype=np.uintp)
    library.baton_pack.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _INT]
    library.baton_pack.restype = None
    library.baton_pack(rows.ctypes.data, outputs, inputs // 2, words.data_ptr(), torch.get_num_threads())
    return Matrix(words, None if bias is None else bias.contiguous(), inputs, outputs)


def can_pack(weight: QuantizedWeight) -> bool:
    """Return whether the C++ products support this quantized weight; otherwise plain torch multiplies by it."""
    is_cut_well = weight.group >= weight.inputs or weight.group in (32, 64) or weight.group % 128 == 0
    if weight.inputs % 4 or not is_cut_well:
        return False
    return weight.codebook != "int8" or not bool((weight.codes == -128).any())  # -128 has no positive counterpart


def pack_codes(
    library: ctypes.CDLL, parts: Sequence[QuantizedWeight], bias: Tensor | None, *, takes_turns: bool = False
) -> Matrix:
    """Join the quantized weights `parts`, which have the same format, inputs and groups, along their outputs, and pack
    them for the C++ products. The parts are not kept. Call it only if `can_pack` is True for each.

    `takes_turns` says that the outputs are gate and up, one after the other: they, and `bias`, are interleaved as in
    `gated`.
    """
    first, outputs, threads = parts[0], sum(part.outputs for part in parts), torch.get_num_threads()
    with one_thread():
        order = gated(torch.arange(outputs)) if takes_turns else None
        # The library reads the parts where they lie; joining them first would copy every code once more.
        codes = [part.codes.contiguous() for part in parts]
        rows = [part.data_ptr() + np.arange(len(part)) * (part.stride(0) * part.element_size()) for part in codes]
        addresses = np.concatenate(rows) if order is None else np.concatenate(rows)[order.numpy()]
        bits = code_bits(first.codebook)
        # No product reads codes of six bits: they become bytes.
        kept_bits = 4 if bits == 4 else 8
        words = torch.empty((-(-outputs // PANEL), first.inputs * PANEL * kept_bits // 8), dtype=torch.uint8)
        meaning, table = _tables(first)
        _pack_codes(library, addresses, (first.inputs, bits), meaning, words, threads)
        kept_bias = None if bias is None else _joined([bias], order).to(torch.bfloat16).contiguous()
        scales = _columns(_joined([part.scales for part in parts], order))
        zeros = [part.zeros for part in parts if part.zeros is not None]
        kept_zeros = _columns(_joined(zeros, order)) if zeros else None
    group = min(first.group, first.inputs)
    return Matrix(words, kept_bias, first.inputs, outputs, kept_bits, group, scales, kept_zeros, table)


def gated(rows: Tensor) -> Tensor:
    """Return the rows of two matrices, gate and up, which `rows` holds one above the other, alternating in runs of 16.
    So one pass computes a gate and its up value together.
    """
    return rows.view(2, -1, PANEL // 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def embed(matrix: Matrix, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows `rows` of a packed eight-bit embedding table, dequantized to `dtype`, [len(rows), inputs]."""
    assert matrix.bits == 8 and matrix.scales is not None and matrix.table is not None
    place = rows % PANEL
    words = matrix.words.view(-1, matrix.inputs // 2, 4, 2, 4, 2)
    codes = words[rows // PANEL, :, place % 16 // 4, place // 16, place % 4].reshape(len(rows), -1)
    values = matrix.table.float()[(codes & (SIGN - 1)).int()]
    values = torch.where(codes >= SIGN, -values, values)
    groups = len(matrix.scales)
    scaled = values.view(len(rows), groups, -1)
    if matrix.zeros is not None:
        scaled = scaled - matrix.zeros.T[rows][:, :, None]
    return (scaled * matrix.scales.T[rows][:, :, None]).view(len(rows), -1).to(dtype)


def as_argument(matrix: Matrix) -> PackedMatrix:
    """Return the C struct of a packed matrix. Its pointers are valid only as long as `matrix` exists."""

    def at(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return PackedMatrix(
        words=at(matrix.words),
        bias=at(matrix.bias),
        scales=at(matrix.scales),
        zeros=at(matrix.zeros),
        table=at(matrix.table),
        inputs=matrix.inputs,
        outputs=matrix.outputs,
        bits=matrix.bits,
        group=matrix.group or matrix.inputs,
    )


class PackedLinear:
    """Multiplies activations by packed weights in C++. `library` is the result of `load_kernels`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.baton_linear
        self._function.argtypes = [ctypes.POINTER(PackedMatrix), _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT]
        self._function.restype = ctypes.c_int

    def __call__(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Return x, bf16 [num_tokens, inputs], times a packed matrix: [num_tokens, outputs]. Raises `MemoryError` if
        scratch memory cannot be allocated.
        """
        x = x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()
        # The library stores pairs of outputs, so rows have an even length.
        output = torch.empty((len(x), matrix.outputs + matrix.outputs % 2), dtype=x.dtype)
        argument, threads = as_argument(matrix), torch.get_num_threads()
        status = self._function(
            argument, x.data_ptr(), x.stride(0), output.data_ptr(), output.stride(0), len(x), threads
        )
        if status != 0:
            raise MemoryError("a matrix product ran out of memory for its scratch space")
        return output[:, : matrix.outputs]


class PackedHeads:
    """Multiplies each head of activations by packed weights of its own in C++. `library` is the result of
    `load_kernels`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._is_able = library, has_packed_linear(library)
        self._function = library.baton_linear_heads
        self._function.argtypes = [
            *(ctypes.POINTER(PackedMatrix), _INT, _POINTER, _LONG, _LONG),
            *(_POINTER, _LONG, _LONG, _LONG, _INT),
        ]
        self._function.restype = ctypes.c_int

    def pack(self, weights: Tensor) -> Matrix | None:
        """Pack weights [num_heads, inputs, outputs]; None if the library does not support their dtype or sizes."""
        _, inputs, outputs = weights.shape
        if not self._is_able or weights.dtype != torch.bfloat16 or inputs % 2 or outputs % PANEL:
            return None
        return pack(self._library, list(weights.transpose(1, 2)), None)

    def __call__(self, x: Tensor, matrix: Matrix, output: Tensor) -> None:
        """Store x [num_tokens, num_heads, inputs], bf16, times the packed weights in `output`, [num_tokens, num_heads,
        outputs]. Raises `MemoryError` if scratch memory cannot be allocated.
        """
        # The library reads pairs of elements.
        x = x if x.stride(2) == 1 and not any(stride % 2 for stride in x.stride()[:2]) else x.contiguous()
        assert output.stride(2) == 1 and matrix.outputs == output.shape[1] * output.shape[2]
        to, threads = output.stride(), torch.get_num_threads()
        status = self._function(
            *(as_argument(matrix), x.shape[1], x.data_ptr(), x.stride(0), x.stride(1)),
            *(output.data_ptr(), to[0], to[1], len(x), threads),
        )
        if status != 0:
            raise MemoryError("a matrix product ran out of memory for its scratch space")


def _padded(rows: Tensor) -> Tensor:
    missing = -len(rows) % PANEL
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _columns(per_output: Tensor) -> Tensor:
    """Return numbers [outputs, groups] in the order of the C++ products: float32 [groups, padded outputs]."""
    return _padded(per_output.float()).T.contiguous()


def _pack_codes(
    library: ctypes.CDLL,
    rows: NDArray[Any],
    shape: tuple[int, int],
    meaning: Tensor | None,
    words: Tensor,
    num_threads: int,
) -> None:
    """Call the C++ function that reads rows of codes at the addresses `rows` and writes them to `words` in packed
    order. `shape` is (inputs, bits of a code); `meaning` maps each code to the one that products read; None: to itself.
    """
    addresses = np.ascontiguousarray(rows, dtype=np.uintp)
    library.baton_pack_codes.argtypes = [_POINTER, _LONG, _LONG, _INT, _POINTER, _POINTER, _INT]
    library.baton_pack_codes.restype = None
    at = None if meaning is None else meaning.data_ptr()
    library.baton_pack_codes(addresses.ctypes.data, len(rows), *shape, at, words.data_ptr(), num_threads)


def _joined(parts: Sequence[Tensor], order: Tensor | None) -> Tensor:
    """Join tensors [outputs, ...] along their outputs, and return the outputs in the given `order`; None: as they
    are.
    """
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    return joined if order is None else joined[order]


def _tables(weight: QuantizedWeight) -> tuple[Tensor | None, Tensor]:
    """Return (mapping, table) for a weight's format: the code that products read for each stored code, uint8, or None
    if it is the same, and the bf16 values of the codes that products read.

    Products read four-bit codes, or a sign and a place in a table of 128 magnitudes.
    """
    if code_bits(weight.codebook) == 4:
        values = torch.tensor(code_values(weight.codebook))
        return None, torch.cat([values, values]).to(torch.bfloat16)
    if weight.codebook == "int8":
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.int8).short()
        return torch.where(numbers < 0, SIGN - numbers, numbers).to(torch.uint8), torch.arange(SIGN).to(torch.bfloat16)
    if weight.codebook == "fp6":
        codes = torch.arange(64, dtype=torch.uint8)
        magnitudes = torch.tensor(code_values("fp6")[:32]).repeat(4)
        return (codes & 31) | (codes & 32) << 2, magnitudes.to(torch.bfloat16)
    # A float8 is a sign and seven bits already: decode all 128 positive ones into the table.
    # bf16 represents each of them exactly.
    positive = torch.arange(SIGN, dtype=torch.uint8).view(weight.codes.dtype)
    return None, positive.float().to(torch.bfloat16)
