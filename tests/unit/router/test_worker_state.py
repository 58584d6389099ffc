"""The router's state of one instance."""

import pytest

from baton_serve.contracts.identity import Generation, RequestId
from baton_serve.contracts.instance import Load
from baton_serve.contracts.messages import LoadReport
from baton_serve.services.router.cluster.worker_state import (
    RECENT_LOAD_DECAY_S,
    UNCERTAINTY_DOUBLING_S,
    LoadEstimate,
    WorkerState,
)
from baton_serve.services.router.placement.block_index import Match
from baton_serve.services.router.placement.circuit_breaker import FAILURE_THRESHOLD, MIN_OPEN_S
from tests.unit.router.fakes import record


def test_the_count_of_recently_computed_tokens_decays() -> None:
    worker = WorkerState(record("p0", "prefill"))
    assert worker.candidate(Match(), now=5.0).turnover == 0
    worker.assign(RequestId("a"), LoadEstimate(handler=None, prefill_tokens=200, sequences=1, blocks=50))  # type: ignore[arg-type]
    # The cache holds 100 blocks of 4 tokens.
    assert worker.candidate(Match(), now=5.0).turnover == pytest.approx(0.5)
    worker.release(RequestId("a"))
    assert worker.candidate(Match(), now=5.0 + RECENT_LOAD_DECAY_S).turnover == pytest.approx(0.5 / 2.71828, rel=1e-3)


def test_only_the_lease_of_the_probe_ends_the_probe_of_a_half_open_circuit() -> None:
    worker = WorkerState(record("p0", "prefill"))
    old, probe = (
        worker.assign(RequestId(name), LoadEstimate(handler=None, prefill_tokens=1, sequences=1, blocks=1))  # type: ignore[arg-type]
        for name in ("old", "probe")
    )
    for _ in range(FAILURE_THRESHOLD):
        worker.circuit_breaker.failed(0.0)
    worker.circuit_breaker.begin_attempt(probe.request_id, MIN_OPEN_S)
    old.release()
    assert not worker.circuit_breaker.allows(MIN_OPEN_S)
    probe.release()
    assert worker.circuit_breaker.allows(MIN_OPEN_S)


def test_what_an_idle_instance_showed_long_ago_is_doubted() -> None:
    worker = WorkerState(record("d0", "decode"))
    assert worker.candidate(Match(), now=1e6).step_uncertainty == 1.0, "it was never asked"

    def report(running: int, now: float, rate: float = 1000.0) -> None:
        load = Load(free_blocks=9, total_blocks=9, running=running, prefill_tokens_per_s=rate, decode_step_s=0.05)
        worker.report(LoadReport(instance=worker.record.instance, generation=Generation(1), load=load), now)

    def doubts(now: float) -> tuple[float, float]:
        found = worker.candidate(Match(), now)
        return found.rate_uncertainty, found.step_uncertainty

    report(0, 0.0)
    assert doubts(0.0) == (1.0, 1.0)
    assert doubts(UNCERTAINTY_DOUBLING_S) == (2.0, 2.0)
    report(1, UNCERTAINTY_DOUBLING_S)
    assert doubts(3 * UNCERTAINTY_DOUBLING_S) == (8.0, 1.0), "a sequence runs"
    report(0, 3 * UNCERTAINTY_DOUBLING_S, rate=500.0)
    assert doubts(4 * UNCERTAINTY_DOUBLING_S) == (2.0, 8.0)
    assert doubts(1e9) == (1024.0, 1024.0)
