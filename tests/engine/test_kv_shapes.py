"""Models whose layers have KV of different shapes, or read the KV of other layers: what a block holds, and that it goes
together with quantized KV, small caches and layer groups.
"""

from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.block_layout import KVRun, KVShape
from baton_serve.engine import CompletedLayerGroups
from baton_serve.engine.errors import CapacityError
from tests.engine.conftest import References
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

BLOCK, FLOAT = 16, 4


def test_a_block_holds_the_own_kv_of_each_layer_and_nothing_of_layers_that_share(references: References) -> None:
    """The last two of five layers read the KV of the layers before them."""
    with make_engine(references("gemma4").folder, block_size=BLOCK) as engine:
        small, large = KVShape(2, 16), KVShape(2, 32)
        assert engine.layout.runs == (KVRun(1, small), KVRun(1, large), KVRun(1, small))
        assert engine.layout.token_bytes == FLOAT * 2 * (2 * 16 + 2 * 32 + 2 * 16)
        assert engine.kv.block_bytes == BLOCK * engine.layout.token_bytes


def test_layers_that_share_equal_kv_are_not_counted(references: References) -> None:
    with make_engine(references("gemma3n").folder, block_size=BLOCK) as engine:
        assert engine.layout.runs == (KVRun(3, KVShape(2, 16)),)


def test_keys_and_values_of_different_sizes_have_rows_of_the_larger_one(references: References) -> None:
    with make_engine(references("mimo_v2_flash").folder) as engine:
        assert engine.layout.layers == (KVShape(4, 24), KVShape(2, 24), KVShape(4, 24))


def test_the_number_of_blocks_follows_from_the_bytes_of_all_layers(references: References) -> None:
    folder = references("gemma4").folder
    with make_engine(folder, kv_cache_bytes=1 << 20, max_model_len=100) as engine:
        assert engine.stats().total_blocks == (1 << 20) // engine.layout.block_bytes - 1
    with pytest.raises(CapacityError, match="max_model_len"):
        make_engine(folder, kv_cache_bytes=1 << 15, max_model_len=500)


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}], ids=str)
@pytest.mark.parametrize("family", ["gemma4_moe", "mimo_v2_flash"])
def test_a_handoff_of_quantized_kv_changes_nothing(
    references: References, family: str, settings: dict[str, str]
) -> None:
    reference = references(family)
    prompt = reference.prompts[3]
    with make_engine(reference.folder, **settings) as source, make_engine(reference.folder, **settings) as sink:
        sink.add(make_work(sink, "here", prompt))
        alone = run(sink)["here", 0]
        assert len(set(alone)) > 3
        (answer,) = hand_over(source, sink, make_work(source, "there", prompt)).values()
        assert answer == alone


def test_the_last_blocks_are_reported_in_parts_that_need_not_end_with_a_layer(tmp_path: Path) -> None:
    """The four layers have 1/6, 1/3, 1/6 and 1/3 of a block's bytes, and two parts have one half each."""
    types = ["sliding_attention", "full_attention"] * 2
    folder = write_tiny_model(tmp_path, "gemma4_moe", num_global_key_value_heads=2, layer_types=types)
    settings: dict[str, Any] = {"max_num_batched_tokens": 32, "tail_parts": 2, "enforce_eager": True}
    with make_engine(folder, **settings) as engine:
        assert engine.tail_parts == 2
        reported: list[CompletedLayerGroups] = []
        engine.on_layer_groups(reported.append)
        engine.add(make_work(engine, "w", [5 + (7 * i * i + i) % 200 for i in range(75)]), mode="prefill")
        run(engine)
        assert [part.parts for part in reported] == [range(1), range(1, 2)]
