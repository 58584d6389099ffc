"""Log lines of ended requests: soon, together, and never later than a query for them."""

import asyncio
import logging
import time
from collections import Counter

import pytest

from baton_serve.services.common.logs import JsonFormatter
from tests.unit.router.conftest import Router, Serve, settle

SAMPLE = "vllm:request_generation_tokens_count"


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.message == "request ended"]


def reported(router: Router) -> float | None:
    return router.metrics.registry.get_sample_value(SAMPLE, {"model_name": "tiny"})


def test_an_ended_request_is_in_the_metrics_and_the_list_as_soon_as_somebody_reads(serve: Serve) -> None:
    async def metrics_first(router: Router) -> None:
        await router.complete(prompt="hello", max_tokens=2)
        assert f'{SAMPLE}{{model_name="tiny"}} 1.0' in (await router.http.get("/metrics")).text
        await router.complete(prompt="hello", max_tokens=3)
        newest, oldest = (await router.http.get("/recent")).json()
        assert (newest["generated_tokens"], oldest["generated_tokens"]) == (3, 2)
        assert reported(router) == 2

    serve(metrics_first)


def test_many_requests_are_logged_without_waiting_and_the_last_ones_when_the_router_stops(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_serve.services.router.requests.request_log._MAX_DELAY_S", 60.0)

    async def scenario(router: Router) -> None:
        for _ in range(16):
            await router.complete(prompt="hello", max_tokens=2)
        await settle()
        assert reported(router) == 16
        await router.complete(prompt="hello", max_tokens=2)

    with caplog.at_level("INFO"):
        serve(scenario, enable_log_requests=True)
    assert len(lines(caplog)) == 17


def test_hundreds_of_requests_that_end_together_are_logged_in_several_turns(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turns = 0, list[int]()

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def scenario(router: Router) -> None:
        monkeypatch.setattr(router.metrics, "ended", lambda lifecycle: turns.append(turn))
        counting = asyncio.create_task(count())
        await asyncio.gather(*[router.complete(prompt="hello", max_tokens=3) for _ in range(100)])
        await settle()
        counting.cancel()

    serve(scenario)
    assert len(turns) == 100
    assert max(Counter(turns).values()) <= 16


def test_a_log_line_has_the_time_of_the_end_and_not_that_of_logging(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    ended = 0.0

    async def scenario(router: Router) -> None:
        nonlocal ended
        await router.complete(prompt="hello", max_tokens=2)
        ended = time.time()
        time.sleep(0.1)  # noqa: ASYNC251 - block the loop, so that the log line is late

    with caplog.at_level("INFO"):
        serve(scenario, enable_log_requests=True)
    (line,) = lines(caplog)
    assert line.created <= ended
    assert f'"time":{round(line.created, 3)}' in JsonFormatter().format(line)
    assert line.msecs == pytest.approx(line.created % 1 * 1e3, abs=1e-6)


def test_requests_are_logged_at_level_info_only_if_that_was_chosen(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(prompt="hello", max_tokens=2)
        router.dispatcher.request_log.flush()

    with caplog.at_level("DEBUG"):
        serve(scenario)
    assert [record.levelname for record in lines(caplog)] == ["DEBUG"]
    caplog.clear()
    with caplog.at_level("DEBUG"):
        serve(scenario, enable_log_requests=True)
    assert [record.levelname for record in lines(caplog)] == ["INFO"]
