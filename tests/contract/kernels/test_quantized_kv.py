"""K and V in one byte: the twin's rounding, and Triton's store and attention against it."""

import pytest
import torch
from torch import Tensor

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.engine.kernels import AttentionSpec, quantized_kv
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.attention import TritonAttention
from baton_serve.engine.kernels.triton.tiles import DeviceLimits
from tests.contract.kernels.triton_batches import DEVICE, Batch, random_batch

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
SPACING = {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.int8: 2**-6}
"""Between two neighbouring codes, relative to the row's largest element."""
TRITON = TritonAttention(limits=DeviceLimits(8, 65536, descriptors=False))
TWIN = ReferenceAttention()


def coded_cache(batch: Batch, dtype: torch.dtype) -> Tensor:
    """A layer's view of blocks with their scales, holding what `batch.cache` holds."""
    num_blocks, _, kv_heads, block_tokens, head_dim = batch.cache.shape
    layout = KVLayout(
        fingerprint="", num_layers=3, num_kv_heads=kv_heads, block_tokens=block_tokens, head_dim=head_dim, dtype="int8"
    )
    rows = block_tokens + layout.runs[0].shape.scale_rows(layout)
    whole = torch.zeros((num_blocks, 3, 2, kv_heads, rows, head_dim), dtype=torch.uint8, device=DEVICE)
    cache = whole.view(dtype)[:, 1, :, :, :block_tokens]
    content = torch.nan_to_num(batch.cache.float())
    blocks = torch.arange(num_blocks, device=DEVICE).repeat_interleave(block_tokens)
    offsets = torch.arange(block_tokens, device=DEVICE).repeat(num_blocks)
    for plane in (0, 1):
        quantized_kv.write(cache, plane, blocks, offsets, content[blocks, plane, :, offsets])
    return cache


def copy_of(cache: Tensor) -> Tensor:
    storage = torch.tensor([], dtype=torch.uint8, device=DEVICE).set_(cache.untyped_storage()).clone()
    return storage.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())


def everything(cache: Tensor) -> Tensor:
    return quantized_kv.read(cache, torch.arange(cache.shape[0], device=DEVICE))


def assert_nearly_all_equal(left: Tensor, right: Tensor) -> None:
    """The rest lies between two codes, or is one that Triton's interpreter (3.7) rounds wrongly: it loses the carry
    of 127.9 into the next power of two."""
    assert torch.isclose(everything(left), everything(right), rtol=1e-5).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_comes_back_within_its_codes_spacing(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 3, 64) * torch.rand(50, 3, 1) * 1000
    codes, scales = quantized_kv.encode(rows, dtype)
    error = (codes.float() * scales.float()[..., None] - rows).abs().amax(-1)
    assert (error <= rows.abs().amax(-1) * SPACING[dtype] / 2 * 1.05).all()


def test_a_row_of_zeros_stays_one() -> None:
    codes, scales = quantized_kv.encode(torch.zeros(1, 1, 16), torch.int8)
    assert not codes.any() and not scales.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_stores_what_the_twin_stores(dtype: torch.dtype) -> None:
    batch = random_batch([5, 1, 20], [40, 70, 20], heads=4, kv_heads=2, head_dim=16)
    before = coded_cache(batch, dtype)
    by_triton, by_twin = copy_of(before), copy_of(before)
    TRITON.store(batch.key, batch.value, by_triton, batch.meta)
    TWIN.store(batch.key, batch.value, by_twin, batch.meta)
    assert torch.equal(quantized_kv.scales_of(by_triton), quantized_kv.scales_of(by_twin))
    assert_nearly_all_equal(by_triton, by_twin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_store_stores_what_the_twin_stores(dtype: torch.dtype, rotary_dim: int) -> None:
    batch = random_batch([5, 1, 20], [40, 70, 20], heads=4, kv_heads=2, head_dim=16)
    before = coded_cache(batch, dtype)
    by_triton, by_twin = copy_of(before), copy_of(before)
    angle = torch.rand(len(batch.query), rotary_dim, device=DEVICE)
    for kernels, cache in ((triton_layers, by_triton), (reference_layers, by_twin)):
        kernels.rotary_store(
            batch.query.clone(), batch.key, batch.value, (angle.cos(), angle.sin()), cache, batch.meta.slots
        )
    assert torch.equal(quantized_kv.scales_of(by_triton), quantized_kv.scales_of(by_twin))
    assert_nearly_all_equal(by_triton, by_twin)
    assert not torch.equal(everything(by_triton), everything(before))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, where the kernel is interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["store", "rotary_store"])
