"""Tile sizes follow the device."""

import itertools

import pytest
import torch

from baton_serve.engine.kernels.triton import tiles as tiles_module
from baton_serve.engine.kernels.triton.tiles import (
    DeviceLimits,
    chunk_stages,
    decode_tiles,
    fits_heads,
    prefill_tiles,
    row_tiles,
    split_tiles,
)


def test_tiles_fit_the_fast_memory_of_every_device() -> None:
    for shared, head_dim, element in itertools.product((64, 96, 100, 128, 227), (64, 128, 256, 512), (2, 4)):
        limits = DeviceLimits(processors=20, shared_bytes=shared << 10, descriptors=False)
        head_bytes = head_dim * element
        if not fits_heads(limits, head_bytes=head_bytes, group=8):
            assert (head_dim, element) == (512, 4) and shared < 100, "plain torch computes them"
            continue
        prefill = prefill_tiles(limits, head_bytes=head_bytes, element_bytes=element)
        decode = decode_tiles(limits, head_bytes=head_bytes, block_tokens=64)
        loaded = prefill.stages * prefill.tile * (head_bytes + head_bytes // prefill.parts)
        assert prefill.rows * head_bytes + loaded <= shared << 10, prefill
        assert 2 * decode.stages * decode.tile * head_bytes <= shared << 10, decode


def test_wide_heads_get_fewer_rows_or_values_in_parts() -> None:
    found = []
    for shared, is_coded in ((227, False), (227, True), (128, False), (96, False), (64, False)):
        limits = DeviceLimits(processors=20, shared_bytes=shared << 10, descriptors=True)
        tiles = prefill_tiles(limits, head_bytes=1024, element_bytes=2, is_coded=is_coded)
        assert tiles.descriptors == (tiles.parts > 1) and not tiles.paired
        found.append((tiles.rows, tiles.tile, tiles.stages, tiles.parts))
    assert found == [(128, 64, 1, 2), (64, 32, 2, 1), (32, 16, 2, 1), (32, 16, 1, 1), (16, 16, 1, 1)]
    assert not fits_heads(limits, head_bytes=1024, group=64)
    large = DeviceLimits(processors=132, shared_bytes=227 << 10, descriptors=True)
    decoding = decode_tiles(large, head_bytes=1024, block_tokens=64)
    assert (decoding.tile, decoding.stages) == (32, 2)


def test_recurrences_load_a_chunk_ahead_where_memory_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    device, found = torch.device("cuda", 3), []
    for shared in (227, 128):
        limits = DeviceLimits(processors=20, shared_bytes=shared << 10, descriptors=False)
        monkeypatch.setattr(tiles_module, "device_limits", lambda index, limits=limits: limits)
        found.append([chunk_stages.__wrapped__(device, element) for element in (2, 4)])
    assert found == [[2, 1], [1, 1]]
    assert chunk_stages(torch.device("cpu"), 2) == 1


def test_a_split_is_a_whole_number_of_tiles_and_blocks() -> None:
    limits = DeviceLimits(processors=132, shared_bytes=227 << 10, descriptors=True)
    for block_tokens, is_coded in itertools.product((16, 64, 128, 512), (False, True)):
        tiles = decode_tiles(limits, head_bytes=256, block_tokens=block_tokens, is_coded=is_coded)
        assert tiles.min_split % tiles.tile == 0
        assert tiles.min_split % block_tokens == 0


def test_products_of_few_rows_are_cut_until_every_processor_reads() -> None:
    large = DeviceLimits(processors=132, shared_bytes=227 << 10, descriptors=True)
    assert [split_tiles(large, outputs=n, inputs=8192).splits for n in (4096, 2560, 1024, 64)] == [2, 4, 8, 8]
    assert split_tiles(large, outputs=64, inputs=768).splits == 2, "as far as the inputs divide"
    small = DeviceLimits(processors=20, shared_bytes=64 << 10, descriptors=False)
    found = split_tiles(small, outputs=2560, inputs=8192)
    assert (found.tile, found.splits) == (32, 2)
    assert found.stages * 2 * found.step * (found.tile + 16) <= small.shared_bytes


def test_the_fewer_sequences_the_more_finely_they_are_cut() -> None:
    limits = DeviceLimits(processors=132, shared_bytes=227 << 10, descriptors=True)
    found = [decode_tiles(limits, head_bytes=256, block_tokens=16, num_heads=8 * count) for count in (1, 2, 3)]
    assert [(tiles.min_split, tiles.max_splits) for tiles in found] == [(64, 32), (128, 32), (256, 16)]
    assert decode_tiles(limits, head_bytes=256, block_tokens=128, num_heads=8).min_split == 128


def test_a_row_is_read_in_pieces_that_divide_it_where_any_do() -> None:
    for inputs in (512, 2048, 2560, 3072, 4096, 7168, 9728, 14336):
        tiles = row_tiles(inputs)
        assert inputs % tiles.chunk == 0
        assert tiles.rows * tiles.chunk >= 8 * 32 * tiles.warps, "16 bytes for every thread"
    assert row_tiles(100).chunk == 512
