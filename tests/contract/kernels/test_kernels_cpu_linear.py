"""The packed products of a CPU that multiplies bf16, against the plain twins; and no row sees another."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_serve.engine.config import Quantization
from baton_serve.engine.kernels import quantized_weights
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.linear import (
    Matrix,
    PackedLinear,
    can_pack,
    embed,
    gated,
    has_packed_linear,
    pack,
    pack_codes,
)
from baton_serve.engine.model.quantized.formats import quantize, scheme

FORMATS: list[Quantization] = ["fp8_e4m3", "fp8_e5m2", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4"]
ROWS = [1, 2, 3, 4, 5, 13, 100, 600]
SHAPES = [(100, 384), (72, 896)]
NOT_IN_TILES = (40, 100)
IN_PIECES = (72, 2176)
"""With this number of inputs, the inputs of many rows pass a small cache piece by piece."""


def _library() -> ctypes.CDLL | None:
    try:
        library = load_kernels()
    except KernelsUnavailableError:
        return None
    return library if has_packed_linear(library) else None


LIBRARY = _library()
PRODUCT = None if LIBRARY is None else PackedLinear(LIBRARY)
pytestmark = pytest.mark.skipif(PRODUCT is None, reason="needs a compiler and a CPU with bf16 dot products")


@pytest.fixture(autouse=True, params=["pairs", "widened", "tiles"])
def tiles(request: pytest.FixtureRequest) -> Iterator[bool]:
    """bf16 by its dot products, as float32, and by AMX where the CPU has it."""
    assert PRODUCT is not None
    library = load_kernels(widens=request.param == "widened")
    wants_tiles = request.param == "tiles"
    if bool(library.baton_use_tiles(int(wants_tiles))) != wants_tiles:
        pytest.skip("this CPU has no AMX")
    vars(PRODUCT).update(vars(PackedLinear(library)))
    yield wants_tiles
    library.baton_use_tiles(1)


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    assert PRODUCT is not None
    return PRODUCT(x, matrix)


def packed_codes(weight: quantized_weights.QuantizedWeight) -> Matrix:
    assert LIBRARY is not None
    return pack_codes(LIBRARY, [weight], None)


def check(matrix: Matrix, weight: Tensor, bias: Tensor | None) -> None:
    """`weight` float32: what the codes stand for. A row has the same bits alone and among others."""
    x = torch.randn(max(ROWS), matrix.inputs).to(torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
    alone = multiply(x[:1], matrix)
    for rows in ROWS:
        given = multiply(x[:rows], matrix)
        assert (given.float() - expected[:rows]).abs().max() <= 4e-3 * expected.abs().max()
        assert torch.equal(given[:1], alone)
        assert torch.equal(given[-1:], multiply(x[rows - 1 : rows], matrix))


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, NOT_IN_TILES, IN_PIECES])
def test_bf16(outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(torch.bfloat16), torch.randn(outputs).to(torch.bfloat16)
    assert LIBRARY is not None
    check(pack(LIBRARY, [weight], bias), weight.float(), bias)
    check(pack(LIBRARY, [weight], None), weight.float(), None)


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_are_packed_as_the_whole_would_be(threads: int) -> None:
    assert LIBRARY is not None
    parts = [torch.randn(rows, 70).to(torch.bfloat16) for rows in (72, 7, 9)]
    file = torch.zeros(2 + 9 * 140, dtype=torch.uint8)  # as one that begins in the middle of a word
    file[2:] = parts[2].view(torch.uint8).view(-1)
    parts[2] = file[2:].view(torch.bfloat16).view(9, 70)
    parts[1] = torch.randn(70, 14).to(torch.bfloat16).T[::2]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    packed = pack(LIBRARY, parts, None)
    torch.set_num_threads(before)
    padded = torch.cat([*parts, torch.zeros(8, 70).to(torch.bfloat16)])
    expected = padded.contiguous().view(torch.int32).view(3, 32, 35).transpose(1, 2)
    assert torch.equal(packed.words, expected)
    assert (packed.inputs, packed.outputs) == (70, 88)


def test_gate_and_up_take_turns() -> None:
    assert LIBRARY is not None
    gate, up = torch.randn(2, 48, 70).to(torch.bfloat16)
    turned = pack(LIBRARY, [gate, up], None, takes_turns=True)
    assert torch.equal(turned.words, pack(LIBRARY, [gated(torch.cat([gate, up]))], None).words)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_codes(name: Quantization, group: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(outputs, inputs), scheme(name, fp8_dtype="e4m3", group_size=group))
    assert weight is not None and can_pack(weight)
    check(packed_codes(weight), quantized_weights.dequantize(weight), None)


@pytest.mark.parametrize(("name", "group"), [("int8", 128), ("sym_int4", 64), ("asym_int4", 128), ("fp8_e4m3", 4096)])
def test_codes_of_many_inputs(name: Quantization, group: int) -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(*IN_PIECES), scheme(name, fp8_dtype="e4m3", group_size=min(group, IN_PIECES[1])))
    assert weight is not None and can_pack(weight)
    check(packed_codes(weight), quantized_weights.dequantize(weight), None)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_gate_and_up_take_turns_with_any_number_of_threads(name: Quantization, threads: int) -> None:
    assert LIBRARY is not None
    shape = scheme(name, fp8_dtype="e4m3", group_size=128)
    # Large enough for two threads.
    gate, up = (quantize(torch.randn(2112, 1152), shape) for _ in range(2))
    assert gate is not None and up is not None
    bias, before = torch.randn(4224).to(torch.bfloat16), torch.get_num_threads()
    torch.set_num_threads(threads)
    turned = pack_codes(LIBRARY, [gate, up], bias, takes_turns=True)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    x = torch.randn(3, 1152).to(torch.bfloat16)
    apart = torch.cat([multiply(x, packed_codes(part)) for part in (gate, up)], dim=1)
    assert torch.equal(multiply(x, replace(turned, bias=None)), gated(apart.T).T)
    assert turned.bias is not None and torch.equal(turned.bias, gated(bias))


def test_an_embedding_is_looked_up_in_packed_codes() -> None:
    weight = quantize(torch.randn(70, 128), scheme("int8", fp8_dtype="e4m3", group_size=128))
    assert weight is not None
    rows = torch.tensor([0, 69, 17, 33, 17])
    assert torch.equal(
        embed(packed_codes(weight), rows, torch.float32), quantized_weights.dequantize_rows(weight, rows, torch.float32)
    )


def test_a_magnitude_that_has_no_code_is_left_to_the_twin() -> None:
    weight = quantize(torch.randn(32, 128), scheme("int8", fp8_dtype="e4m3", group_size=128))
    assert weight is not None
    weight.codes[3, 5] = -128
    assert not can_pack(weight)
