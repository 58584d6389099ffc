"""OpenAI's Responses API through its official client, over a fake cluster."""

import asyncio
import json
import time
from typing import Any, cast

import openai
import pytest

from baton_serve.services.router.api.responses.request_to_chat import as_chat
from baton_serve.services.router.api.responses.schema import UNSERVED, ResponsesRequest
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.tool_choice import tool_choice_of
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
        with pytest.raises(openai.NotFoundError, match="resp_1"):
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


CODEX_TOOLS: list[dict[str, Any]] = [
    *TOOLS,
    {"type": "namespace", "name": "mcp", "description": "More.", "tools": [*TOOLS, {"type": "custom", "name": "c"}]},
    {"type": "web_search", "external_web_access": False},
]
"""Tools as the Codex CLI offers them."""
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are Codex.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "text": {"verbosity": "low"},
}


def test_functions_of_namespaces_are_called_by_their_own_names_and_hosted_tools_are_left_out(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        for written, namespace in (("mcp__f", "mcp"), ("f", None)):
            router.fakes.token_of = writes(CALL.format(written))
            whole = await client.responses.create(**CODEX)
            (call,) = whole.output
            assert call.type == "function_call"
            assert (call.name, (call.model_extra or {}).get("namespace", call.namespace)) == ("f", namespace)
            events = [event async for event in await client.responses.create(**CODEX, stream=True)]
            items = [event.item for event in events if event.type.startswith("response.output_item.")]
            assert [item.type == "function_call" and (item.name, item.namespace) for item in items] == [
                ("f", namespace),
                ("f", namespace),
            ]
        assert "web_search" in caplog.text and "custom" not in whole.model_dump_json(include={"output"})
        router.fakes.token_of = writes('{"city": "Paris"}')
        for choice in ({"name": "mcp__f"}, {"name": "f", "namespace": "mcp"}):
            forced = await client.responses.create(**CODEX | {"tool_choice": {"type": "function", **choice}})
            (call,) = forced.output
            assert call.type == "function_call" and (call.name, call.namespace) == ("f", "mcp")

    with caplog.at_level("INFO"):
        serve(scenario, **HERMES)


def test_the_model_sees_functions_of_namespaces_under_flat_names() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "mcp", "arguments": "{}"}
    chat = as_chat(ResponsesRequest.model_validate(CODEX | {"input": [*CODEX["input"], call]}))
    assert [tool.function["name"] for tool in chat.tools or ()] == ["f", "mcp__f"]
    assert chat.tools is not None and chat.tools[1].function["parameters"] == FUNCTION["parameters"]
    (called,) = (chat.messages[-1].model_extra or {})["tool_calls"]
    assert called["function"]["name"] == "mcp__f"
    only = [{"type": "namespace", "name": "mcp", "tools": TOOLS}]
    body = {"input": "x", "tools": only, "tool_choice": {"type": "function", "name": "f"}}
    short = as_chat(ResponsesRequest.model_validate(body))
    assert short.tool_choice == {"type": "function", "function": {"name": "mcp__f"}}, "as in vLLM"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    several = as_chat(ResponsesRequest.model_validate(body | {"tool_choice": allowed}))
    assert several.tool_choice == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "mcp__f"}}]},
    }


