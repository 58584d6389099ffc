"""The bundled model calls tools by itself, through the whole cluster, with the official clients and no flag."""

import json
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import openai
import pytest

from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.slow

WEATHER = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, ADD)]
FLAT_TOOLS: Any = [{"type": "function", **function} for function in (WEATHER, ADD)]
ANTHROPIC_TOOLS: Any = [
    {"name": function["name"], "description": "", "input_schema": function["parameters"]} for function in (WEATHER, ADD)
]
QUESTION = "What is the weather in Paris?"
RESULT = "sunny, 21 degrees"
CALL = ("get_weather", {"city": "Paris"})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The demo model as `baton serve` starts it; each prompt is handed over."""
    with Cluster(None, args=("--disaggregation-min-tokens", "0", "--dtype", "float32")) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture
def claude(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0) as connected:
        yield connected


def chat(client: openai.OpenAI, messages: Any, **more: Any) -> Any:
    common: dict[str, Any] = {"model": "baton-demo", "tools": TOOLS, "max_tokens": 100, "temperature": 0}
    return client.chat.completions.create(messages=messages, **common | more)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def streamed_calls(chunks: Any) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls that the parts of a stream make together, and the finish reason."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    finish = ""
    for chunk in chunks:
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            names[call.index] = names.get(call.index, "") + (call.function.name or "")
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return [(names[index], json.loads(arguments[index])) for index in sorted(names)], finish


def test_a_question_becomes_a_call_whole_and_streamed(client: openai.OpenAI) -> None:
    (choice,) = chat(client, user(QUESTION)).choices
    assert (calls_of(choice.message), choice.message.content, choice.finish_reason) == ([CALL], None, "tool_calls")
    assert streamed_calls(chat(client, user(QUESTION), stream=True)) == ([CALL], "tool_calls")


def test_a_tool_that_the_user_names_gets_the_values_that_the_user_names(client: openai.OpenAI) -> None:
    (choice,) = chat(client, user("Use add with a = 12 and b = 345.")).choices
    assert calls_of(choice.message) == [("add", {"a": 12, "b": 345})]


def test_the_result_of_a_call_is_the_answer(client: openai.OpenAI) -> None:
    asked = chat(client, user(QUESTION)).choices[0].message
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": RESULT}
    (choice,) = chat(client, [*user(QUESTION), asked, result]).choices
    assert (choice.message.content, choice.finish_reason) == (f"The answer is {RESULT}.", "stop")


def test_two_cities_are_two_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = user("What is the weather in Paris and Oslo?")
    both = [CALL, ("get_weather", {"city": "Oslo"})]
    assert calls_of(chat(client, asked).choices[0].message) == both
    assert streamed_calls(chat(client, asked, stream=True)) == (both, "tool_calls")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_has_the_arguments_of_the_question(client: openai.OpenAI, choice: Any) -> None:
    assert calls_of(chat(client, user(QUESTION), tool_choice=choice).choices[0].message) == [CALL]
    assert streamed_calls(chat(client, user(QUESTION), tool_choice=choice, stream=True))[0] == [CALL]


def test_strict_tools_are_called_in_the_same_way(client: openai.OpenAI) -> None:
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    assert calls_of(chat(client, user(QUESTION), tools=strict).choices[0].message) == [CALL]


def test_a_question_that_needs_no_tool_is_answered(client: openai.OpenAI) -> None:
    (choice,) = chat(client, user("Who are you?")).choices
    assert "Baton" in choice.message.content and choice.message.tool_calls is None


def test_the_responses_api_calls_and_answers_whole_and_streamed(client: openai.OpenAI) -> None:
    common: Any = {"model": "baton-demo", "tools": FLAT_TOOLS, "max_output_tokens": 100, "temperature": 0}
    asked = client.responses.create(input=QUESTION, **common)
    (call,) = asked.output
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == CALL
    *_, last = client.responses.create(input=QUESTION, stream=True, **common)
    (again,) = last.response.output
    assert (again.name, again.arguments) == (call.name, call.arguments)
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    answered = client.responses.create(input=result, previous_response_id=asked.id, **common)
    assert answered.output_text == f"The answer is {RESULT}."


def test_the_messages_api_calls_and_answers_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    common: Any = {"model": "baton-demo", "tools": ANTHROPIC_TOOLS, "max_tokens": 100}
    common["extra_body"] = {"temperature": 0}
    asked = claude.messages.create(messages=cast(Any, user(QUESTION)), **common)
    with claude.messages.stream(messages=cast(Any, user(QUESTION)), **common) as events:
        streamed = events.get_final_message()
    for message in (asked, streamed):
        (block,) = cast(Any, message.content)
        assert (block.type, block.name, block.input) == ("tool_use", *CALL)
        assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": cast(Any, asked.content[0]).id, "content": RESULT}
    turns: Any = [
        *user(QUESTION),
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    answered = claude.messages.create(messages=turns, **common)
    assert [cast(Any, block).text for block in answered.content] == [f"The answer is {RESULT}."]
