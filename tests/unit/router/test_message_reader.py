"""Calls of tools and reasoning through /v1/chat/completions, streamed and whole, over a fake cluster."""

import asyncio
import json
from typing import Any

import pytest

from baton_serve.contracts.messages import Work
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.main import start
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest
from baton_serve.services.router.settings import ReasoningParser, RouterSettings, ToolCallParser
from baton_serve.services.router.text.reasoning import REASONING_FORMATS
from baton_serve.services.router.text.scanning.message_parts import Content, Parts
from baton_serve.services.router.text.served_model import ServedModel
from baton_serve.services.router.text.tool_calls import TOOL_CALL_FORMATS
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.fakes import TokenOf

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"city": "Paris"}}}}\n</tool_call>'
EOS = 2


def writes(text: str) -> TokenOf:
    """A model that writes this text, one byte a token, and ends."""
    tokens: list[int] = [*text.encode(), EOS]

    def token(work: Work, sequence: int, position: int) -> int:
        return tokens[min(position, len(tokens) - 1)]

    return token


async def whole(router: Router, **body: Any) -> dict[str, Any]:
    answer = await router.http.post(PATH, json={"messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def streamed(router: Router, **body: Any) -> dict[str, Any]:
    """The message that a client puts together."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    reason = None
    for chunk in await router.stream(PATH, messages=HELLO, **body):
        choice = chunk["choices"][0]
        reason = choice["finish_reason"] or reason
        delta = choice["delta"]
        message["role"] = message["role"] or delta["role"]
        for name in ("content", "reasoning_content", "reasoning"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                assert "name" not in call["function"]
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": reason}


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """Without ids, which are drawn."""
    message = {name: choice["message"][name] or "" for name in ("role", "content", "reasoning_content", "reasoning")}
    calls = [(call["type"], call["function"]) for call in choice["message"].get("tool_calls", [])]
    return {**message, "calls": calls, "finish_reason": choice["finish_reason"]}


def test_calls_and_reasoning_come_streamed_as_they_come_whole(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes("<think>\nHm.\n</think>\n\nSo.\n" + CALL.format("f") + "\n" + CALL.format("g"))
        choice = await whole(router, tools=TOOLS, tool_choice="auto")
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "So.")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]
        assert all(json.loads(call["function"]["arguments"]) == {"city": "Paris"} for call in message["tool_calls"])
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert plain(await streamed(router, tools=TOOLS)) == plain(choice)

    serve(scenario, **HERMES)


def test_white_space_without_end_is_held_back_in_linear_time() -> None:
    parts = Parts()
    for _ in range(1000):
        parts.content(" " * 10)
    # Appending to one string would copy it for each character.
    assert parts._held == [" "] * 10_000 and parts.take() == []
    parts.content("a")
    assert parts.take() == [Content(" " * 10_000 + "a")]


def test_content_is_null_when_there_is_only_a_call(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(CALL.format("f"))
        message = (await whole(router, tools=TOOLS))["message"]
        assert message["content"] is None
        assert message["reasoning_content"] is None

    serve(scenario, **HERMES)


def test_calls_are_read_only_when_tools_are_offered_and_wanted(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(CALL.format("f"))
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = await whole(router, **body)
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL.format("f"), "stop")

    serve(scenario, **HERMES)


def test_a_call_cut_by_the_limit_says_so(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(CALL.format("f"))
        choice = await whole(router, tools=TOOLS, max_tokens=45)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city'}
        assert plain(await streamed(router, tools=TOOLS, max_tokens=45)) == plain(choice)

    serve(scenario, **HERMES)


def test_a_client_may_want_one_call_and_no_reasoning(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes("<think>Hm.</think>" + CALL.format("f") + CALL.format("g"))
        wishes = {"tools": TOOLS, "parallel_tool_calls": False, "include_reasoning": False}
        choice = await whole(router, **wishes)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
        assert choice["message"]["reasoning_content"] is None
        assert plain(await streamed(router, **wishes)) == plain(choice)

    serve(scenario, **HERMES)


def test_logprobs_of_all_tokens_are_streamed_with_calls(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(CALL.format("f"))
        chunks = await router.stream(PATH, messages=HELLO, tools=TOOLS, logprobs=True)
        tokens = [
            entry for c in chunks if c["choices"][0]["logprobs"] for entry in c["choices"][0]["logprobs"]["content"]
        ]
        assert len(tokens) == len(CALL.format("f")) + 1

    serve(scenario, **HERMES)


def test_tools_without_a_parser_are_refused(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(PATH, json={"messages": HELLO, "tools": TOOLS, "tool_choice": "auto"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert "--enable-auto-tool-choice" in answer.json()["error"]["message"]

    serve(scenario)


ROUND_TRIP = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_123456789abc", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_123456789abc", "content": "sunny"},
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls[0].id }}{{ m.tool_calls[0].function.arguments is mapping }}"
    "{% endif %}{{ m.tool_call_id }};{% endfor %}{{ tools[0].function.name if tools }}"
)


@pytest.mark.parametrize(("parser", "id_shown"), [("hermes", "call_123456789abc"), ("mistral", "456789abc")])
def test_calls_and_their_results_reach_the_template(parser: ToolCallParser, id_shown: str, model_folder: Any) -> None:
    settings = RouterSettings(
        model=str(model_folder), tool_call_parser=parser, enable_auto_tool_choice=True, chat_template=TEMPLATE
    )
    model = ServedModel.from_settings(settings)
    request = ChatCompletionRequest.model_validate({"messages": ROUND_TRIP, "tools": TOOLS})
    rendered = asyncio.run(model.render_chat(request))
    assert rendered == f"user:weather?;assistant:{id_shown}True;tool:sunny{id_shown};f"


def test_ids_of_mistral_have_nine_characters(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
        (call,) = (await whole(router, tools=TOOLS))["message"]["tool_calls"]
        assert len(call["id"]) == 9
        assert call["id"].isalnum()

    serve(scenario, enable_auto_tool_choice=True, tool_call_parser="mistral")


def test_flags_name_all_formats() -> None:
    assert set(ToolCallParser.__args__) == set(TOOL_CALL_FORMATS)  # type: ignore[attr-defined]
    assert set(ReasoningParser.__args__) == set(REASONING_FORMATS)  # type: ignore[attr-defined]


def test_auto_tool_choice_needs_a_parser() -> None:
    with pytest.raises(ConfigurationError, match="--tool-call-parser"):
        start(RouterSettings(model="m", enable_auto_tool_choice=True), None).send(None)  # type: ignore[arg-type]


def test_a_continued_message_is_read_from_where_it_stands(serve: Serve) -> None:
    """Its role's tag, its reasoning's tag, some reasoning; then what the model writes."""

    async def test(router: Router) -> None:
        begun = [*HELLO, {"role": "assistant", "content": "<think>\nHm, that"}]
        body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        router.fakes.token_of = writes(" is.\n</think>\n\nYes.")
        message = (await whole(router, **body))["message"]
        assert (message["reasoning_content"].strip(), message["content"]) == ("is.", "Yes.")
        pieces = [chunk["choices"][0]["delta"] for chunk in await router.stream(PATH, **body)]
        assert "".join(piece.get("reasoning_content", "") for piece in pieces) == message["reasoning_content"]
        assert "".join(piece.get("content") or "" for piece in pieces) == "Yes."

    serve(test, **HERMES)
