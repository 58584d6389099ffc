"""The log says when the router can serve requests."""

import pytest

from baton_serve.services.router.cluster.readiness import ReadinessLog
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import record


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.name.endswith(".readiness")]


def test_the_router_is_announced_as_ready_only_when_an_instance_can_answer(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(router: Router) -> None:
        ReadinessLog(router.cluster, url="http://127.0.0.1:8000", names="tiny").start()
        listening = "listening on http://127.0.0.1:8000, waiting for instances of tiny"
        assert messages(caplog) == [listening]
        router.fakes.add(record("decode-0", "decode"))
        await settle()
        ready = "ready: tiny at http://127.0.0.1:8000/v1, page at http://127.0.0.1:8000/"
        assert messages(caplog) == [listening, ready, "Application startup complete."]
        router.fakes["decode-0"].die()
        await settle()
        assert messages(caplog)[3:] == [
            "not ready any more: no instance can generate an answer: empty pools are decode, unified;"
            " registered, but not connected: decode-0"
        ]
        await router.cluster.close()
        assert len(messages(caplog)) == 4, "the stop of the router itself is not reported as a loss"

    with caplog.at_level("INFO"):
        serve(scenario, prefill=1, decode=0)
