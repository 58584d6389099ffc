"""Instances of several ranks among others: the same tokens through a handoff; a rank does not die alone."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.test_equality import ALWAYS, NEW_TOKENS, expected_tokens, prompt_of, served_tokens
from tests.forked_ranks import ranks_of
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_tokens_through_ranks_and_after_the_death_of_one(option: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    config = tmp_path / "baton.yaml"
    config.write_text(f"prefill:\n  {option}: 2\n")
    prompt = prompt_of(83)
    expected = expected_tokens(tmp_path / "model", prompt, NEW_TOKENS)
    with Cluster(tmp_path / "model", args=(*ALWAYS, "--config", str(config), "--block-size", "16")) as cluster:
        assert served_tokens(cluster, prompt, NEW_TOKENS) == expected
        (before,) = cluster.instances("prefill")
        (rank,) = ranks_of(cluster.pid("prefill"))
        os.kill(rank.pid, signal.SIGKILL)

        def restarted() -> bool:
            return any(i["generation"] != before["generation"] for i in cluster.instances("prefill"))

        wait_until(restarted, timeout_s=60, what="a restarted prefill instance")
        assert served_tokens(cluster, prompt[::-1], NEW_TOKENS) == expected_tokens(
            tmp_path / "model", prompt[::-1], NEW_TOKENS
        )
        cluster.wait_idle()
