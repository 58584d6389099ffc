"""The alerts of the chart, evaluated by Prometheus' own test runner on series of samples."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, Manifest, of_kind, render, variant

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs the Debian package prometheus")

RUNBOOK = (CHART / "RUNBOOK.md").read_text()
CONSTANT, GROWING = "0x60", "0+5x60"
"""Samples of a counter, one for each minute."""
ROUTER = 'namespace="llm",pod="test-baton-router-0"'
DECODE = 'namespace="llm",pod="test-baton-decode-0"'

Labels = dict[str, str]


def rules() -> list[Manifest]:
    (rule,) = of_kind(render(variant("ha")), "PrometheusRule")
    return [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]


def evaluate(folder: Path, alert: str, series: Mapping[str, str], *, fires_for: list[Labels], at: str = "50m") -> None:
    """Check for which labels `alert` fires at the time `at`; `series` are samples of every minute by selector."""
    (rule,) = [one for one in rules() if one["alert"] == alert]

    def text(template: str, labels: Labels) -> str:
        return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], template)

    expected = [
        {
            "exp_labels": {**rule["labels"], **labels},
            "exp_annotations": {name: text(value, labels) for name, value in rule["annotations"].items()},
        }
        for labels in fires_for
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": selector, "values": values} for selector, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected}],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    command = ["promtool", "test", "rules", str(folder / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def handoffs(*, due: list[str], completed: list[str]) -> dict[str, str]:
    """Return the series of the handoffs; item N of `due` and `completed` are of the Nth model."""
    return {
        f'baton:handoffs_{name}_total{{{ROUTER},model_name="model-{number}"}}': values
        for name, samples in (("due", due), ("completed", completed))
        for number, values in enumerate(samples)
    }


def model(number: int) -> Labels:
    return {"namespace": "llm", "model_name": f"model-{number}"}


@needs_promtool
@pytest.mark.parametrize(
    ("series", "fires_for"),
    [
        pytest.param(handoffs(due=[GROWING], completed=[CONSTANT]), [model(0)], id="due and none completed"),
        pytest.param(handoffs(due=[GROWING], completed=["0+1x60"]), [], id="completed"),
        pytest.param(handoffs(due=[CONSTANT], completed=[CONSTANT]), [], id="requests are too short"),
        pytest.param(handoffs(due=["0x47 1x13"], completed=[CONSTANT]), [], id="one request that ended before"),
        pytest.param(
            handoffs(due=[GROWING, GROWING], completed=[GROWING, CONSTANT]), [model(1)], id="beside a model that works"
        ),
    ],
)
def test_no_handoffs(tmp_path: Path, series: dict[str, str], fires_for: list[Labels]) -> None:
    evaluate(tmp_path, "BatonNoHandoffs", series, fires_for=fires_for)


def refused(*, errors: str, by_key: str | None, status: int = 429) -> dict[str, str]:
    series = {f'baton:http_errors_total{{{ROUTER},model_name="m",status="{status}"}}': errors}
    if by_key is not None:
        series[f'baton:admission_refusals_total{{{ROUTER},model_name="m",cause="key"}}'] = by_key
    return series


@needs_promtool
@pytest.mark.parametrize(
    ("series", "fires_for"),
    [
        pytest.param(refused(errors=GROWING, by_key=GROWING), [], id="one client beyond its own limit"),
        pytest.param(refused(errors="_x40 1+1x20", by_key="_x40 1+1x20"), [], id="counters that have just appeared"),
        pytest.param(refused(errors=GROWING, by_key=None), [{"namespace": "llm"}], id="overload"),
        pytest.param(refused(errors=GROWING, by_key="0+4x60"), [{"namespace": "llm"}], id="overload beside a limit"),
        pytest.param(refused(errors=GROWING, by_key=None, status=503), [{"namespace": "llm"}], id="no instance"),
        pytest.param(refused(errors=GROWING, by_key=None, status=400), [], id="bad requests"),
    ],
)
def test_refusals(tmp_path: Path, series: dict[str, str], fires_for: list[Labels]) -> None:
    evaluate(tmp_path, "BatonRefusals", series, fires_for=fires_for)


def link(*, speed: float, received_per_s: float) -> dict[str, str]:
    received = f'baton:kv_bytes_total{{{DECODE},direction="received",transport="zeromq"}}'
    return {
        f'baton:kv_link_bytes_per_second{{{DECODE},peer="p",transport="zeromq"}}': f"{speed:.0f}x60",
        received: f"0+{received_per_s * 60:.0f}x60",
    }


SLOW = {"namespace": "llm", "pod": "test-baton-decode-0", "peer": "p", "transport": "zeromq"}


@needs_promtool
@pytest.mark.parametrize(
    ("series", "fires_for"),
    [
        pytest.param(link(speed=2e8, received_per_s=1e8), [SLOW], id="slow and busy"),
        pytest.param(link(speed=2e8, received_per_s=1e5), [], id="small blocks now and then, as in the demo"),
        pytest.param(link(speed=5e9, received_per_s=4e9), [], id="fast and busy"),
        pytest.param(link(speed=0, received_per_s=1e8), [], id="never used"),
    ],
)
def test_slow_link(tmp_path: Path, series: dict[str, str], fires_for: list[Labels]) -> None:
    evaluate(tmp_path, "BatonSlowLink", series, fires_for=fires_for)


POOL = "baton:pool_instances{" + ROUTER + ',model_name="Qwen/Qwen3-4B",role="decode"}'
REGISTRY = f"baton:registry_connected{{{ROUTER}}}"
UP = f'up{{{DECODE},job="baton"}}'
RESTARTS = "kube_pod_container_status_restarts_total{" + DECODE + ',container="decode"}'
DOWNLOAD = "kube_pod_init_container_status_ready{" + DECODE + ',container="download"}'
PAUSED = 'kube_deployment_spec_paused{namespace="llm",deployment="test-baton-decode"}'
SCALER = 'namespace="llm",horizontalpodautoscaler="keda-hpa-test-baton-decode"'
REPLICAS = f"kube_horizontalpodautoscaler_status_current_replicas{{{SCALER}}}"
MAXIMUM = f"kube_horizontalpodautoscaler_spec_max_replicas{{{SCALER}}}"
EMPTY = {"namespace": "llm", "model_name": "Qwen/Qwen3-4B", "role": "decode"}
POD = {"namespace": "llm", "pod": "test-baton-decode-0"}
ROUTER_POD = {"namespace": "llm", "pod": "test-baton-router-0"}
SCALER_LABELS = {"namespace": "llm", "horizontalpodautoscaler": "keda-hpa-test-baton-decode"}


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "bad", "good", "labels"),
    [
        ("BatonPoolEmpty", {POOL: "0x60"}, {POOL: "0x10 1x50"}, EMPTY),
        ("BatonRegistryLost", {REGISTRY: "0x60"}, {REGISTRY: "0x10 1x50"}, ROUTER_POD),
        ("BatonTargetDown", {UP: "0x60"}, {UP: "1x60"}, {**POD, "job": "baton"}),
        ("BatonRestarts", {RESTARTS: "0x35 0+1x25"}, {RESTARTS: "0x35 1x25"}, {**POD, "container": "decode"}),
        ("BatonDownloadStuck", {DOWNLOAD: "0x60"}, {DOWNLOAD: "0x25 1x35"}, POD),
        (
            "BatonRolloutPaused",
            {PAUSED: "1x100"},
            {PAUSED: "1x20 0x40"},
            {"namespace": "llm", "deployment": "test-baton-decode"},
        ),
        (
            "BatonAutoscalerAtMaximum",
            {REPLICAS: "4x60", MAXIMUM: "4x60"},
            {REPLICAS: "3x60", MAXIMUM: "4x60"},
            SCALER_LABELS,
        ),
    ],
)
def test_an_alert_fires_for_the_bad_state_and_not_for_the_good_one(
    tmp_path: Path, alert: str, bad: dict[str, str], good: dict[str, str], labels: Labels
) -> None:
    evaluate(tmp_path, alert, bad, fires_for=[labels], at="90m" if alert == "BatonRolloutPaused" else "50m")
    evaluate(tmp_path, alert, good, fires_for=[])


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "metric", "bound"),
    [
        ("BatonTTFTBudgetBurnsFast", "vllm:time_to_first_token_seconds", "2.5"),
        ("BatonITLBudgetBurnsFast", "vllm:time_per_output_token_seconds", "0.2"),
    ],
)
def test_a_budget_burns_if_one_of_two_observations_is_late(tmp_path: Path, alert: str, metric: str, bound: str) -> None:
    in_time = f'{metric}_bucket{{{ROUTER},le="{bound}"}}'
    count = f"{metric}_count{{{ROUTER}}}"
    evaluate(tmp_path, alert, {in_time: "0+5x120", count: "0+10x120"}, fires_for=[{}], at="90m")
    evaluate(tmp_path, alert, {in_time: "0+10x120", count: "0+10x120"}, fires_for=[], at="90m")


def test_the_bounds_of_objectives_are_buckets_of_the_routers_histograms() -> None:
    from baton_serve.services.router.requests.metrics import _TPOT_S, _TTFT_S
    from tools.helm_schema import CHOICES

    assert {float(text) for text in CHOICES["slo.ttftSeconds"]} <= set(_TTFT_S)
    assert {float(text) for text in CHOICES["slo.itlSeconds"]} <= set(_TPOT_S)


def test_every_alert_names_its_section_of_the_runbook_with_commands_and_their_output() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
    assert list(sections) == [one["alert"] for one in rules()]
    for one in rules():
        assert one["annotations"]["runbook_url"].endswith(f"/helm/RUNBOOK.md#{one['alert'].lower()}")
        commands = re.findall(r"^```\n(.*?)^```$", sections[one["alert"]], re.MULTILINE | re.DOTALL)
        same_as = re.findall(r"\[\w+\]\(#(\w+)\)", sections[one["alert"]])
        assert same_as or any("\n# expected: " in "\n" + block for block in commands), one["alert"]
        assert {name for name in same_as} <= {name.lower() for name in sections}
