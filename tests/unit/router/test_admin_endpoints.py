"""The endpoints for operators: all instances act, and what an instance refuses reaches the client."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.messages import EngineCommand
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.cluster.cache_reset_and_profile import EngineActions
from baton_serve.services.router.http.admin_endpoints import ACTIONS, REFUSED
from baton_serve.services.router.protocol.errors import DeadlineError, UnavailableError
from baton_serve.services.router.quota.api_keys import ApiKeys
from tests.unit.router.conftest import Router, Serve, settle

ON: dict[str, Any] = {"enable_admin_endpoints": True}


def commands(router: Router, instance: str) -> list[str]:
    return [m.action for m in router.fakes[instance].received if isinstance(m, EngineCommand)]


def test_every_instance_executes_an_action(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for action in ACTIONS:
            for model in ({}, {"model": "tiny"}):
                answer = await router.http.post(f"/{action}", params=model)
                assert answer.status_code == 200, answer.text
                assert answer.json() == {"instances": dict.fromkeys(("prefill-0", "decode-0"), f"did {action}")}
        assert commands(router, "prefill-0") == commands(router, "decode-0") == [a for a in ACTIONS for _ in range(2)]
        assert (await router.http.post("/reset_prefix_cache", params={"model": "nobody"})).status_code == 404

    serve(scenario, **ON)


def test_nobody_is_an_operator_unless_the_router_allows_it(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for path in (*ACTIONS, *REFUSED, "sleep", "wake_up", "update_weights_from_disk"):
            answer = await router.http.post(f"/{path}")
            assert answer.status_code == 404 and "--enable-admin-endpoints" in answer.text, path
        assert (await router.http.get("/is_sleeping")).status_code == 404
        assert commands(router, "prefill-0") == []

    serve(scenario)


def test_operators_need_an_api_key_and_foreign_pages_are_refused(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        key = {"authorization": "Bearer sk-1"}
        assert (await router.http.post("/reset_prefix_cache")).status_code == 401
        for origin, status in (("https://evil.example", 403), ("https://mine.example", 200)):
            answer = await router.http.post("/reset_prefix_cache", headers=key | {"origin": origin})
            assert answer.status_code == status, origin
        assert commands(router, "prefill-0") == ["reset_prefix_cache"]

    serve(scenario, keys=["sk-1"], allowed_origins=["https://mine.example"], **ON)


def test_one_of_several_owners_cannot_stop_the_service_for_the_others(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        key = {"authorization": "Bearer sk-1"}
        for path in (*ACTIONS, *REFUSED, "sleep", "wake_up", "update_weights_from_disk"):
            answer = await router.http.post(f"/{path}", json={"model_path": "/w"}, headers=key)
            assert answer.status_code == 403 and "operator=true" in answer.text, path
        assert (await router.http.get("/is_sleeping", headers=key)).status_code == 403
        for path in ("load", "unload"):
            body = {"lora_name": "a", "lora_path": "/a"}
            answer = await router.http.post(f"/v1/{path}_lora_adapter", json=body, headers=key)
            assert answer.status_code == 403 and "operator=true" in answer.text, path
        assert commands(router, "prefill-0") == []

    serve(scenario, keys=["sk-1", "sk-2"], allow_runtime_lora_updating=True, **ON)


def test_an_operator_is_the_only_owner_or_one_whose_line_says_so(tmp_path: Path) -> None:
    def operators(text: str, *keys: str) -> list[bool]:
        file = tmp_path / "keys"
        file.write_text(text)
        found = ApiKeys(keys, file=str(file) if text else None)
        callers = [found.caller(f"Bearer {name}") for name in ("sk-a", "sk-b")]
        return [one.is_operator for one in callers if one is not None]

    assert operators("") == [True, True]
    assert operators("", "sk-a") == [True]
    assert operators("", "sk-a", "sk-b") == [False, False]
    assert operators("sk-a name=me\nsk-b name=me") == [True, True]
    assert operators("sk-a operator=true\nsk-b operator=false") == [True, False]
    with pytest.raises(ConfigurationError, match="operator true or false"):
        operators("sk-a operator=1")


def test_actions_that_instances_cannot_do_are_refused_with_the_reason(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for name, reason in REFUSED.items():
            answer = await router.http.post(f"/{name}", json={"level": 1})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_endpoint")
            assert reason in answer.json()["error"]["message"]

    serve(scenario, **ON)


def test_the_error_of_an_instance_a_loss_and_a_silence_are_reported(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        decode = router.fakes["decode-0"]
        decode.command_error = "the profiler is running"
        refused = await router.http.post("/start_profile")
        assert refused.status_code == 400 and "decode-0: the profiler is running" in refused.text
        decode.command_error = None
        with pytest.raises(DeadlineError, match="decode-0"):
            await EngineActions(router.cluster, timeout_s=0.05).run(router.cluster.workers(), "start_profile")
        asking = asyncio.create_task(
            EngineActions(router.cluster, timeout_s=9.0).run(router.cluster.workers(), "start_profile")
        )
        await settle()
        decode.die()
        with pytest.raises(UnavailableError, match="decode-0"):
            await asking
        router.fakes["prefill-0"].die()
        await settle()
        assert (await router.http.post("/start_profile")).status_code == 503

    serve(scenario, **ON)


def test_a_model_that_computes_vectors_has_nothing_to_reset(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        assert (await router.http.post("/reset_prefix_cache")).status_code == 503

    profile = PoolingProfile(tasks=["embed"], dimensions=3)
    serve(scenario, prefill=0, decode=0, unified=1, pooling=profile, **ON)
