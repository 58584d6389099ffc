"""A command line of Intel's documents for vLLM serves a model here, as it stands there."""

import re

import pytest

from baton_serve.services.local.settings import DEMO_MODEL
from tests.e2e.cluster import Cluster, wait_until

pytestmark = pytest.mark.slow

COMMAND = (
    "--served-model-name demo --dtype=float16 --enforce-eager --trust-remote-code --disable-sliding-window"
    " --gpu-memory-util=0.9 --no-enable-prefix-caching --max-num-batched-tokens=8192 --disable-log-requests"
    " --max-model-len=8192 --block-size 64 --quantization fp8 -tp=1 -pp=1 --enable-chunked-prefill"
)
"""llm-scaler's command without its address, and with flags of its older versions."""


def test_the_canonical_command_of_intels_documents_serves_and_says_what_changes_nothing() -> None:
    # The bundled model is made for fewer tokens; Intel's documents set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.
    args = (*COMMAND.split(), "--allow-long-max-model-len", "--kv-cache-memory-bytes", "256M")
    with Cluster(DEMO_MODEL, args=args) as cluster:
        question = {"role": "user", "content": "What is the capital of France?"}
        answer = cluster.client.post(
            "/v1/chat/completions", json={"model": "demo", "messages": [question], "temperature": 0}
        ).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
        (model,) = cluster.client.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("demo", 8192)
        wait_until(lambda: "Application startup complete." in cluster.log(), timeout_s=10.0, what="the line of uvicorn")
        log = cluster.log()
        assert "--disable-log-requests changes nothing: requests are logged only with --enable-log-requests" in log
        assert "Available routes are:" in log
        assert re.search(r"Route: /v1/chat/completions, Methods: POST", log)
