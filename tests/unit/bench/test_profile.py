"""CPU time of a transfer by thread, from samples of it."""

import os

import pytest

from baton_serve.bench.transfer.hosts_producer import thread_seconds
from baton_serve.bench.transfer.profile import rows_of


def test_the_work_of_both_ends_bounds_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    times = [{"consumer, copy": 0.3 + more, "producer, loop": 0.1, "idle": 0.0} for more in (0.0, 0.1, 5.0)]
    rows = rows_of("case", 2_000_000_000, [(0.5, times[0]), (0.4, times[1]), (9.0, times[2])])
    assert [(row.case, round(row.value, 6), row.unit) for row in rows] == [
        ("case: consumer, copy", 200.0, "ms/GB"),
        ("case: producer, loop", 50.0, "ms/GB"),
        ("case: both ends", 250.0, "ms/GB"),
        ("case", 5.0, "GB/s"),
    ]
    assert rows[-1].limit == pytest.approx(8.0) and rows[-1].ratio == pytest.approx(0.625)


def test_the_threads_of_this_process_are_counted_by_name() -> None:
    before = thread_seconds()["MainThread"]
    sum(range(1_000_000))
    assert thread_seconds()["MainThread"] > before
