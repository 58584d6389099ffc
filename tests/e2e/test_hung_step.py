"""A step of the engine that blocks: its streams continue elsewhere, and its process is started again."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.hanging import hang, hanging
from tests.e2e.test_faults import BODY, FLAGS, stream_in_thread, text_of, wait_for_a_writer
from tests.forked_ranks import ranks_of

pytestmark = pytest.mark.slow
LIMIT_S = 4.0
"""`--engine-step-timeout-s`: far longer than a step of the small model, also on a busy machine."""
WATCHED = (*FLAGS, "--engine-step-timeout-s", f"{LIMIT_S:g}")
NUM_STREAMS = 4
NUM_TOKENS = 800
"""Several times as many as are written until the test has found the writer."""


def restarted(cluster: Cluster, role: str, before: dict[str, Any]) -> bool:
    """Return whether a new process has taken the place of the instance `before`."""
    found = {i["instance"]: i["generation"] for i in cluster.instances(role)}
    return bool(found.get(before["instance"], before["generation"]) != before["generation"])


def test_streams_of_a_hung_decode_worker_continue_on_the_other_one(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "hang"
    with Cluster(llama, decode=2, args=WATCHED, launch=hanging(file)) as cluster:
        bodies = [BODY | {"prompt": [7 + n, *BODY["prompt"]], "max_tokens": NUM_TOKENS} for n in range(NUM_STREAMS)]
        alone = [stream_in_thread(cluster, body) for body in bodies]
        for thread, _, _ in alone:
            thread.join(60)
        undisturbed = [text_of(chunks) for _, chunks, _ in alone]
        before = cluster.instances("decode")
        pids = [cluster.pid("decode", n) for n in range(2)]
        streams = [stream_in_thread(cluster, body) for body in bodies]
        victim = wait_for_a_writer(cluster, *streams[0][:2])
        hung_at = time.monotonic()
        hang(file, pids[victim])

        def is_counted_out() -> bool:
            return before[victim]["generation"] not in [i["generation"] for i in cluster.instances("decode")]

        wait_until(is_counted_out, timeout_s=LIMIT_S + 8.0, what="a /health without the hung instance")
        assert time.monotonic() - hung_at > LIMIT_S
        for thread, _, _ in streams:
            thread.join(60)
        assert not [errors for thread, _, errors in streams if thread.is_alive() or errors]
        assert [text_of(chunks) for _, chunks, _ in streams] == undisturbed
        assert cluster.metrics()["baton:replays_total"] >= 1
        wait_until(lambda: restarted(cluster, "decode", before[victim]), timeout_s=60, what="a restarted instance")
        cluster.wait_idle()
        log = cluster.log()
        assert "the engine has hung on device (cpu): a step of" in log
        assert "in step_or_hang" in log and f"{before[victim]['instance']} has died (status 3)" in log


def test_a_rank_that_hangs_ends_its_instance_and_is_killed(llama: Path, tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text("prefill:\n  tensor_parallel_size: 2\n")
    with Cluster(llama, args=(*WATCHED, "--config", str(config))) as cluster:
        expected = cluster.complete(**BODY)["choices"][0]["text"]
        (before,) = cluster.instances("prefill")
        (rank,) = ranks_of(cluster.pid("prefill"))
        os.kill(rank.pid, signal.SIGSTOP)
        # Another prompt: this one is cached. With its only prefill worker gone, a decode worker may answer it.
        stream_in_thread(cluster, BODY | {"prompt": BODY["prompt"][::-1]})[0].join(60)
        wait_until(lambda: restarted(cluster, "prefill", before), timeout_s=90, what="a restarted prefill instance")
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
        assert cluster.complete(**BODY)["choices"][0]["text"] == expected
        assert "the engine has hung on" in cluster.log()
