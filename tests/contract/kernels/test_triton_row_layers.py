"""The kernel that computes all layers of one row gives the same result as separate steps."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baton_serve.engine.kernels import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    LayerKernels,
    Linear,
    Norm,
    QuantizedWeight,
    row_kernel,
)
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton.persistent.launch import (
    RowLayers,
    RowPlan,
    depth_of,
    is_taken,
    resident,
    row_layers,
    shape_of,
)
from baton_serve.engine.model.quantized.formats import quantize, scheme
from tests.contract.kernels.triton_batches import DEVICE, random_batch

HIDDEN, LAYERS = 256, 2
needs_device = pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter runs one program after the other")


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    query_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Case:
    layers: list[Layer]
    specs: list[AttentionSpec]
    caches: list[Tensor]
    meta: AttentionMetadata
    rotation: tuple[Tensor, Tensor]
    residual: Tensor
    heads: int
    kv_heads: int
    head_dim: int


def weight_of(outputs: int, inputs: int) -> Linear:
    numbers = (torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5).half()
    made = quantize(numbers, scheme("sym_int4", fp8_dtype="e4m3", group_size=128))
    assert isinstance(made, QuantizedWeight)
    return Linear(made, None)


def norm_of(hidden: int = HIDDEN) -> Norm:
    return Norm((torch.rand(hidden, device=DEVICE) + 0.5).half(), 1e-5)


def case_of(context: int, *, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, size: int = HIDDEN) -> Case:
    batch = random_batch([1], [context], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float16)
    attended, qkv = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    layers = [
        Layer(
            norm_of(size),
            weight_of(qkv, size),
            weight_of(size, attended),
            norm_of(size),
            weight_of(2 * size, size),
            weight_of(size, size),
        )
        for _ in range(LAYERS)
    ]
    angles = torch.rand(1, head_dim // 2, device=DEVICE).repeat(1, 2) * 6.0
    caches = [batch.cache.clone() for _ in range(LAYERS)]
    residual = torch.randn(1, size, device=DEVICE).half()
    specs = [AttentionSpec(head_dim**-0.5)] * LAYERS
    rotation = (angles.cos(), angles.sin())
    return Case(layers, specs, caches, batch.meta, rotation, residual, heads, kv_heads, head_dim)


def apart(case: Case, kernels: LayerKernels, attention: AttentionBackend, caches: list[Tensor]) -> Tensor:
    residual, kv = case.residual.clone(), case.kv_heads
    hidden = kernels.norm_for(residual, case.layers[0].input_norm, case.layers[0].qkv.weight)
    for number, (layer, cache) in enumerate(zip(case.layers, caches, strict=True)):
        heads = kernels.linear(hidden, layer.qkv.weight, None).view(1, -1, case.head_dim)
        query, key, value = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
        kernels.rotary_store(query, key, value, case.rotation, cache, case.meta.slots)
        attended = attention.attend(query, cache, case.meta, case.specs[number]).flatten(1)
        hidden = kernels.linear_norm(attended, layer.output, residual, layer.mlp_norm, layer.gate_up.weight)
        gated = kernels.gated_linear(hidden, layer.gate_up, layer.down.weight)
        after = case.layers[min(number + 1, LAYERS - 1)]
        hidden = kernels.linear_norm(gated, layer.down, residual, after.input_norm, after.qkv.weight)
    return residual


def row_of(case: Case, token_tile: int = 16, max_splits: int = 4) -> RowLayers:
    shape = shape_of(case.layers, case.specs, case.head_dim, case.kv_heads)
    assert shape is not None and depth_of(shape) == 256
    plan = RowPlan(1, 256, token_tile=token_tile, max_splits=max_splits)
    return RowLayers(case.layers, shape, case.specs[0].scale, plan)


@pytest.mark.parametrize(
    ("context", "heads", "kv_heads", "head_dim"), [(1, 4, 2, 64), (40, 4, 2, 64), (150, 2, 1, 128), (33, 1, 1, 256)]
)
def test_one_kernel_computes_what_the_steps_apart_do(context: int, heads: int, kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(context)
    case = case_of(context, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    row, found, caches = row_of(case), case.residual.clone(), [cache.clone() for cache in case.caches]
    for _ in range(2):  # the second time finds the counter as the first one did
        found.copy_(case.residual)
        assert row(found, case.rotation, caches, case.meta)
    twins = [cache.clone() for cache in case.caches]
    wanted = apart(case, reference_layers, ReferenceAttention(), twins)
    added = (wanted - case.residual).float().norm()
    assert float((found - wanted).float().norm() / added) < 5e-3
    for cache, twin in zip(caches, twins, strict=True):
        torch.testing.assert_close(cache, twin, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_programs_that_come_to_further_inputs_make_their_numbers_anew() -> None:
    case = case_of(20, heads=8, size=512)
    shape = shape_of(case.layers, case.specs, case.head_dim, case.kv_heads)
    assert shape is not None
    plan = RowPlan(1, 256, token_tile=16, max_splits=4, down_runs=True)  # two steps a product
    row, found = RowLayers(case.layers, shape, case.specs[0].scale, plan), case.residual.clone()
    assert row(found, case.rotation, [cache.clone() for cache in case.caches], case.meta)
    wanted = apart(case, reference_layers, ReferenceAttention(), [cache.clone() for cache in case.caches])
    assert float((found - wanted).float().norm() / (wanted - case.residual).float().norm()) < 5e-3


@needs_device
@pytest.mark.parametrize(("context", "size"), [(1, 256), (300, 256), (1057, 256), (2100, 4096), (70, 3840)])
def test_all_programs_of_a_device_compute_it_together(context: int, size: int) -> None:
    torch.manual_seed(context)
    case = case_of(context, heads=size // 128 if size > 256 else 8, kv_heads=2, head_dim=128, size=size)
    row = row_layers(case.layers, case.specs, case.head_dim, case.kv_heads)
    if row is None:
        pytest.skip("the device does not say how many programs it runs at once")
    results = []
    for _ in range(3):
        found, caches = case.residual.clone(), [cache.clone() for cache in case.caches]
        assert row(found, case.rotation, caches, case.meta)
        results.append(found)
    wanted = apart(case, reference_layers, ReferenceAttention(), [cache.clone() for cache in case.caches])
    assert float((results[0] - wanted).float().norm() / (wanted - case.residual).float().norm()) < 5e-3
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_only_one_row_over_a_cache_of_numbers_is_taken() -> None:
    case = case_of(5)
    row, two = row_of(case), case.residual.repeat(2, 1)
    assert not row(two, case.rotation, case.caches, case.meta)
    coded = [cache.to(torch.float8_e4m3fn) for cache in case.caches]
    assert not row(case.residual, case.rotation, coded, case.meta)


def test_a_host_has_no_such_kernel() -> None:
    case = case_of(5)
    assert row_kernel(torch.device("cpu"), case.layers, case.specs, case.head_dim, case.kv_heads) is None


def test_layers_of_other_weights_or_rules_are_left_to_the_steps_apart() -> None:
    case = case_of(5)
    given = (case.layers, case.specs, case.head_dim, case.kv_heads)
    assert shape_of(*given) is not None
    assert is_taken(case.layers[0].qkv)
    assert not is_taken(replace(case.layers[0].qkv, bias=torch.zeros(1)))
    sliding = [replace(spec, sliding_window=16) for spec in case.specs]
    assert shape_of(case.layers, sliding, case.head_dim, case.kv_heads) is None
    normed = [replace(layer, query_norm=norm_of()) for layer in case.layers]
    assert shape_of(normed, *given[1:]) is None
    plain = [replace(case.layers[0], down=Linear(torch.zeros(HIDDEN, HIDDEN), None)), case.layers[1]]
    assert shape_of(plain, *given[1:]) is None


def test_programs_that_run_at_once_are_limited_by_registers_and_by_shared_memory() -> None:
    limits = {"warpSize": 32, "max_num_regs": 65536, "max_shared_mem": 232448}
    assert resident(248, 38144, 4, limits) == 2
    assert resident(128, 38144, 4, limits) == 4
    assert resident(32, 100000, 4, limits) == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_after_a_meeting_that_failed_nothing_is_a_number() -> None:
    case = case_of(5)
    shape = shape_of(case.layers, case.specs, case.head_dim, case.kv_heads)
    assert shape is not None
    row = RowLayers(case.layers, shape, 1.0, RowPlan(1, 256, token_tile=16, max_splits=4), None)
    row.state[1:2].view(torch.float32).fill_(float("nan"))  # as a meeting leaves it
    found = case.residual.clone()
    assert row(found, case.rotation, case.caches, case.meta)
    assert bool(found.isnan().all())


def no_number_in_two_stretches(layer: Layer, product: str) -> None:
    """Of one output: what two stretches add to a sum must not cancel out."""
    weight = getattr(layer, product).weight
    weight.scales.view(weight.outputs, -1)[3] = float("nan")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("product", "layer"), [("qkv", 0), ("output", 1), ("gate_up", 1), ("down", 1)])
def test_weights_that_are_no_numbers_show(product: str, layer: int) -> None:
    case = case_of(20, heads=8, size=512)
    shape = shape_of(case.layers, case.specs, case.head_dim, case.kv_heads)
    assert shape is not None
    plan = RowPlan(1, 256, token_tile=16, max_splits=4, down_runs=True)
    row = RowLayers(case.layers, shape, case.specs[0].scale, plan)
    weight = getattr(case.layers[layer], product).weight
    kept, found = weight.scales.clone(), case.residual.clone()
    no_number_in_two_stretches(case.layers[layer], product)
    assert row(found, case.rotation, [cache.clone() for cache in case.caches], case.meta)
    wanted = apart(case, reference_layers, ReferenceAttention(), [cache.clone() for cache in case.caches])
    assert bool(wanted.isnan().any()) and bool(found.isnan().all())
    weight.scales.copy_(kept)  # nothing of it stays
    found.copy_(case.residual)
    assert row(found, case.rotation, [cache.clone() for cache in case.caches], case.meta)
    wanted = apart(case, reference_layers, ReferenceAttention(), [cache.clone() for cache in case.caches])
    assert float((found - wanted).float().norm() / (wanted - case.residual).float().norm()) < 5e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("where", ["input", "keys", "values"])
def test_activations_that_are_no_numbers_show(where: str) -> None:
    case = case_of(40)
    row, found = row_of(case), case.residual.clone()
    if where == "input":
        found[0, 17] = float("inf")
    else:
        block = int(case.meta.block_tables[0, 0])
        case.caches[0][block, ("keys", "values").index(where), :, 3, 5] = float("nan")
    assert row(found, case.rotation, case.caches, case.meta)
    assert bool(found.isnan().all())
