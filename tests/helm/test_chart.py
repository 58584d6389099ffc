"""The chart: strict lint, every variant rendered, every object valid against Kubernetes' own strict schemas."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
VARIANTS = [None, *sorted((CHART / "ci").glob("*.yaml"))]
KUBERNETES = ["1.30", "1.34", kubernetes_validate.latest_version()]
CUSTOM = {"ScaledObject", "PodMonitor", "PrometheusRule", "HTTPRoute"}


def values_of(variant: Path | None) -> dict[str, Any]:
    return dict(yaml.safe_load(variant.read_text())) if variant else {}


@cache
def render(variant: Path | None) -> list[dict[str, Any]]:
    return objects(values_of(variant))


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    files = helm_python.Chart.load(str(CHART)).render(values=values)
    documents = [d for name, text in files.items() if not name.endswith(".txt") for d in yaml.safe_load_all(text)]
    return [document for document in documents if document]


def named(rendered: list[dict[str, Any]], kind: str, suffix: str) -> dict[str, Any]:
    (found,) = [o for o in rendered if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]
    return found


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.stem if v else "defaults")
def test_strict_lint_passes(variant: Path | None) -> None:
    report = helm_python.lint(str(CHART), values_of(variant), strict=True)
    assert not report["errors"]
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.stem if v else "defaults")
def test_every_object_is_valid(variant: Path | None, version: str) -> None:
    if variant and variant.stem == "arc-dra" and version == "1.30":
        version = "1.34"  # resource.k8s.io/v1 exists from 1.34 on
    for rendered in render(variant):
        if rendered["kind"] not in CUSTOM:
            kubernetes_validate.validate(rendered, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.stem if v else "defaults")
def test_pods_are_locked_down(variant: Path | None) -> None:
    for rendered in render(variant):
        if rendered["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = rendered["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_schema_is_current() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "tools" / "helm_schema.py"), "--check"], check=False)
    assert made.returncode == 0, "run tools/helm_schema.py"


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"prefil": {"replicas": 2}}, id="misspelt pool"),
        pytest.param({"prefill": {"replica": 2}}, id="misspelt key"),
        pytest.param({"prefill": {"replicas": "two"}}, id="wrong type"),
        pytest.param({"kvTransfer": {"transport": "rdma"}}, id="unknown transport"),
        pytest.param({"engine": {"gpuMemoryUtilization": 1.5}}, id="out of range"),
        pytest.param({"decode": {"engine": {"maxModellen": 5}}}, id="misspelt engine setting of a pool"),
        pytest.param(
            {"prefill": {"autoscaling": {"kind": "hpa", "minReplicas": 5, "maxReplicas": 2}}}, id="min above max"
        ),
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
        for path in re.findall(r"(?:\$|\$root|\.root)?\.Values\.([A-Za-z.]+)", template.read_text()):
            node: Any = values
            for key in path.split("."):
                assert isinstance(node, dict) and key in node, f"{template.name}: .Values.{path}"
                node = node[key]


def test_one_card_per_instance_by_resource_name() -> None:
    limits = [
        named(render(None), "Deployment", role)["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        for role in ("prefill", "decode")
    ]
    assert [limit["gpu.intel.com/xe"] for limit in limits] == [1, 1]


def test_dra_claims_a_card_instead() -> None:
    pod = named(render(CHART / "ci" / "arc-dra.yaml"), "Deployment", "decode")["spec"]["template"]["spec"]
    assert pod["resourceClaims"][0]["name"] == pod["containers"][0]["resources"]["claims"][0]["name"] == "gpu"
    assert "gpu.intel.com/xe" not in pod["containers"][0]["resources"]["limits"]


def test_a_cpu_install_asks_for_no_card() -> None:
    pod = named(render(CHART / "ci" / "cpu-minimal.yaml"), "Deployment", "prefill")["spec"]["template"]["spec"]
    assert set(pod["containers"][0]["resources"]["limits"]) == {"memory"}
    assert "worker-cpu" in pod["containers"][0]["image"]


def test_no_service_is_named_like_a_prefix_of_our_variables() -> None:
    names = [o["metadata"]["name"] for variant in VARIANTS for o in render(variant) if o["kind"] == "Service"]
    assert names and not [name for name in names if name == "baton"]
