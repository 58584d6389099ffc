"""The alert BatonNoHandoffs, evaluated by Prometheus' own test runner on series of samples."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import of_kind, render, variant

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs the Debian package prometheus")

NO_LONG_REQUESTS, REQUESTS = "0x20", "0+5x20"
"""Samples of a counter, one for each minute."""


def evaluate(folder: Path, *, due: list[str], completed: list[str], fires_for: list[str]) -> None:
    """Check which models have the alert after 10 minutes; item N of `due` and `completed` are of the Nth model."""
    (rule,) = of_kind(render(variant("ha")), "PrometheusRule")
    alerts = [
        one for group in rule["spec"]["groups"] for one in group["rules"] if one.get("alert") == "BatonNoHandoffs"
    ]
    assert len(alerts) == 1
    namespace, pod = "llm", f"{rule['metadata']['name']}-router-0"
    series: list[dict[str, Any]] = []
    for name, samples in (("due", due), ("completed", completed)):
        for number, values in enumerate(samples):
            labels = f'namespace="{namespace}",pod="{pod}",model_name="model-{number}"'
            series.append({"series": f"baton:handoffs_{name}_total{{{labels}}}", "values": values})
    summary = "Prompts of {} need a handoff from prefill to decode, and none is completed"
    expected = [
        {
            "exp_labels": {"severity": "warning", "namespace": namespace, "model_name": model},
            "exp_annotations": {"summary": summary.format(model)},
        }
        for model in fires_for
    ]
    check = {"eval_time": "10m", "alertname": "BatonNoHandoffs", "exp_alerts": expected}
    test = {"interval": "1m", "input_series": series, "alert_rule_test": [check]}
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": alerts}]}))
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    command = ["promtool", "test", "rules", str(folder / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_fires_if_handoffs_are_due_and_none_is_completed(tmp_path: Path) -> None:
    evaluate(tmp_path, due=[REQUESTS], completed=["0x20"], fires_for=["model-0"])


def test_it_is_silent_while_handoffs_are_completed(tmp_path: Path) -> None:
    evaluate(tmp_path, due=[REQUESTS], completed=["0+1x20"], fires_for=[])


def test_requests_that_are_too_short_raise_no_alert(tmp_path: Path) -> None:
    evaluate(tmp_path, due=[NO_LONG_REQUESTS], completed=["0x20"], fires_for=[])


def test_a_single_request_that_ended_before_its_handoff_raises_no_alert(tmp_path: Path) -> None:
    evaluate(tmp_path, due=["0x7 1x13"], completed=["0x20"], fires_for=[])


def test_a_model_whose_handoffs_work_does_not_hide_another_one(tmp_path: Path) -> None:
    evaluate(tmp_path, due=[REQUESTS, REQUESTS], completed=["0+5x20", "0x20"], fires_for=["model-1"])
