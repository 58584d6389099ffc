from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import LinkStatus
from baton_serve.services.instance.metrics import EngineCollector, TransferMetrics
from baton_serve.services.instance.request_server import load_of
from tests.unit.instance.fakes import STATS

PEER = InstanceId("prefill-0")


def test_gauges_show_the_current_state() -> None:
    stats = replace(STATS, free_blocks=4, running=3, waiting=1, reserved=2, held=1, held_blocks=5, preemptions=6)
    stats = replace(stats, prefix_query_tokens=100, prefix_hit_tokens=25)
    stats = replace(stats, host_used_blocks=3, host_total_blocks=12, host_hit_tokens=10, host_loaded_blocks=7)
    stats = replace(stats, host_damaged_blocks=2)
    link = LinkStatus(peer=PEER, transport="usm", bytes_per_second=2e9, probed_bytes_per_second=3e9, choice="proved")
    registry = CollectorRegistry()
    registry.register(
        EngineCollector(model="m", stats=lambda: stats, load=lambda: load_of(stats, num_queued=4), links=lambda: [link])
    )
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 1 + 2 + 4,
        "vllm:num_requests_swapped": 0,
        "vllm:gpu_cache_usage_perc": 0.75,
        "vllm:gpu_prefix_cache_hit_rate": 0.25,
        "vllm:cpu_cache_usage_perc": 0.25,
        "vllm:cpu_prefix_cache_hit_rate": 0.1,
        "baton:host_loaded_blocks_total": 7,
        "baton:host_damaged_blocks_total": 2,
        "vllm:num_preemptions_total": 6,
        "baton:held_blocks": 5,
        "baton:leases": 3,
    }
    assert {name: registry.get_sample_value(name, {"model_name": "m"}) for name in expected} == expected
    labels = {"peer": PEER, "transport": "usm", "choice": "proved"}
    assert registry.get_sample_value("baton:kv_link_bytes_per_second", labels) == 2e9
    assert registry.get_sample_value("baton:kv_link_probed_bytes_per_second", labels) == 3e9


def test_what_transfers_did_is_counted() -> None:
    registry = CollectorRegistry()
    metrics = TransferMetrics(registry)
    metrics.moved(peer=PEER, transport="usm", direction="received", num_bytes=100)
    metrics.moved(peer=PEER, transport="usm", direction="received", num_bytes=50)
    metrics.mismatched(peer=PEER, transport="usm", blocks=2)
    metrics.handoff_failed("PeerLost")
    labels = {"transport": "usm", "direction": "received"}
    assert registry.get_sample_value("baton:kv_bytes_total", labels) == 150
    assert registry.get_sample_value("baton:checksum_mismatches_total", {"transport": "usm"}) == 2
    assert registry.get_sample_value("baton:transfer_errors_total", {"reason": "PeerLost"}) == 1
    assert b"baton:kv_bytes_total" in generate_latest(registry)


def test_what_has_not_happened_yet_is_zero_so_that_its_first_is_an_increase() -> None:
    registry = CollectorRegistry()
    TransferMetrics(registry)
    for name, label, value in (
        ("baton:kv_transport_changes_total", "change", "demoted"),
        ("baton:kv_transport_changes_total", "change", "promoted"),
        ("baton:kv_probes_total", "outcome", "proved"),
    ):
        assert registry.get_sample_value(name, {"transport": "oneccl", label: value}) == 0
    assert registry.get_sample_value("baton:checksum_mismatches_total", {"transport": "usm"}) == 0
