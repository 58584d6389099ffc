"""The chart: strict lint, every variant rendered, every object valid against strict schemas."""

import os
import re
import subprocess
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from tests.helm.chart import (
    CHART,
    HOSTS,
    ROLES,
    ROOT,
    VARIANTS,
    Manifest,
    container_of,
    named,
    objects,
    of_kind,
    pod_of,
    render,
    values_of,
    variant,
    variant_name,
)
from tests.helm.custom_resources import CUSTOM, validate_custom
from tests.helm.kubernetes_schemas import validate_strictly

KUBERNETES = ["1.30", "1.34", kubernetes_validate.latest_version()]
FIRST_DRA_VERSION = "1.34"

every_variant = pytest.mark.parametrize("path", VARIANTS, ids=variant_name)


@every_variant
def test_strict_lint_passes(path: Path | None) -> None:
    report = helm_python.lint(str(CHART), values_of(path), strict=True)
    assert not report["errors"]
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("version", KUBERNETES)
@every_variant
def test_every_object_is_valid(path: Path | None, version: str) -> None:
    if variant_name(path) == "arc-dra" and version == "1.30":
        version = FIRST_DRA_VERSION
    for rendered in render(path):
        if rendered["kind"] not in CUSTOM:
            validate_strictly(rendered, version)


@every_variant
def test_every_custom_resource_is_valid(path: Path | None) -> None:
    for rendered in render(path):
        if rendered["kind"] in CUSTOM:
            validate_custom(rendered)


def test_the_variants_use_every_custom_resource() -> None:
    assert {o["kind"] for path in [*VARIANTS, HOSTS] for o in render(path)} >= set(CUSTOM)


def test_a_misspelt_field_of_a_custom_resource_is_found() -> None:
    scaled = named(render(variant("keda")), "ScaledObject", "-decode")
    wrong = {**scaled, "spec": {**scaled["spec"], "minReplicasCount": 1}}
    with pytest.raises(ValueError, match="minReplicasCount"):
        validate_custom(wrong)


@every_variant
def test_pods_are_locked_down(path: Path | None) -> None:
    for rendered in render(path):
        if rendered["kind"] not in ("Deployment", "StatefulSet", "Pod"):
            continue
        pod = rendered["spec"] if rendered["kind"] == "Pod" else rendered["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        assert not pod.get("hostIPC") and not pod.get("hostNetwork") and not pod.get("hostPID")
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"] + pod.get("initContainers", []):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert set(context["capabilities"]) == (
                {"drop", "add"} if container["name"].startswith("own-") else {"drop"}
            )


@every_variant
def test_every_reference_inside_a_release_resolves(path: Path | None) -> None:
    rendered = render(path)
    names = {(o["kind"], o["metadata"]["name"]) for o in rendered}
    for deployment in of_kind(rendered, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        mounted = {v["name"] for v in pod["volumes"]}
        for container in pod["containers"] + pod.get("initContainers", []):
            assert {m["name"] for m in container["volumeMounts"]} <= mounted
            for source in container.get("envFrom", []):
                assert ("ConfigMap", source["configMapRef"]["name"]) in names
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            ports = {p["name"] for p in pod["containers"][0]["ports"]}
            assert pod["containers"][0][probe]["httpGet"]["port"] in ports
    for scaler in of_kind(rendered, "HorizontalPodAutoscaler") + of_kind(rendered, "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target.get("kind", "Deployment"), target["name"]) in names


def test_the_schema_is_current() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "tools" / "helm_schema.py"), "--check"], check=False)
    assert made.returncode == 0, "run tools/helm_schema.py"


