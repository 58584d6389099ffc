"""Anthropic's Messages API through its official client, over a fake cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anthropic
import httpx2
import pytest
from pydantic import BaseModel

from baton_serve.services.router.api.messages.endpoint import arguments_of
from baton_serve.services.router.api.messages.request_to_chat import as_chat
from baton_serve.services.router.api.messages.schema import UNSERVED, CountTokensRequest
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.test_message_reader import CALL, FUNCTION, HERMES, writes

TOOLS: Any = [{"name": FUNCTION["name"], "description": "Finds.", "input_schema": FUNCTION["parameters"]}]
HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT = "<think>Hm.</think>Let me see." + CALL.format("f")


@asynccontextmanager
async def client_of(router: Router, key: str = "any") -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(app=cast(Any, router.app))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield anthropic.AsyncAnthropic(base_url="http://router", api_key=key, max_retries=0, http_client=http)


def test_a_text_is_answered(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes("Hello!")
        async with client_of(router) as client:
            answer = await client.messages.create(model="tiny", messages=HELLO, max_tokens=32, system="Be brief.")
            counted = await client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.")
        assert [block.model_dump(exclude_none=True) for block in answer.content] == [{"type": "text", "text": "Hello!"}]
        assert (answer.role, answer.stop_reason, answer.model) == ("assistant", "end_turn", "tiny")
        assert (answer.usage.output_tokens, answer.usage.cache_read_input_tokens) == (7, 4)
        assert answer.usage.input_tokens + 4 == counted.input_tokens

    serve(scenario)


def test_events_build_up_what_comes_whole(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(TEXT)
        body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "tools": TOOLS}
        async with client_of(router) as client:
            whole = await client.messages.create(**body)
            async with client.messages.stream(**body) as events:
                final = await events.get_final_message()
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        call = whole.content[-1]
        assert call.type == "tool_use" and (call.name, call.input) == ("f", {"city": "Paris"})
        assert whole.stop_reason == final.stop_reason == "tool_use"
        first, second = ([b.model_dump(exclude={"id"}, exclude_none=True) for b in m.content] for m in (whole, final))
        assert [{k: b[k] for k in first[i]} for i, b in enumerate(second)] == first
        assert whole.usage.output_tokens == final.usage.output_tokens

    serve(scenario, **HERMES)


def test_a_stop_sequence_and_the_limit_are_reported(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes("one two three")
        async with client_of(router) as client:
            stopped = await client.messages.create(model="tiny", messages=HELLO, max_tokens=50, stop_sequences=["two"])
            cut = await client.messages.create(model="tiny", messages=HELLO, max_tokens=3)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
        assert stopped.content[0].model_dump()["text"] == "one "
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)

    serve(scenario)


def test_a_forced_call_that_is_cut_leaves_no_json_in_the_text(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        text = '[{"name": "fi'
        router.fakes.token_of = writes(text)
        body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": len(text), "tools": TOOLS}
        body["tool_choice"] = {"type": "any"}
        async with client_of(router) as client:
            whole = await client.messages.create(**body)
            async with client.messages.stream(**body) as events:
                final = await events.get_final_message()
        assert whole.stop_reason == final.stop_reason == "max_tokens"
        for message in (whole, final):
            assert [(block.type, block.model_dump()["text"]) for block in message.content] == [("text", "")]

    serve(scenario)


def test_reasoning_is_left_out_where_it_is_not_wanted(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes("<think>Hm.</think>Yes.")
        async with client_of(router) as client:
            answer = await client.messages.create(
                model="tiny", messages=HELLO, max_tokens=50, thinking={"type": "disabled"}
            )
        assert [block.type for block in answer.content] == ["text"]

    serve(scenario, **HERMES)


class Weather(BaseModel):
    city: str
    degrees: int


def test_an_answer_is_parsed_by_the_clients_own_helper(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes('{"city": "Paris", "degrees": 21}')
        body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 50}
        async with client_of(router) as client:
            answer = await client.messages.parse(**body, output_format=Weather)
            old = await client.beta.messages.parse(**body, output_format=Weather)
        assert answer.parsed_output == old.parsed_output == Weather(city="Paris", degrees=21)
        for message in router.fakes["prefill-0"].assignments():
            assert message.work.sampling.grammar is not None and "degrees" in message.work.sampling.grammar

    serve(scenario)


def test_the_form_and_the_effort_of_an_answer_are_those_of_a_chat(serve: Serve) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    other = {"type": "json_schema", "schema": {"type": "array"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    for more in (
        {"output_format": form},
        {"output_config": {"format": form}},
        {"output_format": form, "output_config": {"format": form}},
    ):
        assert as_chat(CountTokensRequest.model_validate({"messages": HELLO, **more})).response_format == wanted
    chat = as_chat(CountTokensRequest.model_validate({"messages": HELLO, "output_config": {"effort": "max"}}))
    assert (chat.response_format, chat.reasoning_effort) == (None, "max")

    async def scenario(router: Router) -> None:
        for more, reason in (
            ({"output_format": form, "output_config": {"format": other}}, "exclude each other"),
            ({"output_config": {"effort": "extreme"}}, "effort"),
            ({"output_config": {"format": {"type": "json_object"}}}, "json_schema"),
            ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "task_budget"),
            ({"output_format": form, "tools": TOOLS, "tool_choice": {"type": "any"}}, "exclude each other"),
        ):
            answer = await router.http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 3, **more})
            assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text

    serve(scenario)


def test_edits_of_the_context_are_not_made_and_the_log_says_so(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(router: Router) -> None:
        edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        body = {"messages": HELLO, "max_tokens": 3, "context_management": edits}
        assert (await router.http.post("/v1/messages", json=body)).status_code == 200
        assert "ignoring context_management of a request: the prompt is the conversation" in caplog.text

    with caplog.at_level("INFO"):
        serve(scenario)


def test_errors_have_anthropics_shape_and_its_key_header_is_taken(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        async with client_of(router, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="tiny", messages=HELLO, max_tokens=3)
        async with client_of(router, "secret") as client:
            await client.messages.create(model="tiny", messages=HELLO, max_tokens=3)
            with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
                await client.messages.create(model="other", messages=HELLO, max_tokens=3)
        assert cast(Any, missing.value.body)["error"]["type"] == "not_found_error"
        header = {"x-api-key": "secret"}
        bad = [{"messages": HELLO}, {"messages": [], "max_tokens": 3}]
        bad += [{"messages": HELLO, "max_tokens": 3, name: {"asks": "something"}} for name in UNSERVED]
        bad += [{"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 3}]
        bad += [{"messages": HELLO, "max_tokens": 3, "tools": [{"type": "bash_20250124", "name": "bash"}]}]
        for body in bad:
            answer = await router.http.post("/v1/messages", json=body, headers=header)
            assert answer.status_code == 400, body
            assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "invalid_request_error"

    serve(scenario, keys=["secret"])


def test_a_stream_that_breaks_says_so(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        decode = router.fakes["decode-0"]
        decode.hold = 2
        async with client_of(router) as client:
            asking = asyncio.create_task(
                client.messages.create(model="tiny", messages=HELLO, max_tokens=9, stream=True)
            )
            await settle(60)
            decode.die()
            types = []
            with pytest.raises(anthropic.APIStatusError, match="lost"):
                async for event in await asking:
                    types.append(event.type)
            assert types[:2] == ["message_start", "content_block_start"]

    serve(scenario, max_replays=0)


def test_a_conversation_becomes_the_chat_that_it_is() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Paris"}}
    request = CountTokensRequest.model_validate(
        {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "text", "text": "I look."},
                        use,
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Well?"},
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                    ],
                },
            ],
            "tools": TOOLS,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
    )
    chat = as_chat(request)
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "Be brief."),
        ("user", "Weather?"),
        ("assistant", "I look."),
        ("tool", "sun"),
        ("user", "Well?"),
    ]
    answer = chat.messages[2].model_extra or {}
    assert answer["reasoning_content"] == "Hm."
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.tools is not None and chat.tools[0].function == {
        "name": "f",
        "description": "Finds.",
        "parameters": FUNCTION["parameters"],
    }


def test_arguments_that_are_no_object_are_kept_as_text() -> None:
    assert arguments_of('{"a": 1}') == {"a": 1}
    assert arguments_of("") == {}
    assert arguments_of('{"a": ') == {"arguments": '{"a": '}
    assert arguments_of("[1]") == {"arguments": "[1]"}
