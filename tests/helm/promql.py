"""Every PromQL expression of the chart: panels, alerts, recording rules, KEDA queries."""

import json
import re

from tests.helm.chart import CHART, of_kind, render, variant

_METRIC = re.compile(r"\b(?:vllm|baton)[:_][a-z0-9_]+")


def _expressions() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found |= {f"{path.name}: {panel['title']} {t['refId']}": t["expr"] for t in panel["targets"]}
    for rule in of_kind(render(variant("ha")), "PrometheusRule"):
        for group in rule["spec"]["groups"]:
            for number, one in enumerate(group["rules"]):
                found[f"alert: {one['alert']}" if "alert" in one else f"record: {one['record']} {number}"] = one["expr"]
    for scaled in of_kind(render(variant("keda")), "ScaledObject"):
        for number, trigger in enumerate(scaled["spec"]["triggers"]):
            found[f"keda: {scaled['metadata']['name']} {number}"] = trigger["metadata"]["query"]
    return found


EXPRESSIONS = _expressions()


def metrics_of(expression: str) -> set[str]:
    """Names of samples that an expression reads."""
    return set(_METRIC.findall(re.sub(r'"[^"]*"', '""', expression)))
