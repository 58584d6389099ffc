"""Routing and grouped products against their plain-torch twins."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_serve.engine.config import Quantization
from baton_serve.engine.kernels import Experts, StackedWeight
from baton_serve.engine.kernels.reference import experts as reference_experts
from baton_serve.engine.kernels.triton import experts as triton_experts
from baton_serve.engine.kernels.triton import experts_row, experts_sorted
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.model.quantized.formats import quantize, scheme
from tests.contract.kernels.triton_batches import DEVICE

EXPERTS, HIDDEN, WIDTH = 6, 40, 24


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def make_experts(*, like_gpt_oss: bool, dtype: torch.dtype = torch.float32) -> Experts:
    torch.manual_seed(0)
    return Experts(
        gate_up=draw(EXPERTS, 2 * WIDTH, HIDDEN).to(dtype),
        down=draw(EXPERTS, HIDDEN, WIDTH).to(dtype),
        gate_up_bias=draw(EXPERTS, 2 * WIDTH).to(dtype) if like_gpt_oss else None,
        down_bias=draw(EXPERTS, HIDDEN).to(dtype) if like_gpt_oss else None,
        is_interleaved=like_gpt_oss,
        limit=3.0 if like_gpt_oss else None,
        alpha=1.702 if like_gpt_oss else 1.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_experts", [6, 32])
@pytest.mark.parametrize("renormalize", [False, True])
def test_each_token_is_routed_to_its_likeliest_experts(num_experts: int, renormalize: bool, dtype: torch.dtype) -> None:
    # No two logits of a token are equal, nor are their likelihoods.
    logits = torch.rand(7, num_experts, device=DEVICE).argsort(1).to(dtype) / 4 - 3
    logits[0] = 0.0
    logits[0, 3], logits[0, 5] = 1000.0, 992.0
    weights, chosen = triton_experts.route(logits, 3, renormalize=renormalize)
    twin_weights, twin_chosen = reference_experts.route(logits, 3, renormalize=renormalize)
    torch.testing.assert_close(weights, twin_weights)
    assert chosen[1:].tolist() == twin_chosen[1:].tolist()
    assert chosen[0, :2].tolist() == [3, 5]
    assert len(set(chosen[0].tolist())) == 3, "an expert was chosen twice"


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_token_without_finite_logits_leaves_the_others_alone(broken: float, dtype: torch.dtype) -> None:
    experts, x, logits = make_experts(like_gpt_oss=False), draw(7, HIDDEN), draw(7, EXPERTS).to(dtype)
    wanted = triton_experts.mix(x, *triton_experts.route(logits, 3, renormalize=True), experts)
    logits[2:5] = broken
    weights, chosen = triton_experts.route(logits, 3, renormalize=True)
    assert all(len(set(row)) == 3 and set(row) <= set(range(EXPERTS)) for row in chosen.tolist())
    found = triton_experts.mix(x, weights, chosen, experts)
    others = [0, 1, 5, 6]
    assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize(("num_shared", "has_gate"), [(1, True), (2, False)])
def test_experts_of_all_tokens_stand_behind_the_chosen_ones(num_shared: int, has_gate: bool) -> None:
    logits = draw(7, EXPERTS + has_gate)
    (weights, chosen), (twin_weights, twin_chosen) = (
        module.route(logits, 3, renormalize=True, num_shared=num_shared, has_gate=has_gate)
        for module in (triton_experts, reference_experts)
    )
    torch.testing.assert_close(weights, twin_weights)
    assert chosen.tolist() == twin_chosen.tolist()
    assert chosen[:, 3:].tolist() == [list(range(EXPERTS, EXPERTS + num_shared))] * 7


@pytest.mark.parametrize("like_gpt_oss", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 37])
def test_mixed_experts_equal_their_twin(num_tokens: int, like_gpt_oss: bool) -> None:
    experts = make_experts(like_gpt_oss=like_gpt_oss)
    x, logits = draw(num_tokens, HIDDEN), draw(num_tokens, EXPERTS)
    logits[:, 2] = -50.0  # nobody's choice
    logits[:, 4] = 50.0  # everybody's
    weights, chosen = reference_experts.route(logits, 2, renormalize=True)
    torch.testing.assert_close(
        triton_experts.mix(x, weights, chosen, experts),
        reference_experts.mix(x, weights, chosen, experts),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_experts_of_other_ranks_add_nothing(num_tokens: int) -> None:
    whole = make_experts(like_gpt_oss=False)
    assert isinstance(whole.gate_up, Tensor) and isinstance(whole.down, Tensor)
    x = draw(num_tokens, HIDDEN)
    weights, chosen = reference_experts.route(draw(num_tokens, EXPERTS), 4, renormalize=True)
    wanted, found = reference_experts.mix(x, weights, chosen, whole), torch.zeros_like(x)
    for first in range(0, EXPERTS, 2):
        own = Experts(whole.gate_up[first : first + 2], whole.down[first : first + 2], is_part=True)
        numbers = torch.where((chosen >= first) & (chosen < first + 2), chosen - first, 2)
        part = triton_experts.mix(x, weights, numbers, own)
        torch.testing.assert_close(part, reference_experts.mix(x, weights, numbers, own), rtol=1e-4, atol=1e-4)
        found += part
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_rows_of_one_expert_span_several_blocks_in_half_precision() -> None:
    experts = make_experts(like_gpt_oss=False, dtype=torch.float16)
    x, logits = draw(100, HIDDEN).half(), draw(100, EXPERTS)
    logits[:, 1] = 50.0
    weights, chosen = reference_experts.route(logits, 2, renormalize=False)
    mixed = triton_experts.mix(x, weights, chosen, experts)
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    wide = Experts(experts.gate_up.float(), experts.down.float())
    expected = reference_experts.mix(x.float(), weights, chosen, wide)
    torch.testing.assert_close(mixed.float(), expected, rtol=3e-2, atol=0.02 * float(expected.abs().max()))


def test_one_token_equals_the_rows_of_many() -> None:
    experts = make_experts(like_gpt_oss=False, dtype=torch.float16)
    x, logits = draw(5, HIDDEN).half(), draw(5, EXPERTS)
    weights, chosen = triton_experts.route(logits, 3, renormalize=True)
    many = triton_experts.mix(x, weights, chosen, experts).float()
    assert experts_row.fits(x[:1], experts) and not experts_row.fits(x, experts)
    for row in range(5):
        part = slice(row, row + 1)
        alone = triton_experts.mix(x[part], weights[part], chosen[part], experts).float()
        torch.testing.assert_close(alone, many[part], rtol=3e-2, atol=0.02 * float(many.abs().max()))


@pytest.mark.parametrize("part", [0, 1], ids=["gate", "up"])
def test_what_is_no_number_goes_through_the_clamp(part: int) -> None:
    experts = make_experts(like_gpt_oss=True, dtype=torch.float32)
    assert isinstance(experts.gate_up, Tensor)
    experts.gate_up[1, 2 + part, 0] = float("nan")
    x, logits = draw(9, HIDDEN), draw(9, EXPERTS)
    weights, chosen = reference_experts.route(logits, 2, renormalize=True)
    expected = reference_experts.mix(x, weights, chosen, experts).isnan()
    assert expected.any() and not expected.all()
    assert torch.equal(triton_experts.mix(x, weights, chosen, experts).isnan(), expected)


# Rows that are not stored may be computed from memory that nothing has written.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("is_part", [False, True])
def test_products_of_sorted_rows_equal_their_twin(monkeypatch: pytest.MonkeyPatch, is_part: bool) -> None:
    tiles = experts_sorted.SortedTiles(rows=16, columns=16, depth=16, warps=4, stages=1)
    monkeypatch.setattr(experts_sorted, "GATE_UP_TILES", tiles)
    monkeypatch.setattr(experts_sorted, "DOWN_TILES", replace(tiles, columns=32))
    monkeypatch.setattr(experts_sorted, "MIN_ROWS", 16)
    # The interpreter loads tiles by descriptors too, but the product does not choose them there.
    monkeypatch.setattr(experts_sorted, "_has_descriptors", lambda device: True)
    torch.manual_seed(0)
    num_tokens, hidden, width = 90, 64, 32
    whole = Experts(draw(EXPERTS, 2 * width, hidden).half() / 8, draw(EXPERTS, hidden, width).half() / 6)
    x, logits = draw(num_tokens, hidden).half(), draw(num_tokens, EXPERTS)
    logits[:, 1], logits[:, 4] = -50.0, 50.0  # nobody's choice and everybody's
    weights, chosen = reference_experts.route(logits, 3, renormalize=True)
    experts = replace(whole, is_part=is_part)
    if is_part:  # the last two experts are on another rank
        assert isinstance(whole.gate_up, Tensor) and isinstance(whole.down, Tensor)
        experts = Experts(whole.gate_up[:4], whole.down[:4], is_part=True)
        chosen = torch.where(chosen < 4, chosen, 4)
    assert experts_sorted.fits(x, experts, chosen.numel())
    monkeypatch.setattr(triton_experts, "assign_kernel", None)  # the other products must not be taken
    mixed = triton_experts.mix(x, weights, chosen, experts)
    torch.testing.assert_close(mixed, reference_experts.mix(x, weights, chosen, experts), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_pairs", [1, 63, 64, 300])
def test_sorted_pairs_are_in_the_order_of_their_experts(num_pairs: int) -> None:
    torch.manual_seed(0)
    chosen = torch.randint(0, EXPERTS, (num_pairs, 1), dtype=torch.int32, device=DEVICE)
    chosen[chosen == 2] = 3  # nobody's choice
    found = experts_sorted.sort_pairs(chosen, EXPERTS, block_rows=16)
    assert found.order.tolist() == chosen.flatten().argsort(stable=True).tolist()
    experts, firsts, ends = (part.tolist() for part in found.blocks)
    counts, rows = chosen.flatten().bincount(minlength=EXPERTS).tolist(), list[tuple[int, int]]()
    for expert, first, end in zip(experts, firsts, ends, strict=True):
        if expert < EXPERTS:
            rows += [(expert, row) for row in range(first, min(first + 16, end))]
    assert rows == [(expert, sum(counts[:expert]) + n) for expert, count in enumerate(counts) for n in range(count)]


def test_products_of_sorted_rows_are_for_many_rows_of_plain_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_sorted, "_has_descriptors", lambda device: True)
    x, plain = torch.empty(4, 512).half(), Experts(torch.empty(2, 1024, 512).half(), torch.empty(2, 512, 512).half())
    many = 2 * experts_sorted.MIN_ROWS
    assert experts_sorted.fits(x, plain, many)
    assert not experts_sorted.fits(x, plain, many - 1)
    assert not experts_sorted.fits(x.float(), plain, many)
    assert not experts_sorted.fits(x, replace(plain, limit=3.0), many)
    assert not experts_sorted.fits(x[:, :500], plain, many), "no multiple of the tiles"
    monkeypatch.setattr(experts_sorted, "_has_descriptors", lambda device: False)
    assert not experts_sorted.fits(x, plain, many)


def test_tiles_fit_the_shared_memory_of_small_devices() -> None:
    for element_bytes in (2, 4):
        for pairs in (8, 256, 2048, 5000, 65536):
            gate_up, down = triton_experts.expert_tiles(pairs, 128, element_bytes)
            assert (gate_up.rows + 2 * gate_up.columns) * gate_up.depth * element_bytes * gate_up.stages <= 100 << 10
            assert (down.rows + down.columns) * down.depth * element_bytes * down.stages <= 100 << 10


@pytest.mark.parametrize("name", ["sym_int4", "asym_int4", "fp6", "mxfp4", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("like_gpt_oss", [False, True])
def test_experts_in_few_bits_equal_their_twin(name: Quantization, like_gpt_oss: bool) -> None:
    torch.manual_seed(0)
    hidden, width, tokens = 96, 64, 7
    how = scheme(name, fp8_dtype="e4m3", group_size=32)

    def stack(outputs: int, inputs: int) -> StackedWeight:
        made = quantize(draw(EXPERTS * outputs, inputs), how)
        assert made is not None
        return StackedWeight(made, EXPERTS)

    experts = Experts(
        gate_up=stack(2 * width, hidden),
        down=stack(hidden, width),
        gate_up_bias=draw(EXPERTS, 2 * width) if like_gpt_oss else None,
        down_bias=draw(EXPERTS, hidden) if like_gpt_oss else None,
        is_interleaved=like_gpt_oss,
        limit=3.0 if like_gpt_oss else None,
    )
    x = draw(tokens, hidden)
    weights, chosen = reference_experts.route(draw(tokens, EXPERTS), 2, renormalize=True)
    wanted = reference_experts.mix(x, weights, chosen, experts)
    result = triton_layers.mix(x, weights, chosen, experts)
    torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    # Some of the experts are on another rank.
    part, elsewhere = replace(experts, is_part=True), torch.where(chosen < 3, chosen, EXPERTS)
    wanted = reference_experts.mix(x, weights, elsewhere, part)
    result = triton_layers.mix(x, weights, elsewhere, part)
    torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
