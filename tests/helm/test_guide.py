"""The guide in docs/guide names alerts, values, metrics and commands that exist."""

import re
from typing import Any

from baton_serve.services.cli import COMMANDS
from tests.helm.chart import CHART, ROOT, of_kind, pod_of, render, values_of, variant
from tests.helm.promql import EXPRESSIONS, metrics_of

PAGES = [CHART / "RUNBOOK.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
PAGE = "\n".join(page.read_text() for page in PAGES)
CODE = re.findall(r"`([^`\n]+)`", PAGE)


def test_every_values_key_that_is_named_exists() -> None:
    values = values_of(CHART / "values.yaml")
    for text in CODE:
        path = re.fullmatch(r"((?:[a-z][A-Za-z]+\.)+[a-z][A-Za-z]+)(?:[:=].*)?", text)
        if path and path[1].split(".")[0] in values:
            node: Any = values
            for key in path[1].split("."):
                assert isinstance(node, dict) and key in node, text
                node = node[key]


def test_every_metric_that_is_named_is_used_by_a_dashboard_or_rule() -> None:
    known = {name for text in EXPRESSIONS.values() for name in metrics_of(text)}
    (rule,) = of_kind(render(variant("ha")), "PrometheusRule")
    known |= {one["record"] for group in rule["spec"]["groups"] for one in group["rules"] if "record" in one}
    named = {name for text in CODE if not text.startswith("baton ") for name in metrics_of(text)}
    assert named and named <= known


def test_every_command_is_one() -> None:
    assert {words for words in re.findall(r"\bbaton (\w[\w-]*)", " ".join(CODE) + "baton doctor")} <= set(COMMANDS)


def test_the_example_for_two_arc_nodes_renders_prefill_and_decode_on_different_nodes() -> None:
    rendered = render(ROOT / "examples" / "two-arc-nodes.yaml")
    nodes = {role: pod_of(rendered, role)["nodeSelector"]["baton-role"] for role in ("prefill", "decode")}
    assert nodes == {"prefill": "prefill", "decode": "decode"}
