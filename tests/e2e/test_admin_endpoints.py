"""Operators' endpoints through real processes: prefixes are forgotten everywhere, and every worker writes a trace."""

import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.test_equality import prompt_of

pytestmark = pytest.mark.slow

PROMPT = prompt_of(90)
FLAGS = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--enable-admin-endpoints")


def cached_tokens(cluster: Cluster) -> int:
    answer = cluster.complete(PROMPT, max_tokens=4, temperature=0)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_prefixes_are_forgotten_and_traces_are_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))
    with Cluster(llama, args=FLAGS) as cluster:

        def post(path: str) -> httpx.Response:
            return cluster.client.post(path)

        assert cached_tokens(cluster) == 0
        assert cached_tokens(cluster) > 0
        wait_until(
            lambda: set(post("/reset_prefix_cache").json()["instances"].values()) == {"no block is cached"},
            timeout_s=30,
            what="caches without blocks of ended requests",
        )
        assert cached_tokens(cluster) == 0
        assert len(post("/start_profile").json()["instances"]) == 2
        assert post("/start_profile").status_code == 400
        cached_tokens(cluster)
        traces = post("/stop_profile").json()["instances"]
        assert traces.keys() == {"prefill-0", "decode-0"} and len(set(traces.values())) == 2
        for trace in traces.values():
            assert json.loads(Path(trace).read_text())["traceEvents"]
        assert post("/collective_rpc").status_code == 400
