"""The chart as the tests see it: rendered objects, and the environment that Kubernetes would give a container."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
HOSTS = CHART / "ci" / "hosts.yaml"
"""A variant whose pools are not all Deployments: test_hosts.py."""
VARIANTS = [None, *sorted({*(CHART / "ci").glob("*.yaml")} - {HOSTS})]
ROLES = ("prefill", "decode", "unified", "encode")

Manifest = dict[str, Any]


def variant_name(variant: Path | None) -> str:
    return variant.stem if variant else "defaults"


def variant(name: str) -> Path:
    return CHART / "ci" / f"{name}.yaml"


def values_of(path: Path | None) -> Manifest:
    return dict(yaml.safe_load(path.read_text())) if path else {}


def texts(values: Manifest, release: str = "test", *, revision: int = 1) -> dict[str, str]:
    """Rendered files by template, without NOTES."""
    files = helm_python.Chart.load(str(CHART)).render(values=values, name=release, namespace="llm", revision=revision)
    return {name: text for name, text in files.items() if not name.endswith(".txt")}


def objects(values: Manifest, release: str = "test", *, revision: int = 1) -> list[Manifest]:
    rendered = texts(values, release, revision=revision).values()
    documents = [document for text in rendered for document in yaml.safe_load_all(text)]
    return [document for document in documents if document]


@cache
def render(path: Path | None) -> list[Manifest]:
    return objects(values_of(path))


def of_kind(rendered: list[Manifest], kind: str) -> list[Manifest]:
    return [o for o in rendered if o["kind"] == kind]


def named(rendered: list[Manifest], kind: str, suffix: str) -> Manifest:
    (found,) = [o for o in of_kind(rendered, kind) if o["metadata"]["name"].endswith(suffix)]
    return found


def pod_of(rendered: list[Manifest], component: str) -> Manifest:
    return dict(named(rendered, "Deployment", f"-{component}")["spec"]["template"]["spec"])


def container_of(pod: Manifest) -> Manifest:
    return dict(pod["containers"][0])


def environment_of(
    rendered: list[Manifest], container: Manifest, *, secrets: dict[str, str], fields: dict[str, str]
) -> dict[str, str]:
    """Return the environment as the kubelet builds it: ConfigMaps, then `env` in order, where $(NAME) refers to an
    earlier variable."""
    environ: dict[str, str] = {}
    for source in container.get("envFrom", []):
        name = source["configMapRef"]["name"]
        environ |= next(o["data"] for o in of_kind(rendered, "ConfigMap") if o["metadata"]["name"] == name)
    for variable in container.get("env", []):
        if "value" in variable:
            known = dict(environ)
            expanded = re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), variable["value"])  # noqa: B023
            environ[variable["name"]] = expanded
        elif "secretKeyRef" in variable["valueFrom"]:
            environ[variable["name"]] = secrets[variable["valueFrom"]["secretKeyRef"]["key"]]
        else:
            environ[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    return environ
