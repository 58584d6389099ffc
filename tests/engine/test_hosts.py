"""An engine whose ranks are on several hosts, which share no memory: tokens, and blocks put together on one host."""

from typing import Any

import pytest

from baton_serve.engine import Engine, EngineConfig
from baton_serve.engine.errors import ConfigError, ModelError
from baton_serve.engine.parallel import tp_executor
from tests.engine.conftest import References
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.engine.rank_threads import RemoteThreads
from tests.engine.test_host_tier import ask_in_turn, evict

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threaded_ranks")]


def on_two_hosts(folder: Any, **settings: Any) -> Engine:
    config = EngineConfig(
        model=str(folder), device="cpu", block_size=16, kv_cache_bytes=4 << 20, max_num_seqs=16, nnodes=2, **settings
    )
    return Engine(config, remote=RemoteThreads(range(config.ranks_per_node, config.num_ranks)))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("gemma4", {"tensor_parallel_size": 2}),
        # Layers of different shapes, over ranks and stages.
        ("gemma4_moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        # Recurrent states, of which the other host has half of the heads, or of the layers, or both.
        ("qwen3_5", {"tensor_parallel_size": 2}),
        ("mamba2", {"pipeline_parallel_size": 2}),
        ("qwen3_next", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen3", {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value)),
)
def test_tokens_and_handoffs(
    family: str, settings: dict[str, Any], references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal parts of blocks and unequal ones, whole layers and heads, travel in several messages in both directions."""
    monkeypatch.setattr(tp_executor, "MAX_GROUP_BYTES", 1)
    reference = references(family)
    kv = {name: value for name, value in settings.items() if name == "kv_cache_dtype"}
    with on_two_hosts(reference.folder, max_num_batched_tokens=24, **settings) as two:
        with make_engine(reference.folder, **kv) as one:
            assert one.layout == two.layout
            expected = reference.answers
            if kv:  # rounded keys and values give tokens of their own
                one.add(make_work(one, "own", reference.prompts[3]))
                expected = [[], [], [], run(one)["own", 0]]
                one.reset_prefix_cache()
            for source, sink in ((two, one), (one, two)):
                answers = hand_over(source, sink, make_work(source, "over", reference.prompts[3]))
                assert answers["over", 0] == expected[3]
                assert two.reset_prefix_cache() and one.reset_prefix_cache()
        if not kv:
            for number, prompt in enumerate(reference.prompts):
                two.add(make_work(two, str(number), prompt))
            found = run(two)
            assert [found[str(number), 0] for number in range(len(reference.prompts))] == reference.answers


@pytest.mark.parametrize(
    "settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["ranks", "stages"]
)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_each_host_keeps_its_parts_of_evicted_blocks(
    family: str, settings: dict[str, Any], references: References
) -> None:
    reference = references(family)
    with make_engine(reference.folder) as one:
        num_blocks = 8 + 3 * one.layout.state_blocks
    small = {"num_gpu_blocks_override": num_blocks, "max_model_len": 120, "host_kv_bytes": 4 << 20}
    with on_two_hosts(reference.folder, **small, **settings) as engine:
        for _ in range(2):
            assert ask_in_turn(engine, reference) == reference.answers[:4]
            evict(engine)
        assert engine.stats().host_hit_tokens > 0
        assert engine.stats().host_damaged_blocks == 0


def test_what_does_not_fit_several_hosts_is_refused(references: References) -> None:
    folder = references("llama").folder
    with pytest.raises(ConfigError, match=r"is 2, which cannot be divided equally over nnodes \(4\)"):
        make_engine(folder, tensor_parallel_size=2, nnodes=4)
    with pytest.raises(ConfigError, match="only baton prefill, decode and unified support"):
        make_engine(folder, tensor_parallel_size=2, nnodes=2)


def test_other_weights_on_another_host_are_refused(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    other = references("qwen3").folder
    folder = references("llama").folder
    monkeypatch.setattr(RemoteThreads, "folders", {str(folder): str(other)})
    with pytest.raises(ModelError, match="rank 1 of 2 on node 1 has other weights"):
        on_two_hosts(folder, tensor_parallel_size=2)
