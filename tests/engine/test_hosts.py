"""An engine whose ranks are on several hosts, which share no memory: tokens, and blocks put together on one host."""

from typing import Any

import pytest

from baton_serve.engine import Engine, EngineConfig
from baton_serve.engine.errors import ConfigError, ModelError
from baton_serve.engine.parallel import tp_executor
from tests.engine.conftest import References
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.engine.rank_threads import RemoteThreads

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


def test_what_does_not_fit_several_hosts_is_refused(references: References) -> None:
    folder = references("llama").folder
    with pytest.raises(ConfigError, match=r"is 2, which cannot be divided equally over nnodes \(4\)"):
        make_engine(folder, tensor_parallel_size=2, nnodes=4)
    with pytest.raises(ConfigError, match="keeps whole blocks, and each of the 2 ranks"):
        on_two_hosts(folder, tensor_parallel_size=2, host_kv_bytes=1 << 20)
    with pytest.raises(ConfigError, match="only baton prefill, decode and unified support"):
        make_engine(folder, tensor_parallel_size=2, nnodes=2)


def test_other_weights_on_another_host_are_refused(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    other = references("qwen3").folder
    folder = references("llama").folder
    monkeypatch.setattr(RemoteThreads, "folders", {str(folder): str(other)})
    with pytest.raises(ModelError, match="rank 1 of 2 on node 1 has other weights"):
        on_two_hosts(folder, tensor_parallel_size=2)
