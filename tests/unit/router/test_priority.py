"""Priority of requests, and the keys that may set it."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.batch.line_client import LOWEST_PRIORITY
from baton_serve.services.router.main import api_keys, router_load
from baton_serve.services.router.protocol.caller import ANONYMOUS, Caller
from baton_serve.services.router.protocol.errors import PermissionDeniedError
from baton_serve.services.router.quota.api_keys import ApiKeys, allowed
from baton_serve.services.router.settings import RouterSettings
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.test_pooling import EMBEDS, WORKERS

KEYS = "team name=team\nurgent min_priority=-5\nbatch min_priority=10\n"
DEFAULTS = Caller(min_priority=0)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def with_keys(router: Router, folder: Path) -> None:
    (folder / "keys").write_text(KEYS)
    router.app.keys = ApiKeys(file=str(folder / "keys"), defaults=DEFAULTS)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_key_cannot_go_before_others_unless_its_line_says_so(serve: Serve, tmp_path: Path, path: str) -> None:
    async def scenario(router: Router) -> None:
        with_keys(router, tmp_path)
        asked = {
            "/v1/completions": {"prompt": "hello", "max_tokens": 1},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
            "/v1/responses": {"input": "hello", "max_output_tokens": 1},
        }[path]
        for key, priority, status in (
            ("team", -1, 403),
            ("team", 0, 200),
            ("team", 3, 200),
            ("urgent", -5, 200),
            ("urgent", -6, 403),
            ("batch", 9, 403),
            ("batch", None, 200),
        ):
            answer = await router.http.post(path, json=asked | {"priority": priority}, headers=bearer(key))
            assert answer.status_code == status, (key, priority, answer.text)
            if status == 403:
                error = answer.json()["error"]
                assert error["param"] == "priority" and error["code"] == "permission_denied"
                assert "min_priority" in error["message"] and "--min-priority" in error["message"]
        sent = [message.work.priority for message in router.fakes["prefill-0"].assignments()]
        assert sent == [0, 3, -5, 10]
        router.check_idle()

    serve(scenario, disaggregation_min_tokens=0)


def test_vectors_have_the_same_rule(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        with_keys(router, tmp_path)
        body = {"input": "abc", "priority": -1}
        refused = await router.http.post("/v1/embeddings", json=body, headers=bearer("team"))
        assert refused.status_code == 403 and refused.json()["error"]["param"] == "priority"
        assert (await router.http.post("/v1/embeddings", json=body, headers=bearer("urgent"))).status_code == 200

    serve(scenario, pooling=EMBEDS, **WORKERS)


def test_without_any_key_all_priorities_are_taken_as_vllm_takes_them(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.app.keys = ApiKeys(defaults=DEFAULTS)
        await router.complete(prompt="hello", max_tokens=1, priority=-1)

    serve(scenario)


def test_batches_see_which_clients_wait_for_their_first_token(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        prefill, decode = (router.fakes[name] for name in ("prefill-0", "decode-0"))

        def load() -> tuple[int, int]:
            found = router_load(router.app, router.cluster, [router.service])
            return found.num_running, found.num_waiting

        prefill.hold = decode.hold = 0
        bodies = ({"priority": 0}, {"priority": LOWEST_PRIORITY})
        running = [asyncio.create_task(router.complete(prompt="hello", max_tokens=3, **body)) for body in bodies]
        await settle()
        assert load() == (2, 1), "a request of a batch's own priority does not count"
        prefill.resume()
        await settle()
        assert load() == (2, 0), "the first tokens have arrived"
        decode.resume()
        await asyncio.gather(*running)
        assert load() == (0, 0)
        router.check_idle()

    serve(scenario, disaggregation_min_tokens=0)


def test_the_router_s_setting_counts_for_keys_whose_line_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    settings = RouterSettings(model="m", api_key=["flag"], api_key_file=str(tmp_path / "keys"))
    for given, least in ((settings, 0), (msgspec.structs.replace(settings, min_priority=-3), -3)):
        keys = api_keys(given)
        found = {key: keys.caller(f"Bearer {key}") for key in ("flag", "team", "urgent")}
        assert {key: caller.min_priority for key, caller in found.items() if caller} == {
            "flag": least,
            "team": least,
            "urgent": -5,
        }


def test_a_least_priority_that_is_no_number_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one min_priority=high\n")
    with pytest.raises(ConfigurationError, match=r"line 1.*min_priority"):
        ApiKeys(file=str(tmp_path / "keys"))


def test_a_request_that_asks_for_none_gets_the_first_that_its_key_may_have() -> None:
    assert allowed(None, ANONYMOUS) == allowed(None, Caller(min_priority=-4)) == 0
    assert allowed(None, Caller(min_priority=7)) == 7
    assert allowed(-9, ANONYMOUS) == -9
    with pytest.raises(PermissionDeniedError):
        allowed(6, Caller(min_priority=7))
