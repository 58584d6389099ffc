"""Prefill instances generate the answers while no decode or unified instance is ready."""

from typing import Any

import msgspec
import pytest

from baton_serve.contracts.identity import Generation
from baton_serve.contracts.messages import Decode, Generate, Prefill
from baton_serve.services.router.cluster.readiness import ReadinessLog
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import FakeInstance, record
from tests.unit.router.test_lifecycle import Asked, undisturbed

BODY: dict[str, Any] = {"prompt": "hello world", "max_tokens": 12}
EXPLAIN = {"x-baton-explain": "1"}
LONG_WAIT_S = 5.0


def add_prefill(router: Router) -> FakeInstance:
    """Add the instance as it registers in this version; those of the fixture are of an earlier one."""
    return router.fakes.add(msgspec.structs.replace(record("prefill-9", "prefill"), can_generate=True))


async def explained(router: Router, **body: Any) -> dict[str, Any]:
    answer = await router.http.post("/v1/completions", json=BODY | body, headers=EXPLAIN)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["baton"])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("after", range(7))
def test_a_stream_of_the_last_decode_instance_goes_on_at_a_prefill_instance(serve: Serve, after: int, n: int) -> None:
    async def scenario(router: Router) -> None:
        body = BODY | {"n": n, "logprobs": 2, "seed": 11}
        expected = await router.complete(**body)
        prefill = add_prefill(router)
        await settle()
        decode = router.fakes["decode-0"]
        decode.hold = after
        asked = Asked(router, **body)
        await settle()
        decode.die()
        answer = await asked.answer()
        assert (answer["choices"], answer["usage"]) == (expected["choices"], expected["usage"])
        assert any(isinstance(message, Generate) for message in prefill.assignments())

    # It does not wait: the router has seen a decode instance, so its loss is a fault.
    serve(scenario, prefill=0, instance_wait_s=LONG_WAIT_S)


def test_new_requests_return_to_a_decode_instance_as_soon_as_one_is_ready(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        prefill, decode = add_prefill(router), router.fakes["decode-0"]
        decode.die()
        router.fakes.forget("decode-0")
        await settle()
        assert await undisturbed(router, **BODY) == expected
        baton = await explained(router)
        assert (baton["decision"], baton["decode"], baton.get("prefill")) == ("prefill_fallback", "prefill-9", None)
        prefill.hold = 3
        running = Asked(router, **BODY)
        await settle()
        new = router.fakes.add(msgspec.structs.replace(decode.record, generation=Generation(2)))
        await settle()
        prefill.resume()
        assert await running.texts() == expected, "a running stream ends where it is"
        assert not new.assignments()
        baton = await explained(router)
        assert (baton["decision"], baton["prefill"], baton["decode"]) == ("disaggregated", "prefill-9", "decode-0")
        assert isinstance(new.assignments()[-1], Decode) and isinstance(prefill.assignments()[-1], Prefill)
        metrics = (await router.http.get("/metrics")).text
        assert 'baton:placements_total{decision="prefill_fallback"' in metrics.replace('model_name="tiny",', "")

    serve(scenario, prefill=0, instance_wait_s=LONG_WAIT_S)


def test_a_stream_that_is_cancelled_or_stopped_leaves_nothing_on_the_prefill_instance(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        prefill = add_prefill(router)
        await settle()
        text = (await undisturbed(router, **BODY))[0]
        stopped = await router.complete(**BODY, stop=[text[3]])
        assert stopped["choices"][0]["text"] == text[:3]
        await settle()
        assert prefill.jobs == {} and prefill.cancels()

    serve(scenario, prefill=0, decode=0)


def test_a_router_that_has_just_started_first_waits_for_a_decode_instance(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        prefill = add_prefill(router)
        await settle()
        asked = Asked(router, **BODY)
        await settle()
        assert (await router.http.get("/health")).status_code == 503
        assert not prefill.assignments()
        router.fakes.add(record("decode-0", "decode"))
        await asked.texts()
        assert isinstance(prefill.assignments()[-1], Prefill)

    serve(scenario, prefill=0, decode=0, instance_wait_s=LONG_WAIT_S)


def test_if_none_comes_it_answers_with_prefill_instances_and_says_so(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(router: Router) -> None:
        ReadinessLog(router.cluster, url="http://127.0.0.1:8000", names="tiny").start()
        add_prefill(router)
        await settle()
        baton = await explained(router)
        assert baton["decision"] == "prefill_fallback"
        health = await router.http.get("/health")
        assert health.status_code == 200 and health.json()["pools"]["decode"] == 0
        assert "prefill instances generate the answers" in health.json()["warning"]
        router.fakes.add(record("unified-0", "unified"))
        await settle()
        assert (await router.http.get("/health")).json()["warning"] is None
        assert (await explained(router))["decision"] == "unified"
        router.fakes["unified-0"].die()
        router.fakes["prefill-9"].die()
        await settle()
        assert (await router.http.get("/health")).status_code == 503
        logged = [entry.getMessage().split(":")[0] for entry in caplog.records if entry.name.endswith(".readiness")]
        lines = [line for line in logged if line != "Application startup complete."]
        assert lines[1:] == [
            "ready",
            "no decode or unified instance is ready",
            "new requests are decoded by decode or unified instances again",
            "no decode or unified instance is ready",
            "not ready any more",
        ]

    with caplog.at_level("INFO"):
        serve(scenario, prefill=0, decode=0)


def test_with_decode_fallback_fail_a_request_gets_503(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        prefill = add_prefill(router)
        await settle()
        assert (await undisturbed(router, **BODY))[0]
        router.fakes["decode-0"].die()
        router.fakes.forget("decode-0")
        await settle()
        answer = await router.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 503 and "decode" in answer.json()["error"]["message"]
        assert (await router.http.get("/health")).status_code == 503
        assert not any(isinstance(message, Generate) for message in prefill.assignments())

    serve(scenario, prefill=0, decode_fallback="fail")


def test_prefill_instances_of_earlier_versions_do_not_generate(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["decode-0"].die()
        router.fakes.forget("decode-0")
        await settle()
        assert (await router.http.post("/v1/completions", json=BODY)).status_code == 503
        assert (await router.http.get("/health")).status_code == 503

    serve(scenario, prefill=2)
