"""Attention of one new token each, from heads as their product left them: equal to its steps apart."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_serve.engine.kernels import AttentionMetadata, AttentionSpec, NewHeads, Norm
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton.attention import TritonAttention
from baton_serve.engine.kernels.triton.decode_new import decode_new, fits
from baton_serve.engine.kernels.triton.tiles import DecodeTiles, DeviceLimits
from tests.contract.kernels.triton_batches import DEVICE, random_batch

SINKS = torch.linspace(-1, 2, 3, device=DEVICE)
RULES = {
    "plain": AttentionSpec(0.3),
    "every rule": AttentionSpec(0.3, sliding_window=21, softcap=2.0, sinks=SINKS),
}
TILES = DecodeTiles(tile=16, min_split=32, max_splits=4, programs=5, warps=4, stages=2)
HEADS, DIM = 3, 16


def made(
    contexts: Sequence[int], *, rotary: int = DIM, normed: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[NewHeads, Tensor, AttentionMetadata]:
    batch = random_batch([1] * len(contexts), list(contexts), heads=HEADS, head_dim=DIM, dtype=dtype)
    heads = torch.cat([batch.query, batch.key, batch.value], 1)
    angles = torch.rand(len(contexts), rotary, device=DEVICE) * 6
    norms = [Norm(torch.rand(DIM, device=DEVICE).to(dtype) + 0.5, 1e-5) for _ in range(2)] if normed else [None, None]
    return NewHeads(heads, (angles.cos(), angles.sin()), *norms), batch.cache, batch.meta


def in_steps(new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
    """By the twins, each step apart; writes to `cache`."""
    kv_heads = cache.shape[2]
    query, key = new.heads[:, : -2 * kv_heads].clone(), new.heads[:, -2 * kv_heads : -kv_heads]
    if new.query_norm is not None and new.key_norm is not None:
        query = reference_layers.rms_norm(query, new.query_norm.weight, new.query_norm.eps)
        key = reference_layers.rms_norm(key, new.key_norm.weight, new.key_norm.eps)
    reference_layers.rotary_store(query, key, new.heads[:, -kv_heads:], new.rotation, cache, meta.slots)
    return ReferenceAttention().attend(query, cache, meta, spec)


def at_once(
    new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec, tiles: DecodeTiles = TILES
) -> Tensor:
    assert fits(new, cache, meta)
    return decode_new(new, cache, meta, spec, tiles)


@pytest.mark.parametrize("contexts", [[1, 30, 65, 100], [100], [1]], ids=["batch", "alone", "first token"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rotary", [DIM, DIM // 2], ids=["whole heads", "half of each head"])
def test_equals_its_steps_apart(contexts: list[int], rule: str, rotary: int) -> None:
    new, cache, meta = made(contexts, rotary=rotary, normed=rule == "every rule")
    apart = cache.clone()
    wanted = in_steps(new, apart, meta, RULES[rule])
    torch.testing.assert_close(at_once(new, cache, meta, RULES[rule]), wanted)
    torch.testing.assert_close(cache, apart, equal_nan=True)


def test_half_precision_stores_the_same_bits() -> None:
    new, cache, meta = made([70, 33], dtype=torch.float16)
    apart = cache.clone()
    wanted = in_steps(new, apart, meta, RULES["plain"])
    torch.testing.assert_close(at_once(new, cache, meta, RULES["plain"]), wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(cache, apart, equal_nan=True, rtol=1e-3, atol=1e-3)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    new, cache, meta = made([1, 40, 70])
    together = at_once(new, cache.clone(), meta, RULES["plain"])
    alone = replace(
        meta,
        query_starts=meta.query_starts[:2],
        context_lens=meta.context_lens[2:],
        block_tables=meta.block_tables[2:],
        slots=meta.slots[2:],
    )
    lonely = replace(new, heads=new.heads[2:], rotation=(new.rotation[0][2:], new.rotation[1][2:]))
    found = at_once(lonely, cache.clone(), alone, RULES["plain"], replace(TILES, programs=64))
    assert torch.equal(found[0], together[2])


def test_padding_sequences_are_stored_nowhere() -> None:
    new, cache, meta = made([40, 5])
    meta.context_lens[1], meta.slots[1] = 0, -1
    before = cache.clone()
    found = at_once(new, cache, meta, RULES["plain"])
    slot = int(meta.slots[0])
    before[slot // 16, :, :, slot % 16] = cache[slot // 16, :, :, slot % 16]
    assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0))
    assert not found[0].isnan().any()


def test_repetitions_are_equal_bit_by_bit() -> None:
    new, cache, meta = made([100])
    first = at_once(new, cache, meta, RULES["plain"])
    assert all(torch.equal(at_once(new, cache, meta, RULES["plain"]), first) for _ in range(3))


def test_codes_and_longer_pieces_are_left_to_the_steps_apart() -> None:
    new, cache, meta = made([40, 5])
    assert not fits(new, cache.to(torch.bfloat16), meta)
    assert not fits(new, cache, replace(meta, max_query_len=2))


def test_a_backend_leaves_large_batches_and_other_rules_to_the_steps_apart() -> None:
    backend = TritonAttention(DEVICE, limits=DeviceLimits(processors=3, shared_bytes=1 << 15, descriptors=False))
    new, cache, meta = made([40, 5, 7])
    sloped = AttentionSpec(0.3, alibi=torch.rand(HEADS, device=DEVICE))
    assert backend.attend_new(new, cache, meta, sloped) is None
    apart = cache.clone()
    found = backend.attend_new(new, cache, meta, RULES["plain"])
    assert found is not None
    torch.testing.assert_close(found, in_steps(new, apart, meta, RULES["plain"]))
    new, cache, meta = made([40, 5, 7, 9])
    assert backend.attend_new(new, cache, meta, RULES["plain"]) is None
