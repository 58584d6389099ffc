"""Handoffs in which each rank sends its part of the blocks: here of CPUs that keep it in memory of their own."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.test_equality import ALWAYS, NEW_TOKENS, PROMPTS, expected_tokens, prompt_of, served_tokens
from tests.forked_ranks import OWN_MEMORY, ranks_of
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_tokens_of_handoffs_by_ranks_and_after_the_death_of_one(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN_MEMORY, "1")
    write_tiny_model(tmp_path / "model")
    config = tmp_path / "baton.yaml"
    config.write_text(f"prefill:\n  {option}: 2\ndecode:\n  {option}: 2\n")
    flags = (*ALWAYS, "--config", str(config), "--block-size", "16", "--num-gpu-blocks-override", "128")
    with Cluster(tmp_path / "model", args=(*flags, "--kv-transport", "usm")) as cluster:
        # The first handoff connects the ranks, and is itself of whole blocks.
        assert served_tokens(cluster, [9], NEW_TOKENS) == expected_tokens(tmp_path / "model", [9], NEW_TOKENS)
        wait_until(lambda: "by 2 ranks" in str(cluster.instances("decode")), timeout_s=30, what="connected ranks")
        for prompt in PROMPTS.values():
            assert served_tokens(cluster, prompt, NEW_TOKENS) == expected_tokens(tmp_path / "model", prompt, NEW_TOKENS)
        (decode,) = cluster.instances("decode")
        (link,) = decode["links"]
        assert link["transport"] == "usm" and link["reason"].startswith("by 2 ranks"), link
        assert "a rank's part failed" not in cluster.log()
        (rank,) = ranks_of(cluster.pid("decode"))
        os.kill(rank.pid, signal.SIGKILL)

        def restarted() -> bool:
            return any(i["generation"] != decode["generation"] for i in cluster.instances("decode"))

        wait_until(restarted, timeout_s=60, what="a restarted decode instance")
        prompt = prompt_of(83)[::-1]
        assert served_tokens(cluster, prompt, NEW_TOKENS) == expected_tokens(tmp_path / "model", prompt, NEW_TOKENS)
        cluster.wait_idle()


def test_one_end_without_transfers_by_ranks_gets_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_MEMORY, "1")
    write_tiny_model(tmp_path / "model")
    config = tmp_path / "baton.yaml"
    ranks = "  tensor_parallel_size: 2\n"
    config.write_text(f"prefill:\n{ranks}  kv_rank_transfers: never\ndecode:\n{ranks}")
    flags = (*ALWAYS, "--config", str(config), "--block-size", "16", "--num-gpu-blocks-override", "128")
    with Cluster(tmp_path / "model", args=(*flags, "--kv-transport", "usm")) as cluster:
        for prompt in ([9], *PROMPTS.values()):
            assert served_tokens(cluster, prompt, NEW_TOKENS) == expected_tokens(tmp_path / "model", prompt, NEW_TOKENS)
        wait_until(lambda: bool(cluster.instances("decode")[0]["links"]), timeout_s=30, what="a link")
        (link,) = cluster.instances("decode")[0]["links"]
        assert link["transport"] == "usm" and "ranks" not in link["reason"], link
        cluster.wait_idle()
