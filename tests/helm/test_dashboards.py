"""Dashboards, alerts and autoscaling ask only for metrics that a router or an instance exports."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.contracts.instance import Load
from baton_serve.engine.core.outputs import EngineStats
from baton_serve.services.instance.metrics import EmbeddingMetrics, EngineCollector, TransferMetrics
from baton_serve.services.router.requests.metrics import RouterMetrics
from tests.helm.chart import CHART, ROOT, named, of_kind, render, variant
from tests.helm.promql import EXPRESSIONS, metrics_of

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
PANELS = [
    "E2E Request Latency",
    "Token Throughput",
    "Time Per Output Token Latency",
    "Scheduler State",
    "Time To First Token Latency",
    "Cache Utilization",
    "Request Prompt Length",
    "Request Generation Length",
    "Finish Reason",
    "Queue Time",
    "Requests Prefill and Decode Time",
    "Max Generation Token in Sequence Group",
]


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Sample names of a router and an instance, whether or not anything was counted yet."""
    registry = CollectorRegistry()
    RouterMetrics(registry, "m")
    TransferMetrics(registry)
    EmbeddingMetrics(registry, "prefill")
    EmbeddingMetrics(registry, "encode")
    zeros: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    load = Load(free_blocks=0, total_blocks=0)
    registry.register(EngineCollector(model="m", stats=lambda: EngineStats(**zeros), load=lambda: load, links=list))
    return set(sample_names(registry))


def sample_names(registry: CollectorRegistry) -> Iterator[str]:
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    for family in registry.collect():
        yield from (family.name + suffix for suffix in suffixes[family.type])


def test_every_metric_in_an_expression_is_exported(exported: set[str]) -> None:
    unknown = {where: metrics_of(text) - exported for where, text in EXPRESSIONS.items()}
    assert not {where: names for where, names in unknown.items() if names}


def test_expressions_are_found_everywhere() -> None:
    kinds = {where.split(":")[0] for where in EXPRESSIONS}
    assert kinds == {"vllm.json", "baton.json", "alert", "record", "keda"}
    foreign = {"alert: BatonTargetDown", "alert: BatonRestarts", "alert: BatonDownloadStuck"}
    foreign |= {
        "alert: BatonAutoscalerAtMaximum",
        "alert: BatonRolloutPaused",
    }  # of Prometheus itself and kube-state-metrics
    assert {where for where, text in EXPRESSIONS.items() if not metrics_of(text)} == foreign


def test_the_metrics_an_hpa_scales_on_are_recorded_by_the_rules() -> None:
    rendered = render(variant("ha"))
    (rule,) = of_kind(rendered, "PrometheusRule")
    recorded = {r["record"] for group in rule["spec"]["groups"] for r in group["rules"] if "record" in r}
    for role in ("prefill", "decode"):
        metrics = named(rendered, "HorizontalPodAutoscaler", f"-{role}")["spec"]["metrics"]
        assert {metric["pods"]["metric"]["name"] for metric in metrics} <= recorded


def test_the_objective_is_a_bucket_of_the_histogram() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry, "m")
    families = text_string_to_metric_families(generate_latest(registry).decode())
    buckets = {
        s.labels["le"] for f in families for s in f.samples if s.name == "vllm:time_to_first_token_seconds_bucket"
    }
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["monitoring"]["properties"]
    allowed = schema["prometheusRule"]["properties"]["slo"]["properties"]["ttftSeconds"]["enum"]
    assert set(allowed) <= buckets


def test_the_twelve_panels_that_vllm_users_know_are_there() -> None:
    board = json.loads((CHART / "dashboards" / "vllm.json").read_text())
    assert [panel["title"] for panel in board["panels"]] == PANELS


def test_dashboards_are_valid_and_reach_config_maps() -> None:
    rendered = [
        o for o in of_kind(render(variant("ha")), "ConfigMap") if "grafana_dashboard" in o["metadata"]["labels"]
    ]
    contents = {name: json.loads(text) for config in rendered for name, text in config["data"].items()}
    assert contents == {path.name: json.loads(path.read_text()) for path in DASHBOARDS}
    for board in contents.values():
        check_board(board)


def check_board(board: dict[str, Any]) -> None:
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["targets"] and panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
    assert used <= {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}


def test_the_dashboards_are_current() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "tools" / "helm_dashboards.py"), "--check"], check=False)
    assert made.returncode == 0, "run tools/helm_dashboards.py"
