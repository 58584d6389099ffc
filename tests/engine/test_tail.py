"""The last blocks of a prompt are reported in groups of layers: each group is complete when it is reported, and the
next one is not.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton_serve.contracts.block_layout import KVLayout, KVShape
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.engine import CompletedLayerGroups
from baton_serve.engine.core.outputs import CompletedBlocks, NamedBlock
from baton_serve.engine.device import has_side_streams
from baton_serve.engine.step import layer_groups as tail
from baton_serve.engine.step.layer_groups import num_layer_groups
from tests.devices import DEVICE
from tests.engine.driving import make_engine, make_work, run
from tests.tiny_models import write_tiny_model

PROMPT = [5 + (7 * i * i + i) % 200 for i in range(75)]
TOKENS = {"max_tokens": 3, "ignore_eos": True}
PARTS = 4


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("gemma2", "float32"), ("llama", "bfloat16")])
def test_a_layer_group_is_reported_when_its_layers_are_computed(
    tmp_path: Path, family: str, dtype: str, kv_cache_dtype: str
) -> None:
    """Llama's layers are fused, in bf16 on most CPUs into one call; Gemma's are transformers' own."""
    folder = write_tiny_model(tmp_path, family, num_hidden_layers=PARTS, intermediate_size=64)
    settings: dict[str, Any] = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "max_num_batched_tokens": 32,
        "tail_parts": PARTS,
        "disable_hybrid_kv_cache_manager": True,  # blocks of cache groups are reported as a whole
    }
    # with a graph, all groups are reported at its end
    with make_engine(folder, enforce_eager=True, **settings) as engine:
        assert engine.tail_parts == PARTS
        reported: list[tuple[CompletedLayerGroups, torch.Tensor]] = []

        def blocks_of(part: CompletedLayerGroups) -> list[int]:
            return [block for completed in part.blocks for _, block in completed.blocks]

        engine.on_layer_groups(lambda part: reported.append((part, engine.kv.device_tensor[blocks_of(part)].clone())))
        completed = []
        engine.add(make_work(engine, "w", PROMPT, **TOKENS), mode="prefill")
        run(engine, lambda result: completed.extend(result.completed))
        assert [part.parts for part, _ in reported] == [range(i, i + 1) for i in range(PARTS)]
        assert len(completed) == 3  # two chunks of two blocks, and the one reported in parts
        for number, (part, then) in enumerate(reported):
            assert part.blocks == [completed[-1]]
            final = engine.kv.device_tensor[blocks_of(part)]
            size = final.shape[1] // PARTS
            assert torch.equal(then[:, : (number + 1) * size], final[:, : (number + 1) * size])
            if number + 1 < PARTS and DEVICE == "cpu":  # a device may be done before the host looks
                assert not torch.equal(then[:, (number + 1) * size :], final[:, (number + 1) * size :])


def test_only_prompts_that_are_handed_on_have_a_tail(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=2)
    with make_engine(folder, tail_parts=2) as engine:
        reported: list[CompletedLayerGroups] = []
        engine.on_layer_groups(reported.append)
        engine.add(make_work(engine, "w", PROMPT, **TOKENS))
        run(engine)
        assert reported == []


def test_few_blocks_are_reported_in_larger_groups_or_whole() -> None:
    """Of a block in four parts all of it, three quarters, half, a quarter are useful; of two blocks half as much."""
    layout = KVLayout(fingerprint="f", num_layers=8, num_kv_heads=2, block_tokens=16, head_dim=64, dtype="float32")
    one, two = (CompletedBlocks(RequestId(f"{n}"), [NamedBlock(BlockHash(b""), 0)] * n) for n in (1, 2))
    found = []
    for quarters in (4, 3, 2, 1):
        reported: list[tuple[range, list[CompletedBlocks]]] = []
        made = tail.LayerGroupReporter(
            layout,
            tail.LayerGroupPlan(PARTS, layout.block_bytes * quarters // 4),
            torch.device("cpu"),
            lambda part, reported=reported: reported.append((part.parts, part.blocks)),  # type: ignore[misc]
        )
        if (after_layer := made.follow([one, two])) is not None:
            for layer in range(layout.num_layers):
                after_layer(layer)
        found.append(
            [[(parts.start, parts.stop) for parts, blocks in reported if which in blocks] for which in (one, two)]
        )
    assert found[0] == [[], [(0, 2), (2, 4)]]
    assert found[1] == [[(0, 3), (3, 4)], [(0, 2), (2, 4)]]
    assert found[2] == [[(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]]
    assert found[3] == [[(0, 1), (1, 2), (2, 3), (3, 4)]] * 2
    assert made.follow([CompletedBlocks(RequestId("w"), [])]) is None


def test_groups_of_unequal_layers_are_reported_when_their_last_byte_is_computed() -> None:
    """Four parts of a block with layers of 1/8, 1/8, 1/2 and 1/4 of its bytes: none of the borders in the large layer
    is one of a layer."""
    shapes = (KVShape(2, 16), KVShape(1, 32), KVShape(2, 64), KVShape(1, 64))
    layout = KVLayout(
        fingerprint="f", num_layers=4, num_kv_heads=0, block_tokens=16, head_dim=0, dtype="float32", layers=shapes
    )
    cpu = torch.device("cpu")
    plan = tail.plan_layer_groups(4, layout, cpu, is_divided=False)
    assert plan.parts == 4
    found: list[list[tuple[int, int]]] = []
    for min_bytes in (1, layout.block_bytes // 2):
        reports: list[range] = []
        made = tail.LayerGroupReporter(
            layout,
            tail.LayerGroupPlan(4, min_bytes),
            cpu,
            lambda part, reports=reports: reports.append(part.parts),  # type: ignore[misc]
        )
        after_layer = made.follow([CompletedBlocks(RequestId("w"), [NamedBlock(BlockHash(b""), 0)])])
        assert after_layer is not None
        found.append([])
        for layer in range(4):
            after_layer(layer)
            found[-1].append((layer, sum(map(len, reports))))
    assert found == [[(0, 0), (1, 1), (2, 3), (3, 4)], [(0, 0), (1, 0), (2, 2), (3, 4)]]
    odd = msgspec.structs.replace(layout, num_layers=3, layers=(KVShape(1, 2), KVShape(1, 4), KVShape(1, 6)))
    assert tail.plan_layer_groups(3, odd, cpu, is_divided=False).parts == 3
    assert tail.plan_layer_groups(2, odd, cpu, is_divided=False).parts == 2
    small = msgspec.structs.replace(odd, block_tokens=1)
    assert tail.plan_layer_groups(3, small, cpu, is_divided=False).parts == 1


def test_by_default_hosts_have_no_tail_and_devices_that_copy_meanwhile_do(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=PARTS)
    with make_engine(folder) as engine:
        assert engine.tail_parts == (PARTS if DEVICE != "cpu" else 1)
    assert not has_side_streams(torch.device("cpu"))


def test_parts_are_equal_groups_of_layers() -> None:
    assert [num_layer_groups(32, asked) for asked in (1, 3, 8, 12, 64)] == [1, 2, 8, 8, 32]
    assert num_layer_groups(28, 8) == 7
    assert num_layer_groups(61, 8) == 1
