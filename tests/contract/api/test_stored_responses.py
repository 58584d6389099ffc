"""Stored answers of the Responses API, through OpenAI's client over a fake cluster."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from baton_serve.services.router.api.responses.kept_responses import KeptResponses
from baton_serve.services.router.api.responses.redis_store import RedisResponseStore
from baton_serve.services.router.api.responses.store import RUN_TTL_S, MemoryResponseStore
from baton_serve.services.router.protocol.byte_budget import UNCOUNTED_BYTES, BodyMemory
from baton_serve.services.router.protocol.errors import UnavailableError
from tests.contract.api.test_responses import TEXT, TOOLS, client_of
from tests.contract.redis_server import RedisServer
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.test_message_reader import HERMES, writes

ASK: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 64, "extra_body": {"seed": 0}}
BODY: dict[str, Any] = {"input": "hello", "max_output_tokens": 64}


def prompts(router: Router) -> list[list[int]]:
    return [list(one.work.token_ids) for one in router.fakes["prefill-0"].assignments()]


def test_a_stored_answer_is_retrieved_and_deleted(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        whole = await client.responses.create(**ASK)
        assert whole.model_dump()["store"] is True
        assert (await client.responses.retrieve(whole.id)).model_dump() == whole.model_dump()
        last = [event async for event in await client.responses.create(**ASK, stream=True)][-1]
        assert last.type == "response.incomplete"
        assert (await client.responses.retrieve(last.response.id)).output == last.response.output
        await client.responses.delete(whole.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="no response"):
                await call(whole.id)
        unstored = await client.responses.create(**ASK, store=False)
        assert unstored.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored.id)

    serve(scenario)


def test_a_continued_conversation_has_the_prompt_of_the_whole_history(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        router.fakes.token_of = writes(TEXT)
        body: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "instructions": "Be brief."}
        first = await client.responses.create(**body, input="hello")
        calls = [item.call_id for item in first.output if item.type == "function_call"]
        results: Any = [{"type": "function_call_output", "call_id": call, "output": "sun"} for call in calls]
        second = await client.responses.create(**body, input=results, previous_response_id=first.id)
        assert second.previous_response_id == first.id
        await client.responses.delete(first.id)
        third = await client.responses.create(**body, input="And now?", previous_response_id=second.id)
        counted = await client.responses.input_tokens.count(**body, input="And now?", previous_response_id=second.id)
        history: Any = [{"role": "user", "content": "hello"}, *_dumped(first), *results, *_dumped(second)]
        history += [{"role": "user", "content": "And now?"}]
        whole = await client.responses.create(**body, input=history)
        *_, continued, sent_whole = prompts(router)
        assert continued == sent_whole
        assert third.usage is not None and whole.usage is not None
        assert third.usage.input_tokens == whole.usage.input_tokens == counted.input_tokens == len(continued)

    serve(scenario, **HERMES)


def _dumped(answer: Any) -> list[dict[str, Any]]:
    return [item.model_dump(exclude_none=True) for item in answer.output]


def test_the_items_before_an_answer_are_listed(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        first = await client.responses.create(**ASK)
        second = await client.responses.create(**ASK | {"input": "more"}, previous_response_id=first.id)
        listed = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [item.type for item in listed] == ["message"] * 3
        assert [item.content[0].text for item in listed if item.type == "message"] == [  # type: ignore[union-attr]
            "hello",
            first.output_text,
            "more",
        ]
        newest = await client.responses.input_items.list(second.id, limit=2)
        assert [item.id for item in newest.data] == [listed[2].id, listed[1].id] and newest.has_more
        path = f"/v1/responses/{second.id}/input_items"
        assert (await router.http.get(path, params={"after": "nothing"})).status_code == 400

    serve(scenario)


def test_answers_belong_to_the_owner_of_the_key_even_under_one_request_id(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        def of(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}", "x-request-id": "chosen"}

        async def ask(key: str, **body: Any) -> httpx.Response:
            return await router.http.post("/v1/responses", json=BODY | body, headers=of(key))

        mine = (await ask("sk-mine")).json()
        path = f"/v1/responses/{mine['id']}"
        assert (await router.http.get(path, headers=of("sk-other"))).status_code == 404
        for method, suffix in (("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await router.http.request(method, path + suffix, headers=of("sk-other"))
            assert answer.status_code == 404, method
        refused = await ask("sk-other", previous_response_id=mine["id"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
        theirs = (await ask("sk-other", input="other")).json()
        assert theirs["id"] == mine["id"]
        assert (await router.http.get(path, headers=of("sk-mine"))).json() == mine
        assert (await router.http.get(path)).status_code == 401

    serve(scenario, keys=["sk-mine", "sk-other"])


def test_a_background_answer_is_queued_then_runs_and_is_complete(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client, decode = client_of(router), router.fakes["decode-0"]
        decode.hold = 3
        queued = await client.responses.create(**ASK, background=True)
        assert (queued.status, queued.background) == ("queued", True)
        with pytest.raises(openai.BadRequestError, match="queued"):
            await client.responses.create(**ASK, previous_response_id=queued.id)
        await settle(60)
        assert (await client.responses.retrieve(queued.id)).status == "in_progress"
        decode.resume()
        await settle(300)
        done = await client.responses.retrieve(queued.id)
        whole = await client.responses.create(**ASK)
        assert (done.status, done.output_text) == (whole.status, whole.output_text)
        assert (await client.responses.cancel(queued.id)).status == whole.status, "it has ended already"
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(whole.id)
        for wrong in ({"store": False}, {"stream": True}):
            refused = await router.http.post("/v1/responses", json=BODY | {"background": True} | wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")

    serve(scenario)


def test_a_background_answer_is_cancelled_on_its_instances(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        router.fakes["decode-0"].hold = 3
        for end in (client.responses.cancel, client.responses.delete):
            queued = await client.responses.create(**ASK, background=True)
            await settle(60)
            await end(queued.id)
            await settle(60)
            router.check_idle()
        first = await client.responses.create(**ASK, background=True)
        await settle(60)
        assert (await client.responses.cancel(first.id)).status == "cancelled"
        assert (await client.responses.retrieve(first.id)).status == "cancelled"

    serve(scenario)


def test_an_owner_may_have_so_many_background_answers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_serve.services.router.api.responses.kept_responses.MAX_RUNS", 2)

    async def scenario(router: Router) -> None:
        router.fakes["decode-0"].hold = 3

        async def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (
                await router.http.post("/v1/responses", json=BODY | {"background": True}, headers=headers)
            ).status_code

        assert [await ask("sk-a") for _ in range(3)] == [200, 200, 429]
        assert [await ask("sk-b") for _ in range(3)] == [200, 200, 429]
        assert router.dispatcher.num_running == 4
        router.fakes["decode-0"].resume()
        for status in (200, 0):
            while router.dispatcher.num_running:
                await settle(1)
            assert not status or await ask("sk-a") == status

    serve(scenario, keys=["sk-a", "sk-b"])


def test_a_background_answer_that_fails_says_why(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        router.fakes["decode-0"].hold = 2
        queued = await client.responses.create(**ASK, background=True)
        await settle(60)
        router.fakes["decode-0"].die()
        await settle(60)
        failed = await client.responses.retrieve(queued.id)
        assert failed.status == "failed" and failed.error is not None and "lost" in failed.error.message

    serve(scenario, max_replays=0)


def test_nothing_is_stored_if_the_operator_turns_it_off(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post("/v1/responses", json=BODY | {"store": True})
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        assert (await router.http.get(f"/v1/responses/{answer.json()['id']}")).status_code == 404
        refused = await router.http.post("/v1/responses", json=BODY | {"background": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")

    serve(scenario, response_store_ttl_s=0.0)


def test_a_conversation_grows_only_to_the_limits_of_a_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(router: Router) -> None:
        last = (await router.http.post("/v1/responses", json=BODY)).json()["id"]
        for limit in ("MAX_MESSAGES", None):
            if limit is not None:
                monkeypatch.setattr(f"baton_serve.services.router.api.responses.conversation.{limit}", 2)
            refused = await router.http.post("/v1/responses", json=BODY | {"previous_response_id": last})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")

    serve(scenario, max_request_bytes=600)


def test_memory_holds_the_newest_records_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_serve.services.router.api.responses.store.MAX_KEPT", 3)

    async def scenario() -> None:
        now = [0.0]
        store = MemoryResponseStore(10.0, 100, clock=lambda: now[0])
        for name in "abcd":
            await store.put(f"me:{name}", b"x" * 10)
        assert [await store.size(f"me:{name}") for name in "abcd"] == [0, 10, 10, 10]
        await store.put("me:e", b"x" * 85)
        assert [await store.get(f"me:{name}") is not None for name in "bcde"] == [False, False, True, True]
        await store.put("me:f", b"x" * 101)
        assert await store.get("me:f") is None and store.num_bytes == 0
        await store.put("me:g", b"x")
        await store.set_run("me:g", "queued")
        now[0] = 10.0
        assert (await store.get("me:g"), await store.run_state("me:g"), store.num_bytes) == (None, None, 0)
        assert await store.delete("me:g") is False

    asyncio.run(scenario())


def test_an_owner_of_a_key_can_drive_out_its_own_records_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_serve.services.router.api.responses.store.MAX_KEPT", 9)

    async def scenario() -> None:
        store = MemoryResponseStore(10.0, 100)
        for name in "abc":
            await store.put(f"me:{name}", b"x" * 10)
        for number in range(50):
            await store.put(f"other:{number}", b"x" * 30)
            await store.put(f"third:{number}", b"x")
        assert [await store.size(f"me:{name}") for name in "abc"] == [10, 10, 10]
        assert await store.size("other:49") == 30

    asyncio.run(scenario())


def test_states_of_runs_that_have_ended_do_not_stay() -> None:
    async def scenario() -> None:
        now = [0.0]
        store = MemoryResponseStore(10.0, 100, clock=lambda: now[0])
        for number in range(100):
            await store.set_run(f"me:{number}", "cancelled")
        now[0] = RUN_TTL_S
        await store.set_run("me:last", "queued")
        assert list(store._runs) == ["me:last"]

    asyncio.run(scenario())


def long_body(router: Router, num_bytes: int) -> tuple[BodyMemory, dict[str, Any]]:
    """Give the router memory for two such bodies, and return the memory with a request whose record is as long."""
    router.app.bodies = BodyMemory(2 * num_bytes + UNCOUNTED_BYTES, wait_s=0.01)
    item = {"role": "user", "content": "hello", "note": "x" * num_bytes}
    return router.app.bodies, BODY | {"input": [item]}


def test_a_short_request_is_counted_with_the_conversation_that_it_continues(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        memory, body = long_body(router, 200_000)
        total = memory.num_free
        first = (await router.http.post("/v1/responses", json=body)).json()["id"]
        assert memory.num_free == total
        decode = router.fakes["decode-0"]
        decode.hold = 0
        more = BODY | {"previous_response_id": first}
        running = [asyncio.create_task(router.http.post("/v1/responses", json=more)) for _ in range(2)]
        while len(decode.jobs) < 2:
            await settle(1)
        for call in (
            router.http.post("/v1/responses", json=more),
            router.http.post("/v1/responses/input_tokens", json={"input": "a", "previous_response_id": first}),
            router.http.get(f"/v1/responses/{first}"),
            router.http.get(f"/v1/responses/{first}/input_items"),
        ):
            assert (await call).status_code == 429
        decode.resume()
        assert [(await one).status_code for one in running] == [200, 200]
        assert memory.num_free == total
        listed = await router.http.get(f"/v1/responses/{first}/input_items")
        assert listed.json()["data"][0]["note"] == "x" * 200_000
        assert memory.num_free == total

    serve(scenario)


def test_a_background_answer_keeps_the_memory_of_its_body_until_its_end(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        memory, body = long_body(router, 200_000)
        total, decode = memory.num_free, router.fakes["decode-0"]
        decode.hold = 0
        queued = [await router.http.post("/v1/responses", json=body | {"background": True}) for _ in range(3)]
        assert [one.status_code for one in queued] == [200, 200, 429]
        assert memory.num_free < 200_000
        decode.resume()
        while router.dispatcher.num_running or memory.num_free != total:
            await settle(1)
        done = await router.http.get(f"/v1/responses/{queued[0].json()['id']}")
        assert done.json()["status"] == "incomplete"
        assert memory.num_free == total

    serve(scenario)


@pytest.mark.redis
def test_routers_share_stored_answers_and_cancel_each_others_runs_by_redis(serve: Serve, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()

    async def scenario(router: Router) -> None:
        client, caller = client_of(router), router.app.keys.caller(None)
        assert caller is not None
        store = RedisResponseStore(server.url, 60.0, 1 << 20)
        other = KeptResponses(store)
        try:
            whole = await client.responses.create(**ASK)
            assert (await router.http.get(f"/v1/responses/{whole.id}")).content == bytes(
                await other.answer(caller, whole.id)
            )
            decode = router.fakes["decode-0"]
            decode.hold = 3
            queued = await client.responses.create(**ASK, background=True)
            assert b'"cancelled"' in bytes(await other.cancel(caller, queued.id))
            while router.dispatcher.num_running:  # noqa: ASYNC110 - bounded by the fixture's timeout
                await asyncio.sleep(0.05)
            assert (await client.responses.retrieve(queued.id)).status == "cancelled"
            lost = await client.responses.create(**ASK, background=True)
            await router.kept.close()
            await store.end_run(_key_of(caller.name, lost.id))
            assert b'"failed"' in bytes(await other.answer(caller, lost.id))
            server.kill()
            decode.resume()
            with pytest.raises(UnavailableError):
                await other.answer(caller, whole.id)
            assert (await client.responses.create(**ASK, store=False)).status is not None
        finally:
            await other.close()

    try:
        serve(scenario, registry=server.url)
    finally:
        server.kill()


@pytest.mark.redis
def test_redis_holds_the_newest_records_within_the_bound_of_all_routers(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()

    async def scenario() -> None:
        one, two = (RedisResponseStore(server.url, ttl_s, 100) for ttl_s in (60.0, 60.0))
        short = RedisResponseStore(server.url, 0.001, 1000)
        try:
            for name in "abc":
                await one.put(f"me:{name}", b"x" * 40)
            assert [await two.get(f"me:{name}") is not None for name in "abc"] == [False, True, True]
            await two.put("me:c", b"x" * 60)
            assert [await one.size(f"me:{name}") for name in "bc"] == [40, 60], "a new record replaces its old one"
            assert await one.delete("me:c") and await one.get("me:c") is None
            await two.put("me:d", b"x" * 101)
            assert [await one.get(f"me:{name}") for name in "bd"] == [None, None]
            await short.put("me:e", b"x")
            while await short.get("me:e") is not None:  # noqa: ASYNC110 - its TTL is 1 ms
                await asyncio.sleep(0.002)
            await one.put("me:f", b"x" * 10)
            for number in range(20):
                await two.put(f"other:{number}", b"x" * 30)
            assert [await one.size(key) for key in ("me:f", "other:19", "other:0")] == [10, 30, 0]
        finally:
            for store in (one, two, short):
                await store.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 10))
    finally:
        server.kill()


def _key_of(name: str, response_id: str) -> str:
    return f"{hashlib.sha256(name.encode()).hexdigest()[:32]}:{response_id}"
