"""Results of `baton-bench handoff` from times and metrics."""

import pytest

from baton_serve.bench.serving.handoff import added_s, exposed_s
from baton_serve.bench.serving.load_client import RequestOutcome


def test_the_second_token_is_compared_with_those_after_it() -> None:
    outcomes = [
        RequestOutcome(itls_s=[0.005, 0.003, 0.002, 0.004]),
        RequestOutcome(itls_s=[0.001], output_tokens=2),
        RequestOutcome(itls_s=[0.1, 0.1, 0.1], error="lost"),
    ]
    assert added_s(outcomes) == [pytest.approx(0.002)]


def test_the_exposed_part_is_the_mean_of_all_series() -> None:
    name = "baton:handoff_exposed_seconds"
    lines = ["# HELP x", f'{name}_bucket{{le="1"}} 9', f'{name}_sum{{a="1"}} 0.5', f'{name}_sum{{a="2"}} 0.1']
    text = "\n".join([*lines, f"{name}_count 3", ""])
    assert exposed_s(text) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="nothing was handed off"):
        exposed_s("")
