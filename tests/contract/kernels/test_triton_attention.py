"""Every kernel against its plain-torch twin: in Triton's interpreter on a CPU, for real where there is a device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels import AttentionSpec, quantized_kv
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton import latent
from baton_serve.engine.kernels.triton.attention import TritonAttention
from baton_serve.engine.kernels.triton.decode import decode
from baton_serve.engine.kernels.triton.kv_store import store
from baton_serve.engine.kernels.triton.prefill import prefill
from baton_serve.engine.kernels.triton.tiles import DecodeTiles, DeviceLimits, PrefillTiles, latent_tiles
from tests.contract.kernels.triton_batches import BLOCK_TOKENS, DEVICE, Batch, random_batch

PLAIN = AttentionSpec(0.3)
# The interpreter multiplies the bits of bfloat16 as integers.
SHORT = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
SINKS = torch.linspace(-1, 2, 3, device=DEVICE)
EVERY_RULE = AttentionSpec(0.3, sliding_window=21, softcap=2.0, sinks=SINKS)
DECODING = DecodeTiles(tile=16, min_split=32, max_splits=4, programs=5, warps=4, stages=2)
PREFILLING = PrefillTiles(rows=16, tile=16, warps=4, stages=2, descriptors=False, paired=False)


def decoded(batch: Batch, spec: AttentionSpec, tiles: DecodeTiles) -> Tensor:
    """NaN where nothing was written."""
    output = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    decode(output, batch.query, batch.cache, batch.meta, spec, tiles)
    return output


def prefilled(batch: Batch, spec: AttentionSpec, tiles: PrefillTiles, *, skip_singles: bool = False) -> Tensor:
    output = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    prefill(output, batch.query, batch.cache, batch.meta, spec, tiles, skip_singles=skip_singles)
    return output


def twin(batch: Batch, spec: AttentionSpec) -> Tensor:
    return ReferenceAttention().attend(batch.query, batch.cache, batch.meta, spec)


@pytest.mark.parametrize("spec", [PLAIN, EVERY_RULE], ids=["plain", "every rule"])
def test_decode_equals_its_twin_with_one_split_and_with_many(spec: AttentionSpec) -> None:
    batch = random_batch([1, 1, 1, 1], [1, 30, 65, 100])  # 65: no whole number of splits
    torch.testing.assert_close(decoded(batch, spec, DECODING), twin(batch, spec))


def test_decode_of_a_sequence_does_not_depend_on_its_neighbours() -> None:
    batch = random_batch([1, 1, 1], [1, 40, 70])
    together = decoded(batch, PLAIN, DECODING)
    meta = batch.meta
    alone = replace(
        meta,
        query_starts=meta.query_starts[:2],
        context_lens=meta.context_lens[2:],
        block_tables=meta.block_tables[2:],
        slots=meta.slots[2:],
    )
    lonely = decoded(replace(batch, query=batch.query[2:], meta=alone), PLAIN, replace(DECODING, programs=64))
    assert torch.equal(lonely[0], together[2])


def test_decode_leaves_sequences_with_other_than_one_new_token_alone() -> None:
    output = decoded(random_batch([2, 1, 0], [5, 9, 7]), PLAIN, DECODING)
    assert output[:2].isnan().all()
    assert not output[2].isnan().any()


def test_decode_skips_the_padding_sequences_of_a_captured_graph() -> None:
    batch = random_batch([1, 1], [9, 5])
    batch.meta.context_lens[1] = 0
    assert decoded(batch, PLAIN, DECODING)[1].isnan().all()


def test_a_tile_wider_than_a_block_gathers_from_several() -> None:
    batch = random_batch([1, 1], [19, 50])
    wide = replace(DECODING, tile=32)
    torch.testing.assert_close(decoded(batch, PLAIN, wide), twin(batch, PLAIN))
    chunks = random_batch([7], [27])
    torch.testing.assert_close(prefilled(chunks, PLAIN, replace(PREFILLING, tile=32)), twin(chunks, PLAIN))


@pytest.mark.parametrize("spec", [PLAIN, EVERY_RULE], ids=["plain", "every rule"])
@pytest.mark.parametrize("are_described", [False, True], ids=["pointers", "descriptors"])
def test_prefill_equals_its_twin_with_and_without_a_cached_prefix(spec: AttentionSpec, are_described: bool) -> None:
    batch = random_batch([3, 0, 11, 1], [3, 9, 43, 17])
    output = prefilled(batch, spec, replace(PREFILLING, descriptors=are_described))
    torch.testing.assert_close(output, twin(batch, spec))


def test_prefill_of_a_long_plain_span_takes_tiles_in_pairs() -> None:
    batch = random_batch([5, 5], [41, 70])
    paired = replace(PREFILLING, descriptors=True, paired=True)
    torch.testing.assert_close(prefilled(batch, PLAIN, paired), twin(batch, PLAIN))


@pytest.mark.parametrize("are_described", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("spec", [PLAIN, EVERY_RULE], ids=["plain", "every rule"])
def test_prefill_with_values_in_parts_equals_its_twin(spec: AttentionSpec, head_dim: int, are_described: bool) -> None:
    batch = random_batch([40, 13, 1], [40, 50, 30], head_dim=head_dim)
    tiles = replace(PREFILLING, parts=2, descriptors=are_described)
    torch.testing.assert_close(prefilled(batch, spec, tiles), twin(batch, spec))


@pytest.mark.parametrize("head_dim", [8, 20, 40])
def test_head_sizes_that_are_small_or_no_power_of_two_are_padded(head_dim: int) -> None:
    batch = random_batch([2, 1], [18, 40], head_dim=head_dim, heads=4, kv_heads=2)
    tiles = replace(PREFILLING, descriptors=True)
    output = prefilled(batch, PLAIN, tiles, skip_singles=True)
    assert output[2].isnan().all()
    output[2] = decoded(batch, PLAIN, DECODING)[2]
    torch.testing.assert_close(output, twin(batch, PLAIN))


def test_half_precision_stays_within_its_rounding() -> None:
    batch = random_batch([4, 1], [20, 50], dtype=torch.float16)
    output = attention().attend(batch.query, batch.cache, batch.meta, PLAIN)
    torch.testing.assert_close(output, twin(batch, PLAIN), atol=2e-3, rtol=2e-3)


def test_a_mixed_batch_goes_through_both_kernels() -> None:
    batch = random_batch([1, 5, 1], [33, 12, 6])
    output = attention().attend(batch.query, batch.cache, batch.meta, PLAIN)
    torch.testing.assert_close(output, twin(batch, PLAIN))


def test_store_writes_each_token_to_its_slot_and_skips_negative_slots() -> None:
    batch = random_batch([3, 2], [20, 5])
    ours, theirs = batch.cache.clone(), batch.cache.clone()
    ReferenceAttention().store(batch.key, batch.value, theirs, batch.meta)
    attention().store(batch.key, batch.value, ours, batch.meta)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    store(batch.key * 0, batch.value, ours, torch.full_like(batch.meta.slots, -1))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shared_kb", [227, 128, 64])
@pytest.mark.parametrize("spec", [PLAIN, EVERY_RULE], ids=["plain", "every rule"])
def test_wide_heads_are_computed_by_the_kernels(
    spec: AttentionSpec, shared_kb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = DeviceLimits(processors=20, shared_bytes=shared_kb << 10, descriptors=False)
    batch = random_batch([1, 19, 1], [70, 40, 5], head_dim=512, dtype=SHORT)
    expected = twin(batch, spec)
    backend = TritonAttention(limits=limits)
    monkeypatch.setattr(backend, "_twin", None)
    found = backend.attend(batch.query, batch.cache, batch.meta, spec)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_heads_for_which_a_device_has_too_little_memory_are_left_to_the_twin() -> None:
    small = TritonAttention(limits=DeviceLimits(processors=20, shared_bytes=64 << 10, descriptors=False))
    batch = random_batch([1, 3], [20, 35], head_dim=512)
    torch.testing.assert_close(small.attend(batch.query, batch.cache, batch.meta, PLAIN), twin(batch, PLAIN))


@pytest.mark.parametrize("head_dim", [16, 288])
def test_one_plane_serves_as_keys_and_values(head_dim: int) -> None:
    batch = random_batch([3, 1], [20, 35], head_dim=head_dim)
    shared = replace(batch, cache=batch.cache[:, :1].contiguous().expand(-1, 2, -1, -1, -1))
    attention().store(batch.key, batch.key, shared.cache, batch.meta)
    output = attention().attend(shared.query, shared.cache, shared.meta, PLAIN)
    separate = replace(batch, cache=shared.cache.contiguous())
    torch.testing.assert_close(output, twin(separate, PLAIN))


def latent_batch(
    queries: list[int],
    contexts: list[int],
    *,
    heads: int = 3,
    head_dim: int = 48,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """A batch whose cache holds latents, in one plane."""
    batch = random_batch(queries, contexts, heads=heads, head_dim=head_dim, dtype=dtype)
    return replace(batch, cache=batch.cache[:, :1].contiguous().expand(-1, 2, -1, -1, -1))


LATENT = AttentionSpec(0.3, value_dim=32)


@pytest.mark.parametrize(
    ("spec", "heads", "head_dim"),
    [(LATENT, 3, 48), (replace(LATENT, softcap=2.0), 20, 40), (replace(LATENT, value_dim=24), 70, 33)],
)
def test_latents_give_what_the_twin_gives_in_mixed_batches(spec: AttentionSpec, heads: int, head_dim: int) -> None:
    batch = latent_batch([1, 7, 1, 0, 2], [130, 43, 5, 9, 2], heads=heads, head_dim=head_dim)
    output = attention().attend(batch.query, batch.cache, batch.meta, spec)
    assert output.shape == (11, heads, spec.value_dim)
    torch.testing.assert_close(output, twin(batch, spec))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [3, 20])
def test_prompts_of_large_latents_are_computed_in_halves(heads: int, softcap: float | None) -> None:
    spec = AttentionSpec(0.05, value_dim=512, softcap=softcap)
    batch = latent_batch([1, 70, 30, 0], [40, 90, 30, 2], heads=heads, head_dim=576, dtype=SHORT)
    limits = DeviceLimits(processors=20, shared_bytes=227 << 10, descriptors=True)
    assert latent_tiles(limits, 1152, 4, BLOCK_TOKENS, are_halved=True)[1].parts == 2
    output = TritonAttention(DEVICE, limits=limits).attend(batch.query, batch.cache, batch.meta, spec)
    torch.testing.assert_close(output, twin(batch, spec), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("row_size", "value_dim", "element_bytes", "are_aligned"),
    [(576, 512, 2, True), (576, 512, 1, True), (33, 24, 4, False), (40, 32, 2, True), (40, 30, 2, False)],
)
def test_kernels_of_latents_get_rows_that_begin_at_whole_vectors(
    row_size: int, value_dim: int, element_bytes: int, are_aligned: bool
) -> None:
    assert latent.rows_are_aligned(row_size, value_dim, element_bytes) == are_aligned


def test_a_latent_context_of_many_splits_equals_the_twin() -> None:
    batch = latent_batch([1, 1], [300, 17])
    output = attention().attend(batch.query, batch.cache, batch.meta, LATENT)
    torch.testing.assert_close(output, twin(batch, LATENT))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_latents_in_codes_equal_the_twin(dtype: torch.dtype) -> None:
    batch = latent_batch([1, 5], [70, 20])
    blocks, offsets = (~batch.cache[:, 0, 0].isnan().any(-1)).nonzero().T
    rows = BLOCK_TOKENS + -(-2 * BLOCK_TOKENS // 48)
    memory = []
    for backend in (attention(), ReferenceAttention()):
        whole = torch.zeros(len(batch.cache), 1, 1, rows, 48, dtype=torch.uint8, device=DEVICE)
        cache = whole.view(dtype)[:, :, :, :BLOCK_TOKENS].expand(-1, 2, -1, -1, -1)
        quantized_kv.write(cache, 0, blocks, offsets, batch.cache[blocks, 0, :, offsets])
        backend.store(batch.key, batch.key, cache, batch.meta)
        memory.append(whole)
    assert (memory[0] == memory[1]).float().mean() > 0.99  # Triton's interpreter rounds a few float8 otherwise
    output = attention().attend(batch.query, cache, batch.meta, LATENT)
    torch.testing.assert_close(output, twin(replace(batch, cache=cache), LATENT), atol=2e-3, rtol=2e-3)


def test_alibi_lowers_what_is_far() -> None:
    batch = random_batch([3, 1], [20, 35])
    slopes = torch.tensor([0.5, 0.25, 0.125], device=DEVICE)
    output = attention().attend(batch.query, batch.cache, batch.meta, replace(PLAIN, alibi=slopes))
    torch.testing.assert_close(output, twin(batch, replace(PLAIN, alibi=slopes)))
    assert not torch.allclose(output, twin(batch, PLAIN))


@pytest.mark.parametrize("has_singles", [False, True])
def test_a_captured_step_has_tokens_and_sequences_beyond_its_own(has_singles: bool) -> None:
    queries, contexts = ([3, 1, 7], [3, 20, 40]) if has_singles else ([3, 11], [3, 43])
    batch = random_batch(queries, contexts)
    padding, num_tokens = 4, len(batch.query) + 5
    meta = replace(
        batch.meta,
        query_starts=functional.pad(batch.meta.query_starts, (0, padding), value=len(batch.query)),
        context_lens=functional.pad(batch.meta.context_lens, (0, padding)),
        block_tables=functional.pad(batch.meta.block_tables, (0, 0, 0, padding)),
        max_query_len=num_tokens,
        max_context_len=64,
        has_singles=has_singles,
    )
    query = functional.pad(batch.query, (0, 0, 0, 0, 0, 5))
    output = attention().attend(query, batch.cache, meta, PLAIN)
    torch.testing.assert_close(output[: len(batch.query)], twin(batch, PLAIN))


def attention() -> TritonAttention:
    limits = DeviceLimits(processors=4, shared_bytes=1 << 15, descriptors=True)
    return TritonAttention(DEVICE, limits=limits)


@pytest.mark.parametrize("other", [48, 40], ids=["whole rows", "parts of rows"])
def test_layers_of_other_head_sizes_may_share_the_blocks(other: int) -> None:
    """The layer's heads have 16 elements, and the elements of another layer follow in each block."""
    batch, triton = random_batch([1, 5], [30, 9]), TritonAttention(limits=DeviceLimits(8, 65536, descriptors=False))
    own = batch.cache[0].numel()
    blocks = torch.full((len(batch.cache), own + other), float("nan"), device=DEVICE)
    cache = blocks[:, :own].view(batch.cache.shape)
    cache.copy_(batch.cache)
    triton.store(batch.key, batch.value, cache, batch.meta)
    ReferenceAttention().store(batch.key, batch.value, batch.cache, batch.meta)
    assert torch.equal(cache.nan_to_num(), batch.cache.nan_to_num())
    torch.testing.assert_close(triton.attend(batch.query, cache, batch.meta, PLAIN), twin(batch, PLAIN))
    assert blocks[:, own:].isnan().all()


@pytest.mark.parametrize("spec", [PLAIN, EVERY_RULE], ids=["plain", "every rule"])
def test_rows_of_an_image_see_the_rest_of_it(spec: AttentionSpec) -> None:
    """Images of 25 rows and of 7, one of which a cached prefix has begun; text lies around them."""
    batch = random_batch([40, 9, 1], [60, 40, 33])
    ends = torch.cat([torch.arange(21, 61), torch.arange(32, 41), torch.tensor([33])]).int()
    ends[5:30] = 50
    ends[40:44] = 35
    seeing = replace(batch, meta=replace(batch.meta, seen_ends=ends.to(DEVICE)))
    expected = twin(seeing, spec)
    assert not torch.equal(expected, twin(batch, spec))
    for rows in (16, 64):
        found = prefilled(seeing, spec, replace(PREFILLING, rows=rows))
        torch.testing.assert_close(found, expected)
