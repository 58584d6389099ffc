"""OpenAI's Responses API through its official client, over a fake cluster."""

import asyncio
import json
from typing import Any, cast

import openai
import pytest

from baton_serve.services.router.api.responses.request import as_chat
from baton_serve.services.router.api.responses.schema import UNSERVED, ResponsesRequest
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.test_message_reader import CALL, FUNCTION, HERMES, writes

TOOLS = [{"type": "function", **FUNCTION}]
TEXT = "<think>Hm.</think>Let me see." + CALL.format("f") + CALL.format("g")


def client_of(router: Router) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://router/v1", api_key="any", max_retries=0, http_client=cast(Any, router.http)
    )


def without_ids(output: Any) -> Any:
    """Ids are drawn for each answer."""
    dumped = [item.model_dump() for item in output]
    for item in dumped:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return dumped


def test_a_text_is_answered(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes("Hello!")
        answer = await client_of(router).responses.create(model="tiny", input="hello", max_output_tokens=32)
        assert (answer.output_text, answer.status, answer.object) == ("Hello!", "completed", "response")
        assert answer.id.startswith("resp_") and answer.model == "tiny"
        assert answer.usage is not None
        assert answer.usage.output_tokens == 7 and answer.usage.input_tokens_details.cached_tokens == 4
        assert answer.usage.total_tokens == answer.usage.input_tokens + 7

    serve(scenario)


def test_the_tokens_of_an_input_are_counted(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        body: dict[str, Any] = {"model": "tiny", "input": "hello", "instructions": "Be brief."}
        answer = await client.responses.create(**body, max_output_tokens=3)
        counted = await client.responses.input_tokens.count(**body)
        assert answer.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.input_tokens.count(**body, previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_tokens.count(model="nobody", input="hello")

    serve(scenario)


def test_events_build_up_what_comes_whole(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(TEXT)
        client = client_of(router)
        body: dict[str, Any] = {"model": "tiny", "input": "hello", "tools": TOOLS}
        whole = await client.responses.create(**body)
        kinds = [item.type for item in whole.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert [item.name for item in whole.output if item.type == "function_call"] == ["f", "g"]
        events = [event async for event in await client.responses.create(**body, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
        last = events[-1]
        assert last.type == "response.completed"
        assert without_ids(last.response.output) == without_ids(whole.output)
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert without_ids(done) == without_ids(whole.output)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == '{"city": "Paris"}' * 2
        reasoning = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(reasoning) == "Hm."

    serve(scenario, **HERMES)


def test_the_clients_own_stream_helper_understands_the_events(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(TEXT)
        stream = client_of(router).responses.stream(model="tiny", input="hello", tools=cast(Any, TOOLS))
        async with stream as events:
            seen = [event.type async for event in events]
            final = await events.get_final_response()
        assert final.output_text == "Let me see."
        assert seen[-1] == "response.completed"

    serve(scenario, **HERMES)


def test_an_answer_that_is_cut_is_incomplete(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        answer = await client.responses.create(model="tiny", input="hello", max_output_tokens=3)
        assert answer.status == "incomplete" and answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        events = [
            e async for e in await client.responses.create(model="tiny", input="x", max_output_tokens=3, stream=True)
        ]
        assert events[-1].type == "response.incomplete"

    serve(scenario)


def test_a_forced_call_that_is_cut_leaves_no_json_in_the_text(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        for text in ('[{"name": "fi', '[{"name": "f", "parameters": {"ci'):
            router.fakes.token_of = writes(text)
            body: dict[str, Any] = {"model": "tiny", "input": "x", "tools": TOOLS, "tool_choice": "required"}
            body["max_output_tokens"] = len(text)
            whole = await client.responses.create(**body)
            events = [event async for event in await client.responses.create(**body, stream=True)]
            assert (whole.output_text, whole.status) == ("", "incomplete")
            last = events[-1]
            assert last.type == "response.incomplete" and last.response.output_text == ""
            assert without_ids(last.response.output) == without_ids(whole.output)
            assert not [event for event in events if event.type == "response.output_text.delta"]

    serve(scenario)


def test_a_stream_that_breaks_says_so(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        decode = router.fakes["decode-0"]
        decode.hold = 2
        asking = asyncio.create_task(
            client_of(router).responses.create(model="tiny", input="hello", max_output_tokens=9, stream=True)
        )
        await settle(60)
        decode.die()
        events = [event async for event in await asking]
        assert events[0].type == "response.created"
        error, failed = events[-2:]
        assert error.type == "error" and "lost" in error.message
        assert failed.type == "response.failed" and failed.response.status == "failed"

    serve(scenario, max_replays=0)


def test_json_is_asked_for_as_in_chats(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
    chat = as_chat(ResponsesRequest.model_validate({"input": "x", "text": text}))
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": schema, "strict": True},
    }

    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes('{"a": 1}')
        answer = await client_of(router).responses.create(model="tiny", input="x", text=cast(Any, text))
        assert json.loads(answer.output_text) == {"a": 1}
        asked = router.fakes["prefill-0"].assignments()[0]
        assert asked.work.sampling.grammar is not None

    serve(scenario)


def test_a_conversation_becomes_the_chat_that_it_is() -> None:
    request = ResponsesRequest.model_validate(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "In French."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
                {"role": "assistant", "content": "Both."},
            ],
            "tools": TOOLS,
            "tool_choice": {"type": "function", "name": "f"},
            "reasoning": {"effort": "low"},
        }
    )
    chat = as_chat(request)
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "Be brief."),
        ("system", "In French."),
        ("user", "Weather?"),
        ("assistant", "I look."),
        ("tool", "sun"),
        ("tool", "rain"),
        ("assistant", "Both."),
    ]
    answer = chat.messages[3].model_extra or {}
    assert answer["reasoning_content"] == "Hm."
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert chat.reasoning_effort == "low"
    assert chat.tools is not None and chat.tools[0].function["name"] == "f"


def test_what_needs_a_memory_or_is_not_served_is_refused_by_name(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        wrong: list[dict[str, Any]] = [{name: {"asks": "something"}} for name in UNSERVED]
        wrong += [{"include": ["file_search_call.results"]}, {"tools": [{"type": "web_search"}]}, {"input": []}]
        wrong += [{"input": [{"type": "item_reference", "id": "x"}]}, {"text": {"verbosity": "low"}}]
        wrong += [{"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}]
        wrong += [{"tool_choice": {"type": "web_search"}, "tools": TOOLS}]
        for body in wrong:
            answer = await router.http.post("/v1/responses", json={"input": "x", **body})
            assert answer.status_code == 400, body
            assert answer.json()["error"]["param"] == next(iter(body)), body
        answer = await router.http.post("/v1/responses", json={"input": "x", "previous_response_id": "resp_1"})
        assert "send the whole conversation" in answer.text
        fine = {"store": False, "background": False, "truncation": "disabled", "user": "me", "metadata": {"a": "b"}}
        kept = await router.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, **fine})
        assert kept.status_code == 200 and kept.json()["metadata"] == {"a": "b"}

    serve(scenario)