@pytest.mark.parametrize("plane", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("queries", [[5, 1, 20], [1, 1, 1]])
def test_what_is_no_number_stays_none(dtype: torch.dtype, kernel: str, plane: int, queries: list[int]) -> None:
    batch = random_batch(queries, [40, 70, 20], heads=4, kv_heads=2, head_dim=16)
    cache = coded_cache(batch, dtype)
    (batch.key, batch.value)[plane][queries[0], 1, 3] = float("nan")  # the second sequence's own
    if kernel == "store":
        TRITON.store(batch.key, batch.value, cache, batch.meta)
    else:
        angle = torch.rand(len(batch.query), 8, device=DEVICE)
        query, rotation = batch.query.clone(), (angle.cos(), angle.sin())
        triton_layers.rotary_store(query, batch.key, batch.value, rotation, cache, batch.meta.slots)
    for spec in (AttentionSpec(0.25), AttentionSpec(0.25, softcap=5.0)):
        result = TRITON.attend(batch.query, cache, batch.meta, spec)
        broken = result[queries[0], 2:]
        assert broken.isnan().all(), spec
        assert result[: queries[0]].isfinite().all() and result[queries[0] + queries[1] :].isfinite().all()
        assert result[queries[0], :2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spec", [AttentionSpec(0.25), AttentionSpec(0.25, sliding_window=11), AttentionSpec(0.25, softcap=5.0)]
)
@pytest.mark.parametrize("queries", [[5, 1, 20], [1, 1, 1]])
def test_triton_attends_as_the_twin(dtype: torch.dtype, spec: AttentionSpec, queries: list[int]) -> None:
    batch = random_batch(queries, [40, 70, 20], heads=4, kv_heads=2, head_dim=16)
    cache = coded_cache(batch, dtype)
    result = TRITON.attend(batch.query, cache, batch.meta, spec)
    torch.testing.assert_close(result, TWIN.attend(batch.query, cache, batch.meta, spec), rtol=1e-4, atol=1e-5)


def test_a_context_of_several_splits_is_merged() -> None:
    batch = random_batch([1, 1], [1100, 20], heads=4, kv_heads=2, head_dim=16)
    cache = coded_cache(batch, torch.int8)
    result = TRITON.attend(batch.query, cache, batch.meta, AttentionSpec(0.25))
    expected = TWIN.attend(batch.query, cache, batch.meta, AttentionSpec(0.25))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_float16_queries_keep_the_range_of_small_scales() -> None:
    batch = random_batch([1], [70], heads=4, kv_heads=2, head_dim=16, dtype=torch.float16)
    cache = coded_cache(batch, torch.float8_e4m3fn)
    quantized_kv.scales_of(cache)[:, 1] *= 1e-4
    result = TRITON.attend(batch.query, cache, batch.meta, AttentionSpec(0.25))
    expected = TWIN.attend(batch.query, cache, batch.meta, AttentionSpec(0.25))
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-6)


def test_a_layout_counts_its_scales() -> None:
    layout = KVLayout(fingerprint="", num_layers=2, num_kv_heads=3, block_tokens=64, head_dim=128, dtype="fp8_e4m3")
    assert layout.runs[0].shape.scale_rows(layout) == 1 and layout.block_bytes == 2 * 2 * 3 * 65 * 128
