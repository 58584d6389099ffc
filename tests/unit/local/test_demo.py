"""The requests of the demo, and its display of where the time went."""

import asyncio
import json
from random import Random

import httpx
import pytest

from baton_serve.services.local.demo import ask_with_tool, make_demo_prompt, time_split_text
from baton_serve.services.local.demo_client import AnswerError, DemoUsage, TimeSplit

CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


def test_every_fact_of_a_passage_is_stated_once_and_asked_for_by_name() -> None:
    passage = make_demo_prompt(Random(1))
    assert len({fact.thing for fact in passage.facts}) == len(passage.facts)
    for fact in passage.facts:
        assert passage.text.count(fact.code) == 1 and fact.thing in passage.text
        assert fact.question == f"What is the code of the {fact.thing}?"
    assert make_demo_prompt(Random(2)).text != passage.text


def test_the_split_of_a_handoff_names_its_transport_and_the_part_after_prefill() -> None:
    split = TimeSplit(
        decision="disaggregated",
        cached_tokens={"device": 16},
        ttft_s=0.5,
        queue_s=0.001,
        prefill_s=0.4,
        decode_s=0.2,
        handoff_s=0.41,
        handoff_exposed_s=0.01,
        transport="usm",
        transferred_blocks=60,
        transferred_bytes=4_000_000,
        reused_blocks=1,
    )
    text = time_split_text(split, DemoUsage(970, 11))
    for part in (
        "970 tokens, 16 of them cached",
        "410.0 ms over usm",
        "60 KV blocks, 4.0 MB; 1 more were",
        "remainder    10.0 ms of the handoff took place after prefill",
        "50 tok/s",
    ):
        assert part in text, text


def test_without_a_handoff_it_says_why() -> None:
    text = time_split_text(TimeSplit(decision="decode_only", ttft_s=0.1), DemoUsage(9, 1))
    assert "handoff      none: the prompt is short" in text and "remainder" not in text


class FakeChat:
    """Answers chats with these messages, one after another, and keeps the bodies of the requests."""

    def __init__(self, *messages: dict[str, object]) -> None:
        self._messages = list(messages)
        self.bodies: list[dict[str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["content-type"] == "application/json"
        self.bodies.append(json.loads(request.content))
        if not self._messages:
            return httpx.Response(503, text="nobody is left")
        return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", **self._messages.pop(0)}}]})

    def ask(self) -> None:
        async def run() -> None:
            async with httpx.AsyncClient(base_url="http://fake", transport=httpx.MockTransport(self)) as client:
                await ask_with_tool(client)

        asyncio.run(run())


def test_a_call_gets_its_result_and_the_answer_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    chat = FakeChat({"content": None, "tool_calls": [CALL]}, {"content": "The answer is sunny, 21 degrees."})
    chat.ask()
    printed = capsys.readouterr().out
    assert 'call         get_weather({"city": "Paris"})' in printed and "21 degrees.   (correct)" in printed
    messages = chat.bodies[1]["messages"]
    assert isinstance(messages, list) and messages[1]["tool_calls"] == [CALL]
    assert messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21 degrees"}


def test_an_answer_without_a_call_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    FakeChat({"content": "Hello!"}, {"content": "It is sunny, 21 degrees."}).ask()
    assert "WRONG" in capsys.readouterr().out


def test_a_refused_request_ends_the_demo_with_its_status() -> None:
    with pytest.raises(AnswerError, match="status 503: nobody is left"):
        FakeChat().ask()
