"""Triton's products over quantized weights against the plain twin."""

from dataclasses import replace

import pytest
import torch

from baton_serve.engine.config import Quantization
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, dequantize
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.quant import linear as triton_quant
from baton_serve.engine.kernels.triton.quant.dense import dense
from baton_serve.engine.kernels.triton.quant.gemm import ProductTiles, product_tiles, tile_product
from baton_serve.engine.kernels.triton.quant.gemv import row_product
from baton_serve.engine.model.quantized.formats import quantize, scheme
from tests.contract.kernels.triton_batches import DEVICE

FORMATS: list[Quantization] = ["fp8_e4m3", "fp8_e5m2", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4"]
GROUPED: list[Quantization] = ["sym_int4", "asym_int4", "fp6"]
CASES = [*((name, 128) for name in FORMATS), *((name, 32) for name in GROUPED)]
OUTPUTS = 40


def weight_of(name: Quantization, group: int, inputs: int = 288) -> QuantizedWeight:
    torch.manual_seed(0)
    made = quantize(torch.randn(OUTPUTS, inputs, device=DEVICE), scheme(name, fp8_dtype="e4m3", group_size=group))
    assert made is not None
    return made


def expected(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, dequantize(weight), bias)


@pytest.mark.parametrize(("name", "group"), CASES)
def test_one_row_equals_the_twin(name: Quantization, group: int) -> None:
    weight, bias = weight_of(name, group), torch.randn(OUTPUTS, device=DEVICE)
    x = torch.randn(1, weight.inputs, device=DEVICE)
    for given in (bias, None):
        torch.testing.assert_close(row_product(x, weight, given), expected(x, weight, given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "group"), CASES)
@pytest.mark.parametrize("splits", [1, 2])
def test_some_rows_equal_the_twin(name: Quantization, group: int, splits: int) -> None:
    weight, bias = weight_of(name, group), torch.randn(OUTPUTS, device=DEVICE)
    x = torch.randn(19, weight.inputs, device=DEVICE)
    tiles = ProductTiles(outputs=32, tokens=16, depth=32, splits=splits, warps=4, stages=2)
    result = tile_product(x, weight, bias, tiles)
    torch.testing.assert_close(result, expected(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "group"), CASES)
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_two_weights_at_once_in_sixteen_bits(name: Quantization, group: int, num_tokens: int) -> None:
    weight, bias = weight_of(name, group, inputs=512), torch.randn(OUTPUTS, device=DEVICE).half()
    x = torch.randn(num_tokens, weight.inputs, device=DEVICE).half()
    tiles = ProductTiles(outputs=32, tokens=16, depth=32, splits=2, warps=4, stages=2)
    result = tile_product(x, weight, bias, tiles).float()
    again = tile_product(x, weight, bias, tiles).float()  # by parts that find their counters as they were
    reference = expected(x.float(), weight, bias.float())
    for found in (result, again):
        torch.testing.assert_close(found, reference, rtol=2e-3, atol=2e-3 * reference.abs().max().item())


@pytest.mark.parametrize(("name", "group"), CASES)
def test_a_weight_written_out_is_the_dequantized_weight(name: Quantization, group: int) -> None:
    weight = weight_of(name, group)
    torch.testing.assert_close(dense(weight, torch.float32), dequantize(weight), rtol=1e-6, atol=0)


@pytest.mark.parametrize("codebook", ["nf4", "bnb_fp4"])
def test_codebooks_without_arithmetic_are_looked_up(codebook: str) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (OUTPUTS, 32), dtype=torch.int32, device=DEVICE)
    scales = torch.rand(OUTPUTS, 4, device=DEVICE)
    weight = QuantizedWeight(codebook, 256, 64, words, scales)  # type: ignore[arg-type]
    x = torch.randn(2, 256, device=DEVICE)
    torch.testing.assert_close(tile_product(x, weight, None), expected(x, weight, None), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(row_product(x[:1], weight, None), expected(x[:1], weight, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", GROUPED)
def test_one_long_row_is_cut_over_programs(monkeypatch: pytest.MonkeyPatch, name: Quantization) -> None:
    weight = weight_of(name, 128, inputs=2048)
    x = torch.randn(1, weight.inputs, device=DEVICE).half()
    monkeypatch.setattr(triton_quant, "LONG_ROW", 1024)
    result = triton_layers.linear(x, weight, None).float()
    reference = expected(x.float(), weight, None)
    torch.testing.assert_close(result, reference, rtol=2e-3, atol=2e-3 * reference.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sym_int4", "int8"])
def test_rows_are_cut_only_where_that_occupies_a_device(name: Quantization, dtype: torch.dtype) -> None:
    for num_tokens in (1, 2, 16, 17, 64, 100, 192):
        for inputs, outputs in ((288, OUTPUTS), (4096, OUTPUTS), (4096, 1 << 17)):
            weight = replace(weight_of(name, 128), inputs=inputs, codes=torch.empty(outputs, 1))
            tiles = product_tiles(weight, num_tokens, dtype)
            assert tiles.splits & (tiles.splits - 1) == 0
            assert tiles.splits == 1 or (inputs >= 4096 and outputs == OUTPUTS)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    weight = weight_of("sym_int4", 128)
    x = torch.randn(9, weight.inputs, device=DEVICE)
    assert torch.equal(tile_product(x, weight, None)[:2], tile_product(x[:2], weight, None))


@pytest.mark.parametrize(
    ("outputs", "most", "expected"),
    [
        # Two projections of a model of 70 billion parameters, 256 MiB of 16 bits at once.
        (8192, 4681, [4096, 8192]),
        (57344, 16384, [14336, 28672, 43008, 57344]),
        (8192, 16384, [8192]),
        # Rounded up to whole units, two pieces are too long for the limit.
        (1000, 511, [256, 512, 768, 1000]),
        (100, 17, [16, 32, 48, 64, 80, 96, 100]),
        (3, 0, [1, 2, 3]),
    ],
)
def test_pieces_of_a_weight_have_columns_that_libraries_multiply_fast(
    outputs: int, most: int, expected: list[int]
) -> None:
    assert triton_quant.piece_ends(outputs, most) == expected


def test_many_rows_go_through_pieces_of_the_written_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = weight_of("asym_int4", 128), torch.randn(OUTPUTS, device=DEVICE)
    x = torch.randn(triton_quant.DENSE_TOKENS, weight.inputs, device=DEVICE)
    whole = triton_layers.linear(x, weight, bias)
    monkeypatch.setattr(triton_quant, "DENSE_BYTES", 16 * weight.inputs * 4)
    torch.testing.assert_close(triton_layers.linear(x, weight, bias), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole, expected(x, weight, bias), rtol=1e-4, atol=1e-4)
