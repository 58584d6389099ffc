"""Products over integers: activations as two bytes, codes as they are stored, against the plain twins."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_serve.engine.config import Quantization
from baton_serve.engine.kernels import Activations, LayerKernels, Linear, Norm, QuantizedWeight
from baton_serve.engine.kernels.quantized_weights import dequantize
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.activation_digits import GROUP, norm_split, silu_split, split, values_of
from baton_serve.engine.kernels.triton.quant.digit_products import DigitTiles, digit_product, has_nibbles, takes_digits
from baton_serve.engine.model.quantized.formats import quantize, scheme
from tests.contract.kernels.triton_batches import DEVICE

OUTPUTS, INPUTS = 40, 1024
STEP = 1 / 64000  # of a group's largest: half a unit of 32,512


def draw(*shape: int) -> Tensor:
    """Numbers of 16 bits whose groups differ in size."""
    rows = torch.randn(*shape, device=DEVICE)
    return (rows * torch.logspace(-2, 1, shape[-1] // 128, device=DEVICE).repeat_interleave(128)).half()


def weight_of(name: Quantization) -> QuantizedWeight:
    torch.manual_seed(0)
    made = quantize(torch.randn(OUTPUTS, INPUTS, device=DEVICE), scheme(name, fp8_dtype="e4m3", group_size=128))
    assert made is not None
    return made


def assert_split(values: Tensor, wanted: Tensor) -> None:
    largest = wanted.float().view(len(wanted), -1, 128).abs().amax(2).repeat_interleave(128, dim=1)
    assert bool(((values - wanted.float()).abs() <= STEP * largest + 1e-12).all())


@pytest.mark.parametrize("nibbles", [False, True])
def test_activations_become_two_bytes_to_their_groups_precision(nibbles: bool) -> None:
    torch.manual_seed(1)
    x, weight, residual = draw(3, 384), torch.rand(384, device=DEVICE).half(), draw(3, 384)
    assert_split(values_of(split(x, nibbles=nibbles)), x)
    twins = residual.clone()
    wanted = reference_layers.rms_norm(x, weight, 1e-5, residual=twins)
    values = values_of(norm_split(x, weight, 1e-5, residual=residual, nibbles=nibbles))
    torch.testing.assert_close(values, wanted.float(), rtol=2e-3, atol=1e-3)  # one step of 16 bits
    assert torch.equal(residual, twins)
    gate_up = draw(3, 768)
    values = values_of(silu_split(gate_up, nibbles=nibbles))
    torch.testing.assert_close(values, reference_layers.silu_mul(gate_up).float(), rtol=2e-3, atol=1e-3)


def test_a_group_whose_halves_round_up_together_stays_within_two_bytes() -> None:
    x = torch.arange(128, device=DEVICE, dtype=torch.float32).mul(256).add(128).div(32768).half()[None]
    assert_split(values_of(split(x, nibbles=False)), x)
    assert_split(values_of(split(-x, nibbles=True)), -x)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, where the kernel is interpreted
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(broken: float) -> None:
    weight = weight_of("sym_int4")
    x = draw(2, INPUTS)
    x[0, 5] = broken
    digits = split(x, nibbles=True)
    assert values_of(digits)[0, :GROUP].isnan().all() and values_of(digits)[:, GROUP:].isfinite().all()
    product = digit_product(digits, weight, None)
    assert product[0].isnan().all() and product[1].isfinite().all()


@pytest.mark.parametrize("name", ["sym_int4", "asym_int4", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_products_equal_the_twins(name: Quantization, num_tokens: int) -> None:
    weight, bias = weight_of(name), torch.randn(OUTPUTS, device=DEVICE).half()
    x = draw(num_tokens, INPUTS)
    assert takes_digits(weight, num_tokens, x.dtype) == (name != "int8")
    digits = split(x, nibbles=has_nibbles(weight))
    wanted = torch.nn.functional.linear(values_of(digits), dequantize(weight), bias.float())
    allowed = 1e-3 * float(wanted.abs().max())  # the result's own rounding
    torch.testing.assert_close(digit_product(digits, weight, bias).float(), wanted, rtol=1e-3, atol=allowed)
    for unroll in (1, 2):  # twice by parts, which find their counters as they were
        result = digit_product(digits, weight, bias, DigitTiles(32, splits=4, unroll=unroll, warps=4, stages=2))
        torch.testing.assert_close(result.float(), wanted, rtol=1e-3, atol=allowed)


@pytest.mark.parametrize("name", ["sym_int4", "int8"])
def test_wide_groups_and_zeros_of_a_checkpoint(name: Quantization) -> None:
    weight = weight_of(name)
    scales = torch.rand(OUTPUTS, 4, device=DEVICE)
    zeros = torch.randint(0, 12, (OUTPUTS, 4), device=DEVICE).float()
    if weight.codebook == "int4":
        weight = replace(weight, codebook="uint4")
    weight = replace(weight, group=256, scales=scales, zeros=zeros)
    digits = split(draw(2, INPUTS), nibbles=has_nibbles(weight))
    wanted = torch.nn.functional.linear(values_of(digits), dequantize(weight))
    result = digit_product(digits, weight, None).float()
    torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["sym_int4", "fp8_e4m3"])
def test_norms_and_gates_make_what_the_next_product_reads(name: Quantization) -> None:
    first, second = weight_of(name), Linear(weight_of(name).rows(0, OUTPUTS), None)
    norm = Norm(torch.rand(INPUTS, device=DEVICE).half(), 1e-5)
    x, residual = draw(2, INPUTS), draw(2, INPUTS)
    twins = residual.clone()

    def product(kernels: LayerKernels, activations: Activations) -> Tensor:
        return kernels.linear(activations, second.weight, None).float()

    wanted = product(reference_layers, reference_layers.norm_for(x, norm, first, residual=twins))
    made = triton_layers.norm_for(x, norm, first, residual=residual)
    assert isinstance(made, Tensor) == (name == "fp8_e4m3")
    torch.testing.assert_close(product(triton_layers, made), wanted, rtol=4e-3, atol=4e-3 * float(wanted.abs().max()))
    assert torch.equal(residual, twins)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp6", "mxfp4"])
def test_codes_that_are_no_integers_take_no_digits(name: Quantization) -> None:
    assert not takes_digits(weight_of(name), 1, torch.float16)
    assert not takes_digits(weight_of("int8"), 1, torch.float32)