def test_many_allowed_tools_are_looked_up_in_linear_time() -> None:
    members = [{"type": "function", "name": f"f{i}", "parameters": {"type": "object"}} for i in range(1000)]
    allowed = [{"type": "function", "name": f"f{i % 1000}"} for i in range(10_000)]
    body = {
        "input": "x",
        "tools": [{"type": "namespace", "name": "n", "tools": members}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": allowed},
    }
    started = time.process_time()
    chat = as_chat(ResponsesRequest.model_validate(body))
    assert tool_choice_of(chat, RouterSettings(model="m"), None).grammar_spec is not None
    assert time.process_time() - started < 1, "a search for each would take ten times as long"


def test_logprobs_of_the_text_are_those_of_the_chat(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        router.fakes.token_of = writes("<think>Hm.</think>Hello!")
        body: dict[str, Any] = {"model": "tiny", "input": "hello", "top_logprobs": 2}
        body["include"] = ["message.output_text.logprobs"]
        whole = await client.responses.create(**body)
        assert whole.top_logprobs == 2
        (text,) = [part for item in whole.output if item.type == "message" for part in item.content]
        assert text.type == "output_text" and text.logprobs
        tokens = "".join(one.token for one in text.logprobs)
        assert "Hello!" in tokens and "Hm" not in tokens
        assert all(len(one.top_logprobs) == 2 for one in text.logprobs)
        events = [event async for event in await client.responses.create(**body, stream=True)]
        streamed = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
        assert [one.token for one in streamed] == [one.token for one in text.logprobs]
        done = next(e for e in events if e.type == "response.output_text.done")
        assert [one.logprob for one in done.logprobs] == [one.logprob for one in text.logprobs]
        last = events[-1]
        assert last.type == "response.completed" and without_ids(last.response.output) == without_ids(whole.output)
        plain = await client.responses.create(model="tiny", input="hello")
        (bare,) = [part for item in plain.output if item.type == "message" for part in item.content]
        assert bare.type == "output_text" and bare.logprobs == []

    serve(scenario, **HERMES)


def test_the_number_of_logprobs_is_bounded_before_anything_is_generated(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_serve.services.router.api.responses.endpoint.MAX_REPEATED_LOGPROBS", 30)

    async def scenario(router: Router) -> None:
        for num_tokens, status in ((10, 200), (11, 400), (None, 400)):
            body = {"input": "hello", "top_logprobs": 2, "max_output_tokens": num_tokens}
            answer = await router.http.post("/v1/responses", json=body)
            assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == "top_logprobs"

    serve(scenario)


def test_a_long_answer_with_logprobs_is_formatted_beside_the_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(router: Router) -> None:
        body = {"input": "hello", "top_logprobs": 2, "max_output_tokens": 8, "seed": 0}
        short = (await router.http.post("/v1/responses", json=body)).json()["output"][0]["content"]
        monkeypatch.setattr("baton_serve.services.router.api.content_block_writer._LOGPROBS_INLINE", 7)
        assert (await router.http.post("/v1/responses", json=body)).json()["output"][0]["content"] == short
        assert len(short[0]["logprobs"]) == 8

    serve(scenario)


def test_a_conversation_that_is_too_long_is_truncated_if_the_client_wants_it(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"input": "c" * 300, "max_output_tokens": 50}
        assert (await router.http.post("/v1/responses", json=body)).status_code == 400
        answer = (await router.http.post("/v1/responses", json=body | {"truncation": "auto"})).json()
        assert (answer["truncation"], answer["usage"]["input_tokens"]) == ("auto", 206)

    serve(scenario)


def test_what_is_not_served_is_refused_by_name(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        wrong: list[dict[str, Any]] = [{name: {"asks": "something"}} for name in UNSERVED]
        wrong += [{"include": ["message.input_image.image_url"]}, {"tools": [{"type": "web_serch"}]}, {"input": []}]
        wrong += [{"input": [{"type": "item_reference", "id": "x"}]}, {"text": {"verbosity": "long"}}]
        wrong += [{"tools": [{"type": "namespace", "name": "n"}]}, {"tools": [{"type": "namespace", "tools": []}]}]
        wrong += [{"tools": [{"type": "namespace", "name": "n", "tools": TOOLS * 1025}]}]
        wrong += [{"tool_choice": "required", "tools": [{"type": "web_search"}]}, {"truncation": "left"}]
        wrong += [{"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [3]}, "tools": TOOLS}]
        wrong += [{"top_logprobs": 21}, {"max_tool_calls": -1}]
        wrong += [{"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}]
        wrong += [{"tool_choice": {"type": "web_search"}, "tools": TOOLS}]
        for body in wrong:
            answer = await router.http.post("/v1/responses", json={"input": "x", **body})
            assert answer.status_code == 400, body
            assert answer.json()["error"]["param"] == next(iter(body)), body
        answer = await router.http.post("/v1/responses", json={"input": "x", "conversation": "conv_1"})
        assert "send the whole conversation" in answer.text
        fine = {"store": False, "background": False, "truncation": "disabled", "user": "me", "metadata": {"a": "b"}}
        fine |= {"max_tool_calls": 3, "tools": [{"type": "web_search"}], "include": ["web_search_call.results"]}
        kept = await router.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, **fine})
        assert kept.status_code == 200 and kept.json()["metadata"] == {"a": "b"}
        assert (kept.json()["max_tool_calls"], kept.json()["tools"]) == (3, fine["tools"])

    serve(scenario)
