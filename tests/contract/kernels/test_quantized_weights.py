"""Weights in few bits: packing, rounding, and the plain twin that says what every kernel must give."""

import pytest
import torch

from baton_serve.engine.config import Quantization
from baton_serve.engine.kernels import quantized_weights
from baton_serve.engine.kernels.quantized_weights import (
    code_values,
    dequantize,
    dequantize_rows,
    pack_codes,
    unpack_codes,
)
from baton_serve.engine.model.quantized.formats import Scheme, quantize, scheme

WORST = {
    "fp8_e4m3": 0.03,
    "fp8_e5m2": 0.06,
    "int8": 0.01,
    "sym_int4": 0.11,
    "asym_int4": 0.11,
    "fp6": 0.03,
    "mxfp4": 0.12,
}
"""Root mean square error of normal weights, relative: a little above what each format's spacing costs."""


def scheme_of(name: Quantization, group: int = 128) -> Scheme:
    return scheme(name, fp8_dtype="e4m3", group_size=group)


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("inputs", [1, 128, 300])
def test_packed_codes_come_back(bits: int, inputs: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, inputs), dtype=torch.uint8)
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits)[:, :inputs], codes)


def test_words_hold_16_neighbours_per_nibble() -> None:
    codes = torch.zeros(1, 128, dtype=torch.uint8)
    codes[0, 16 * 3 + 5] = 9
    words = pack_codes(codes, 4)
    assert words.nonzero().tolist() == [[0, 5]] and int(words[0, 5]) == 9 << 12


@pytest.mark.parametrize("name", sorted(WORST))
def test_rounding_costs_what_the_format_must_cost(name: Quantization) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 640)
    made = quantize(weight, scheme_of(name))
    assert made is not None
    error = (dequantize(made) - weight).pow(2).mean().sqrt() / weight.pow(2).mean().sqrt()
    assert error < WORST[name]


@pytest.mark.parametrize("name", sorted(WORST))
def test_what_a_format_can_say_it_says_exactly(name: Quantization) -> None:
    how = scheme_of(name, 32)
    values = code_values(how.codebook) if name not in ("int8", "fp8_e4m3", "fp8_e5m2") else (-1.0, 0.0, 0.5, 1.0)
    bound = 448.0 if name.startswith("fp8") else 127.0 if name == "int8" else 1.0
    weight = torch.tensor(values).repeat(64)[:64][None] * (bound if bound > 1 and name != "int8" else 1.0)
    if name == "int8":
        weight = weight.sign() * 127.0
    made = quantize(weight, how)
    assert made is not None and torch.equal(dequantize(made), weight)


def test_a_smaller_group_fits_where_a_larger_does_not() -> None:
    made = quantize(torch.randn(4, 192), scheme_of("sym_int4", 128))
    assert made is not None and made.group == 64 and made.scales.shape == (4, 3)
    assert quantize(torch.randn(4, 50), scheme_of("sym_int4")) is None


def test_zeros_stay_zeros() -> None:
    for name in WORST:
        made = quantize(torch.zeros(2, 64), scheme_of(name))  # type: ignore[arg-type]
        assert made is not None and not dequantize(made).any()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "sym_int4", "asym_int4"])
def test_rows_of_an_embedding_are_the_rows_of_the_whole(name: Quantization) -> None:
    made = quantize(torch.randn(20, 64), scheme_of(name))
    assert made is not None
    rows = torch.tensor([3, 19, 3])
    assert torch.equal(dequantize_rows(made, rows, torch.float32), dequantize(made)[rows])


def test_the_twin_multiplies_by_the_dequantized_weight() -> None:
    made = quantize(torch.randn(8, 64), scheme_of("asym_int4"))
    assert made is not None
    x, bias = torch.randn(3, 64), torch.randn(8)
    torch.testing.assert_close(quantized_weights.linear(x, made, bias), x @ dequantize(made).t() + bias)
