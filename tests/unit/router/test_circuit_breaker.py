from baton_serve.contracts.identity import RequestId
from baton_serve.services.router.placement.circuit_breaker import (
    FAILURE_THRESHOLD,
    MIN_OPEN_S,
    CircuitBreaker,
    RetryBudget,
)
from tests.unit.router.conftest import Router, Serve


def test_a_request_that_began_before_the_probe_ends_without_ending_the_probe() -> None:
    circuit_breaker = CircuitBreaker()
    circuit_breaker.begin_attempt(RequestId("old"), 0.0)
    for _ in range(FAILURE_THRESHOLD):
        circuit_breaker.failed(0.0)
    circuit_breaker.begin_attempt(RequestId("probe"), MIN_OPEN_S)
    circuit_breaker.abandon_attempt(RequestId("old"))
    assert not circuit_breaker.allows(MIN_OPEN_S), "the probe still runs"
    circuit_breaker.abandon_attempt(RequestId("probe"))
    assert circuit_breaker.allows(MIN_OPEN_S)


def test_a_circuit_opens_after_failures_in_a_row_and_one_request_tries_again() -> None:
    circuit_breaker = CircuitBreaker()
    for _ in range(FAILURE_THRESHOLD - 1):
        circuit_breaker.failed(0.0)
    circuit_breaker.succeeded()
    for _ in range(FAILURE_THRESHOLD):
        assert circuit_breaker.allows(0.0)
        circuit_breaker.failed(0.0)
    assert circuit_breaker.state(0.0) == "open" and not circuit_breaker.allows(MIN_OPEN_S / 2)
    assert circuit_breaker.allows(MIN_OPEN_S)
    circuit_breaker.begin_attempt(RequestId("r"), MIN_OPEN_S)
    assert not circuit_breaker.allows(MIN_OPEN_S), "one at a time"
    circuit_breaker.failed(MIN_OPEN_S)
    assert not circuit_breaker.allows(2 * MIN_OPEN_S), "the pause grows"
    assert circuit_breaker.allows(3 * MIN_OPEN_S)
    circuit_breaker.begin_attempt(RequestId("r"), 3 * MIN_OPEN_S)
    circuit_breaker.succeeded()
    assert circuit_breaker.state(3 * MIN_OPEN_S) == "closed"


def test_retries_are_a_share_of_requests() -> None:
    budget = RetryBudget(0.1)
    while budget.take_retry(0.0):
        pass
    for _ in range(21):
        budget.record_request()
    assert [budget.take_retry(0.0) for _ in range(3)] == [True, True, False]
    assert budget.take_retry(1.0), "and a few each second"
    assert not RetryBudget(0.0).take_retry(0.0)


def test_an_instance_that_keeps_failing_is_left_alone(serve: Serve) -> None:
    async def test(router: Router) -> None:
        router.fakes["decode-0"].refuses = "internal"
        for _ in range(12):
            await router.complete(prompt="abcdefgh", max_tokens=3)
        failed = len(router.fakes["decode-0"].assignments())
        assert failed == FAILURE_THRESHOLD
        assert len(router.fakes["decode-1"].assignments()) == 12

    serve(test, decode=2)


def test_without_a_budget_a_refusal_reaches_the_client(serve: Serve) -> None:
    async def test(router: Router) -> None:
        router.fakes["decode-0"].refuses = "overloaded"
        answer = await router.http.post("/v1/completions", json={"prompt": "abcdefgh", "max_tokens": 3})
        assert answer.status_code == 429
        assert len(router.fakes["decode-0"].assignments()) == 1

    serve(test, decode=1, retry_budget=0.0)
