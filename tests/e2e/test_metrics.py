"""After one request each metric that dashboards know, and each of our own, stands on some process with a value."""

import httpx
import pytest

from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.slow

OF_THE_ROUTER = {
    "vllm:time_to_first_token_seconds_count": 1,
    "vllm:time_per_output_token_seconds_count": 1,
    "vllm:e2e_request_latency_seconds_count": 1,
    "vllm:request_queue_time_seconds_count": 1,
    "vllm:request_prefill_time_seconds_count": 1,
    "vllm:request_decode_time_seconds_count": 1,
    "vllm:prompt_tokens_total": 200,
    "vllm:generation_tokens_total": 8,
    "vllm:request_success_total": 1,
    "baton:handoff_seconds_count": 1,
    "baton:handoff_exposed_seconds_count": 1,
    "baton:handoffs_due_total": 1,
    "baton:handoffs_completed_total": 1,
    "baton:prefix_hit_tokens_total": 0,
    "baton:placements_total": 1,
}
OF_AN_INSTANCE = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_preemptions_total",
}


def test_one_request_is_counted_once_everywhere(cluster: Cluster) -> None:
    before = cluster.metrics()
    prompt = [7 + (i * i + 3 * i) % 200 for i in range(200)]
    cluster.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    cluster.wait_idle()
    after = cluster.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in OF_THE_ROUTER}
    assert grown.pop("vllm:time_per_output_token_seconds_count") >= OF_THE_ROUTER["vllm:request_success_total"]
    assert grown == {name: count for name, count in OF_THE_ROUTER.items() if name in grown}

    (prefill,), (decode,) = cluster.instances("prefill"), cluster.instances("decode")
    sent, received = cluster.metrics(prefill["http_address"]), cluster.metrics(decode["http_address"])
    assert sent.keys() >= OF_AN_INSTANCE and received.keys() >= OF_AN_INSTANCE
    assert sent["baton:kv_bytes_total"] == received["baton:kv_bytes_total"] > 0
    assert received["baton:kv_link_bytes_per_second"] > 0


def test_finished_requests_are_counted_by_reason(cluster: Cluster) -> None:
    cluster.complete("why did it end", max_tokens=2, ignore_eos=True)
    assert 'vllm:request_success_total{finished_reason="length"' in httpx.get(f"{cluster.url}/metrics").text
