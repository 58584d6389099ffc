"""LlamaIndex's `OpenAILike` against a server: `python baton_serve/bench/clients/with_llama_index.py http://127.0.0.1:8000/v1`."""

import asyncio
import sys
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = [ChatMessage(role="user", content="Tell me about the red radio.")]


class Radio(BaseModel):
    color: Literal["red", "blue"]
    rooms: Literal[1, 2, 3]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def main(url: str) -> None:
    common: dict[str, Any] = {
        "model": "baton-demo",
        "api_base": url,
        "api_key": "none",
        "context_window": 2048,
        "temperature": 0.0,
        "max_tokens": 100,
    }
    chat = OpenAILike(**common, is_chat_model=True, is_function_calling_model=True)
    whole = chat.chat(QUESTION)
    text = whole.message.content
    assert text and text == "".join(part.delta or "" for part in chat.stream_chat(QUESTION))
    assert whole.raw.usage.completion_tokens > 0
    assert asyncio.run(chat.achat(QUESTION)).message.content == text

    tool = FunctionTool.from_defaults(weather)
    called = chat.chat_with_tools([tool], chat_history=QUESTION, tool_required=True)
    (call,) = chat.get_tool_calls_from_response(called)[:1]
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Paris", "Rome"), call
    *_, last = chat.stream_chat_with_tools([tool], chat_history=QUESTION, tool_required=True)
    assert chat.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
    structured = chat.as_structured_llm(Radio).chat(QUESTION).raw
    assert isinstance(structured, Radio), structured
    print(f"llama-index: chat {text!r}, streamed alike, {call.tool_name}({call.tool_kwargs}), {structured!r}")

    plain = OpenAILike(**common, is_chat_model=False)
    completed = plain.complete("The red").text
    assert completed and completed == "".join(part.delta or "" for part in plain.stream_complete("The red"))
    print(f"llama-index: completion {completed[:40]!r}, streamed alike")


if __name__ == "__main__":
    main(sys.argv[1])
