"""Pools whose layouts differ: block sizes, dtypes of the KV cache, numbers of ranks."""

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.test_equality import ALWAYS, NEW_TOKENS, PROMPTS, greedy, reference_model, served_tokens
from tests.engine.driving import make_engine, make_work, run

pytestmark = pytest.mark.slow

ENDS = {
    "decode has larger blocks and two ranks": (
        "usm",
        "prefill:\n  block_size: 16\ndecode:\n  block_size: 32\n  tensor_parallel_size: 2\n",
    ),
    "decode has smaller blocks": ("zeromq", "prefill:\n  block_size: 32\ndecode:\n  block_size: 16\n"),
}


def config_in(folder: Path, text: str) -> tuple[str, ...]:
    (folder / "baton.yaml").write_text(text)
    return ("--config", str(folder / "baton.yaml"))


def handoffs(cluster: Cluster) -> float:
    cluster.wait_idle()
    return cluster.metrics()["baton:handoff_seconds_count"]


@pytest.mark.parametrize("ends", ENDS)
def test_tokens_equal_transformers(ends: str, llama: Path, tmp_path: Path) -> None:
    transport, config = ENDS[ends]
    flags = ("--kv-transport", transport, "--max-num-batched-tokens", "32", *config_in(tmp_path, config))
    with Cluster(llama, args=(*ALWAYS, *flags)) as cluster:
        model = reference_model(llama)
        for case, prompt in PROMPTS.items():
            assert served_tokens(cluster, prompt, NEW_TOKENS) == greedy(model, prompt, NEW_TOKENS), case
        assert handoffs(cluster) == len(PROMPTS)


def test_a_prompt_read_in_float32_is_continued_from_int8(llama: Path, tmp_path: Path) -> None:
    """Over `zeromq`, prefill quantizes the blocks and decode divides them into its own block size."""
    flags = ("--kv-transport", "zeromq", *config_in(tmp_path, "decode:\n  kv_cache_dtype: int8\n  block_size: 32\n"))
    same = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "int8", "block_size": 32}
    with make_engine(llama, **same) as alone, Cluster(llama, args=(*ALWAYS, *flags)) as cluster:
        for case, prompt in PROMPTS.items():
            alone.add(make_work(alone, case, prompt, max_tokens=NEW_TOKENS, ignore_eos=True))
            assert served_tokens(cluster, prompt, NEW_TOKENS) == run(alone)[case, 0], case
        assert handoffs(cluster) == len(PROMPTS)


def test_ends_that_cannot_be_converted_are_not_paired_and_the_router_says_why(llama: Path, tmp_path: Path) -> None:
    config = "prefill:\n  kv_cache_dtype: int8\ndecode:\n  kv_cache_dtype: fp8\n"
    with Cluster(llama, args=(*ALWAYS, *config_in(tmp_path, config))) as cluster:
        served_tokens(cluster, PROMPTS["many blocks"], NEW_TOKENS)
        assert handoffs(cluster) == 0
        assert "converting int8 to fp8_e4m3 would round the values a second time" in cluster.log()
