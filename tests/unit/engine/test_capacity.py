"""How many sequences' recurrent states the memory of a device holds."""

import pytest
import torch

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import CapacityError
from baton_serve.engine.kv.capacity import StateRows, limit_sequences

LAYOUT = KVLayout(
    fingerprint="f",
    num_layers=2,
    num_kv_heads=2,
    block_tokens=16,
    head_dim=64,
    dtype="bfloat16",
    state_bytes=64 << 10,
)
ROW = LAYOUT.state_blocks * LAYOUT.block_bytes


def limit(available: int, monkeypatch: pytest.MonkeyPatch, wanted: int = 8) -> StateRows:
    """Return how many of `wanted` sequences may run with `available` bytes for KV; of a device whose weights take more
    than their share that is a negative number."""
    monkeypatch.setattr(devices, "kv_cache_bytes", lambda *_, **__: available)
    return limit_sequences(EngineConfig(model="m", max_num_seqs=wanted), LAYOUT, torch.device("cuda"))


def test_states_take_half_of_the_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit(100 * ROW, monkeypatch) == (8, 1)
    assert limit(6 * ROW, monkeypatch) == (3, 0)


def test_running_sequences_need_rows_more_than_inner_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [limit(2 * count * ROW, monkeypatch, 32) for count in (36, 34, 32, 24, 15, 1)]
    assert found == [(32, 4), (32, 2), (30, 2), (23, 1), (15, 0), (1, 0)]
    config = EngineConfig(model="m", max_num_seqs=32, enable_prefix_caching=False)
    assert limit_sequences(config, LAYOUT, torch.device("cuda")) == (1, 0)


def test_steps_of_many_tokens_have_more_spare_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "kv_cache_bytes", lambda *_, **__: 1000 * ROW)
    found = []
    for tokens in (256, 8192, 16384, 65536):
        config = EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=tokens)
        found.append(limit_sequences(config, LAYOUT, torch.device("cuda")))
    assert found == [(64, 8), (64, 8), (64, 16), (64, 32)]


@pytest.mark.parametrize("available", [2 * ROW - 1, 0, -40 * ROW])
def test_no_room_for_one_sequence_is_said(available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CapacityError, match=r"the recurrent states of one sequence need .* gpu_memory_utilization"
    ) as e:
        limit(available, monkeypatch)
    assert "of the -" not in str(e.value)
