"""Stages that `baton-bench ready` reads from the logs of the processes."""

import json

import pytest

from baton_serve.bench.serving.ready import StartupRun, rows, stages_of


def line(at: float, logger: str, event: str) -> str:
    return json.dumps({"time": at, "level": "debug", "logger": logger, "event": event})


def test_of_several_instances_the_last_one_counts() -> None:
    lines = [
        "",
        line(
            101.0,
            "baton_serve.services.router.cluster.readiness",
            "listening on http://127.0.0.1:8000, waiting for instances of baton-demo",
        ),
        line(102.0, "baton_serve.services.instance.instance_process", "start: imported"),
        line(102.5, "baton_serve.services.instance.instance_process", "start: imported"),
        line(102.6, "baton_serve.services.instance.engine_builder", "start: loading weights"),
        line(102.7, "baton_serve.services.instance.engine_builder", "start: packing weights"),
        line(103.0, "baton_serve.services.router.cluster.cluster", "instance decode-0 is ready: decode"),
        line(103.5, "baton_serve.services.router.cluster.cluster", "instance prefill-0 is ready: prefill"),
        "Baton 0.1.0 serves",
    ]
    assert stages_of(lines, since=100.0) == {
        "router serves": 1.0,
        "instances begin, everything imported": 2.5,
        "weights loaded": pytest.approx(2.7),
        "registered": 3.5,
    }


def test_values_are_medians_and_the_limit_is_of_the_same_turns() -> None:
    turns = [StartupRun(seconds, {"registered": seconds - 0.1}) for seconds in (4.0, 2.0, 8.0)]
    found = {row.case: row for row in rows("model", turns, [1.0, 1.0, 2.0], [0.0, 0.0, 0.0])}
    ready = found["model: ready"]
    assert (ready.value, ready.limit, ready.ratio) == (4.0, 1.0, 0.25)
    assert found["model: registered"].value == pytest.approx(3.9)
    assert found["import torch"].value == 1.0
