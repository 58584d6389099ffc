"""Every command line of the chart starts the real process, with the environment that Kubernetes would give it; and a
real Prometheus evaluates every expression of the chart on what these processes export."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import isnan
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import wait_until
from tests.helm.chart import Manifest, environment_of, of_kind
from tests.helm.pods import ADDRESSES, SECRETS, Pods
from tests.helm.prometheus import Prometheus
from tests.helm.promql import EXPRESSIONS
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.redis]

START_TIMEOUT_S = 180.0
URL = f"http://{ADDRESSES['router']}:8000"
HEADERS = {"authorization": "Bearer sk-test", "x-baton-explain": "1"}


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("pods")
    pods = Pods(folder, write_tiny_model(folder / "model"))
    try:
        pods.start_redis()
        for role in ADDRESSES:
            pods.start(role)
        wait_until(lambda: pods.is_up("router", "startupProbe"), timeout_s=START_TIMEOUT_S, what="the router")
        wait_until(lambda: all(map(pods.is_up, ADDRESSES)), timeout_s=START_TIMEOUT_S, what="all probes")
        wait_until(lambda: len(health()["instances"]) == 3, timeout_s=START_TIMEOUT_S, what="all in the registry")
        yield pods
    finally:
        pods.kill_all()


def health() -> Manifest:
    return dict(httpx.get(f"{URL}/health", headers=HEADERS).json())


def complete(prompt: str) -> Manifest:
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    return dict(httpx.post(f"{URL}/v1/completions", json=body, headers=HEADERS, timeout=60).raise_for_status().json())


def test_all_containers_start_and_are_ready(pods: Pods) -> None:
    for role in ADDRESSES:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert pods.probe(role, probe) == 200, (role, probe)
    assert pods.redis_probe() == 0
    assert {i["instance"] for i in health()["instances"]} == {"prefill-0", "decode-0", "unified-0"}
    assert health()["pools"] == {"prefill": 1, "decode": 1, "unified": 1}


def test_every_container_of_the_chart_has_been_started(pods: Pods) -> None:
    names = {
        container["name"]
        for kind in ("Deployment", "StatefulSet")
        for owner in of_kind(pods.rendered, kind)
        for container in owner["spec"]["template"]["spec"]["containers"]
    }
    assert names == {*ADDRESSES, "redis"}


def test_helm_test_passes(pods: Pods) -> None:
    (pod,) = of_kind(pods.rendered, "Pod")
    container = pod["spec"]["containers"][0]
    environ = environment_of(pods.rendered, container, secrets=SECRETS, fields={})
    assert environ["ROUTER_URL"] == "http://test-baton-router:80"
    environ["ROUTER_URL"] = URL
    asked = [sys.executable, "-c", *container["args"]]
    done = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert '"chat.completion"' in done.stdout


def test_an_instance_that_ends_leaves_the_registry_at_once(pods: Pods) -> None:
    """The unified one: from here on a request needs a handoff."""
    assert pods.stop("unified") == 0
    wait_until(lambda: len(health()["instances"]) == 2, timeout_s=30, what="an instance that left")


def test_the_api_key_of_the_secret_is_needed(pods: Pods) -> None:
    body = {"prompt": "Hello", "max_tokens": 1}
    assert httpx.post(f"{URL}/v1/completions", json=body).status_code == 401


def test_blocks_travel_through_the_shared_folder(pods: Pods) -> None:
    answers = [complete(f"{number} " + "the owl and the ring " * 8) for number in range(3)]
    assert {answer["baton"]["transport"] for answer in answers} == {"usm"}
    assert list((pods.folder / "run").iterdir()), "the sockets lie in the folder that pods share"


def test_logs_are_json_without_prompt_or_key(pods: Pods) -> None:
    for role in ADDRESSES:
        lines = [line for line in pods.log(role).splitlines() if not line.startswith("ready ")]
        assert all(line.startswith("{") for line in lines)
        assert "owl" not in pods.log(role) and "sk-test" not in pods.log(role)
        assert SECRETS["REDIS_PASSWORD"] not in pods.log(role) and SECRETS["CLUSTER_KEY"] not in pods.log(role)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the Debian package prometheus")
def test_a_real_prometheus_evaluates_every_expression(pods: Pods, tmp_path: Path) -> None:
    (rule,) = of_kind(pods.rendered, "PrometheusRule")
    targets = {role: f"{address}:{8000 if role == 'router' else 7004}" for role, address in ADDRESSES.items()}
    del targets["unified"]
    with Prometheus(tmp_path, rule["spec"]["groups"], targets) as prometheus:
        prometheus.wait_for_scrapes()
        for number in range(6):
            complete(f"{number} " + "of the ring and an owl " * 8)
        prometheus.wait_for_scrapes()
        values = {where: prometheus.value_of(text) for where, text in EXPRESSIONS.items()}
    silent = {where for where, value in values.items() if isnan(value)}
    # Nothing failed, was tried again or was refused, and no alert is due.
    may_be_silent = (
        "alert",
        "baton.json: Replays",
        "baton.json: Refused requests",
        "baton.json: Admission",
        "baton.json: Images",
        "keda: test-baton-unified",
        "keda: test-baton-encode",
    )
    assert not {where for where in silent if not where.startswith(may_be_silent)}
    assert values["vllm.json: Token Throughput A"] > 0
    assert values["baton.json: Received KV bytes, by transport A"] > 0
    assert 0 < values["vllm.json: Time To First Token Latency E"] < 30
    assert 0 <= values["vllm.json: Cache Utilization A"] <= 1


def test_sigterm_drains_and_ends_with_status_0(pods: Pods) -> None:
    """Last in this module: pods end, the instances leave the registry first."""
    for role in ("prefill", "decode"):
        assert pods.pre_stop(role) == 0
        assert httpx.get(f"http://{ADDRESSES[role]}:7004/health").json()["status"] == "drained"
        assert pods.stop(role) == 0
    wait_until(lambda: not health()["instances"], timeout_s=30, what="instances that left")
    assert pods.probe("router", "readinessProbe") == 503
    assert pods.probe("router", "livenessProbe") == 200
    assert pods.stop("router") == 0