def test_the_readme_is_current_and_every_key_is_described() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "tools" / "helm_readme.py"), "--check"], check=False)
    assert made.returncode == 0, "describe every key in values.yaml and run tools/helm_readme.py"


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"prefil": {"replicas": 2}}, id="misspelt pool"),
        pytest.param({"prefill": {"replica": 2}}, id="misspelt key"),
        pytest.param({"prefill": {"replicas": "two"}}, id="wrong type"),
        pytest.param({"kvTransfer": {"transport": "rdma"}}, id="unknown transport"),
        pytest.param({"kvTransfer": {"checksum": True}}, id="checksum is a mode"),
        pytest.param({"engine": {"gpuMemoryUtilization": 1.5}}, id="out of range"),
        pytest.param({"engine": {"kvCacheMemoryBytes": "4 elephants"}}, id="no size"),
        pytest.param({"decode": {"engine": {"maxModellen": 5}}}, id="misspelt engine setting of a pool"),
        pytest.param({"router": {"settings": {"maxReplays": -1}}}, id="router setting out of range"),
        pytest.param({"router": {"settings": {"rootPath": "llm"}}}, id="router setting of another pattern"),
        pytest.param(
            {
                "monitoring": {"prometheusRule": {"enabled": True}},
                "prefill": {"autoscaling": {"kind": "hpa", "minReplicas": 5, "maxReplicas": 2}},
            },
            id="min above max",
        ),
        pytest.param(
            {"router": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}},
            id="min above max of routers",
        ),
        pytest.param({"prefill": {"autoscaling": {"kind": "hpa"}}}, id="hpa without the rules that record its metrics"),
        pytest.param({"httpRoute": {"enabled": True}}, id="a route without a gateway"),
        pytest.param({"redis": {"bundled": False}}, id="no redis at all"),
        pytest.param({"model": {"source": {"kind": "pvc"}}}, id="a claim without a name"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        objects(values)


def test_every_value_used_in_a_template_stands_in_values() -> None:
    values = values_of(CHART / "values.yaml")
    for template in (CHART / "templates").rglob("*"):
        if template.is_dir():
            continue
        text = template.read_text()
        paths = re.findall(r"\.Values\.([A-Za-z.]+)|\$values\.([A-Za-z.]+)", text)
        paths = [(left or right) for left, right in paths]
        paths += ["router." + path for path in re.findall(r"\$router\.([A-Za-z.]+)", text)]
        paths += ["prefill." + path for path in re.findall(r"\$pool\.([A-Za-z.]+)", text)]
        for path in paths:
            node: Any = values
            for key in path.split("."):
                assert isinstance(node, dict) and key in node, f"{template.name}: {path}"
                node = node[key]


def test_one_card_per_instance_by_resource_name() -> None:
    limits = [container_of(pod_of(render(None), role))["resources"]["limits"] for role in ("prefill", "decode")]
    assert [limit["gpu.intel.com/xe"] for limit in limits] == [1, 1]


def test_instances_belong_to_the_render_group() -> None:
    assert pod_of(render(None), "decode")["securityContext"]["supplementalGroups"] == [109]


def test_dra_claims_a_card_instead() -> None:
    pod = pod_of(render(variant("arc-dra")), "decode")
    assert pod["resourceClaims"][0]["name"] == container_of(pod)["resources"]["claims"][0]["name"] == "gpu"
    assert "gpu.intel.com/xe" not in container_of(pod)["resources"]["limits"]


def test_a_cpu_install_asks_for_no_card() -> None:
    pod = pod_of(render(variant("cpu-minimal")), "prefill")
    assert set(container_of(pod)["resources"]["limits"]) == {"memory"}
    assert "worker-cpu" in container_of(pod)["image"]
    assert "supplementalGroups" not in pod["securityContext"]


def test_no_service_is_named_like_a_prefix_of_our_variables() -> None:
    names = [o["metadata"]["name"] for path in VARIANTS for o in of_kind(render(path), "Service")]
    assert names and not [name for name in names if name == "baton"]


def test_the_longest_release_name_gives_names_that_kubernetes_accepts() -> None:
    values = {"monitoring": {"serviceMonitor": {"enabled": True}}, "unified": {"replicas": 1}}
    names = [o["metadata"]["name"] for o in objects(values, release="r" * 53)]
    assert max(map(len, names)) <= 63


def test_a_pool_may_turn_off_what_is_on_for_all() -> None:
    config = {role: named(render(variant("arc-xe")), "ConfigMap", role)["data"] for role in ("prefill", "decode")}
    assert config["prefill"]["BATON__PREFILL__ENABLE_PREFIX_CACHING"] == "true"
    assert config["decode"]["BATON__DECODE__ENABLE_PREFIX_CACHING"] == "false"


def test_large_numbers_are_written_as_numbers() -> None:
    config = named(objects({"engine": {"kvCacheMemoryBytes": 8589934592}}), "ConfigMap", "decode")["data"]
    assert config["BATON__DECODE__KV_CACHE_MEMORY_BYTES"] == "8589934592"


def test_a_change_of_settings_restarts_that_pool_alone() -> None:
    def checksums(values: dict[str, Any]) -> dict[str, str]:
        rendered = objects(values)
        templates = {r: named(rendered, "Deployment", f"-{r}")["spec"]["template"] for r in ("prefill", "decode")}
        return {role: found["metadata"]["annotations"]["checksum/config"] for role, found in templates.items()}

    before, after = checksums({}), checksums({"decode": {"engine": {"maxNumSeqs": 8}}})
    assert before["prefill"] == after["prefill"]
    assert before["decode"] != after["decode"]


@every_variant
def test_the_grace_period_covers_draining_and_leases(path: Path | None) -> None:
    rendered = render(path)
    for role in ROLES:
        configs = [o for o in of_kind(rendered, "ConfigMap") if o["metadata"]["name"].endswith(f"-{role}")]
        for config in configs:
            drain = float(config["data"][f"BATON__{role.upper()}__DRAIN_TIMEOUT_S"])
            lease = float(config["data"][f"BATON__{role.upper()}__KV_LEASE_S"])
            assert pod_of(rendered, role)["terminationGracePeriodSeconds"] > drain + lease + 5
    pod = pod_of(rendered, "router")
    drain = float(named(rendered, "ConfigMap", "-router")["data"]["BATON__ROUTER__SHUTDOWN_TIMEOUT_S"])
    sleep = container_of(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > drain + sleep


def test_the_availability_of_pools_does_not_decide_the_liveness_of_the_router() -> None:
    router = container_of(pod_of(render(None), "router"))
    assert router["readinessProbe"]["httpGet"]["path"] == "/health"
    assert {router[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {"/metrics"}


def test_usm_shares_the_folder_that_the_setting_names() -> None:
    rendered = render(variant("arc-xe"))
    for role in ("prefill", "decode"):
        pod = pod_of(rendered, role)
        folder = named(rendered, "ConfigMap", f"-{role}")["data"][f"BATON__{role.upper()}__KV_RUN_DIR"]
        (mount,) = [m for m in container_of(pod)["volumeMounts"] if m["mountPath"] == folder]
        (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
        assert volume["hostPath"]["path"] == "/run/baton"


def test_the_password_is_never_written_into_an_object_but_the_secret() -> None:
    for rendered in render(None):
        if rendered["kind"] == "Secret":
            secret = rendered["data"]
    text = str([o for o in render(None) if o["kind"] != "Secret"])
    assert all(value not in text for value in secret.values())


def test_instances_are_reached_by_routers_alone_and_redis_by_the_release() -> None:
    rendered = render(None)
    policy = named(rendered, "NetworkPolicy", "-decode")["spec"]
    (requests,) = [rule for rule in policy["ingress"] if {"port": "rpc"} in rule["ports"]]
    assert requests["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    redis = named(rendered, "NetworkPolicy", "-redis")["spec"]
    assert redis["egress"] == []
    assert redis["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "test"


def test_pods_reach_the_ranks_of_instances_with_several_cards() -> None:
    """They send their parts of blocks from ports that the system chooses."""
    rendered = objects({"decode": {"engine": {"tensorParallelSize": 2}}})
    for role, is_open in (("decode", True), ("prefill", False)):
        rules = named(rendered, "NetworkPolicy", f"-{role}")["spec"]["ingress"]
        (whole,) = [rule for rule in rules if "ports" not in rule] or [None]
        assert (whole is not None) == is_open
        if whole is not None:
            assert whole["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "test"


def test_egress_reaches_what_the_install_needs() -> None:
    def open_ports(path: Path | None) -> set[int]:
        egress = named(render(path), "NetworkPolicy", "-router")["spec"]["egress"]
        return {port["port"] for rule in egress for port in rule.get("ports", [])}

    assert open_ports(None) == {53, 443}
    assert open_ports(variant("external-redis")) == {53, 443, 6380}
    assert open_ports(variant("cpu-minimal")) == {53}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector.o11y:4318/v1/traces", 4318), ("http://collector", 80), ("https://traces.example.com/v1", 443)],
)
def test_egress_reaches_the_collector_of_traces(endpoint: str, port: int) -> None:
    source = {"kind": "hostPath", "hostPath": {"path": "/srv/models/small"}}
    rendered = objects({"tracing": {"otlpTracesEndpoint": endpoint}, "model": {"source": source}})
    for role in ("router", "prefill", "decode"):
        egress = named(rendered, "NetworkPolicy", f"-{role}")["spec"]["egress"]
        assert port in {number["port"] for rule in egress for number in rule.get("ports", [])}


@pytest.mark.parametrize("path", [None, variant("external-redis")], ids=["defaults", "external-redis"])
def test_no_pod_reaches_the_metadata_of_a_cloud(path: Path | None) -> None:
    values = {**values_of(path), "tracing": {"otlpTracesEndpoint": "http://collector"}}
    rendered = objects(values)
    for role in ("router", "prefill", "decode"):
        for rule in named(rendered, "NetworkPolicy", f"-{role}")["spec"]["egress"]:
            if {port["port"] for port in rule.get("ports", [])} == {53}:
                continue  # a node's own DNS cache has a link-local address
            for peer in rule["to"]:
                block = peer.get("ipBlock", {"cidr": "10.0.0.0/8"})
                covers = ip_address("169.254.169.254") in ip_network(block["cidr"])
                assert not covers or "169.254.0.0/16" in block["except"]


def test_prometheus_checks_the_certificate_of_the_router() -> None:
    def settings_of_scrapes(tls: Manifest) -> list[Manifest]:
        monitors = {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor")}
        rendered = objects({"router": {"tls": {"secretName": "cert"}}, "monitoring": {**monitors, "tls": tls}})
        specs = [o["spec"] for o in rendered if o["kind"] in ("PodMonitor", "ServiceMonitor")]
        found = [scrape for spec in specs for scrape in spec.get("podMetricsEndpoints", spec.get("endpoints"))]
        assert [scrape.get("scheme", "http") for scrape in found] == ["https", "http"] * 2
        return [scrape["tlsConfig"] for scrape in found if "tlsConfig" in scrape]

    name = "test-baton-router.llm.svc"
    checked = {"serverName": name, "ca": {"secret": {"name": "cert", "key": "ca.crt"}}}
    assert settings_of_scrapes({}) == [checked] * 2
    other = {"caSecret": "ca", "caKey": "tls.crt", "serverName": "a"}
    assert settings_of_scrapes(other)[0] == {"serverName": "a", "ca": {"secret": {"name": "ca", "key": "tls.crt"}}}
    assert settings_of_scrapes({"caKey": ""})[0] == {"serverName": name}
    assert settings_of_scrapes({"insecureSkipVerify": True})[0] == {"insecureSkipVerify": True}


@pytest.mark.parametrize("password", ["plain", 'a"b', "a\\b$HOME`x`'c d"])
def test_no_argument_of_redis_holds_its_password(tmp_path: Path, password: str) -> None:
    """Its command with a `redis-server` that writes down what it was given."""
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\necho "$@"\ncat\n')
    server.chmod(0o755)
    compose = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]["redis"]["command"]
    (redis,) = named(render(None), "StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]
    for command in (redis["command"], [word.replace("$$", "$") for word in compose]):
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": password, "HOME": "/root"}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=10)
        arguments, *lines = ended.stdout.splitlines()
        assert arguments == "-" and lines[:2] == ['save ""', "appendonly no"]
        name, _, value = lines[2].partition(" ")
        assert name == "requirepass" and value[0] == value[-1] == '"'
        assert re.sub(r"\\(.)", r"\1", value[1:-1]) == password


def test_extra_objects_are_rendered_as_templates() -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-extra"}}
    assert named(objects({"extraObjects": [extra]}), "ConfigMap", "-extra")["metadata"]["name"] == "test-extra"
