"""Values and limits that `baton-bench engine` measures alternately."""

import argparse
from collections.abc import Iterator

import pytest
import torch

from baton_serve.bench.micro import engine
from baton_serve.bench.micro.device_speeds import DeviceSpeeds
from baton_serve.bench.micro.engine import InterleavedRuns


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Of products, one measurement after another."""
    found: list[float] = []
    monkeypatch.setattr(engine, "measure_limits", lambda target: DeviceSpeeds(1.0, found.pop(0)))
    yield found
    assert not found


def test_each_value_stands_beside_the_limits_around_it(speeds: list[float]) -> None:
    speeds += [1.0, 10.0, 30.0, 50.0, 10.0]
    turns = InterleavedRuns(
        argparse.Namespace(rounds=3, tensor_parallel_size=1, pipeline_parallel_size=1), torch.device("cpu")
    )
    values = iter([10.0, 30.0, 60.0])
    taken = turns(lambda: next(values), lambda limits: limits.product, less_is_better=False)
    assert (taken.value, taken.limit) == (30.0, 30.0)
    assert taken.ratio == pytest.approx(0.75)  # of 10 / 20, 30 / 40 and 60 / 30
    assert taken.quartiles == pytest.approx((0.625, 1.375))


def test_where_less_is_better_the_limit_is_divided_by_the_value(speeds: list[float]) -> None:
    speeds += [1.0, 2.0, 2.0]
    turns = InterleavedRuns(
        argparse.Namespace(rounds=1, tensor_parallel_size=1, pipeline_parallel_size=1), torch.device("cpu")
    )
    taken = turns(lambda: 4.0, lambda limits: limits.product, less_is_better=True)
    assert taken.ratio == 0.5 and taken.quartiles is None
