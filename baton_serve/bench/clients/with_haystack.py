"""Haystack against a server: `python baton_serve/bench/clients/with_haystack.py http://127.0.0.1:8000/v1`."""

import sys
from typing import Annotated, Any, Literal

from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel

QUESTION = [ChatMessage.from_user("Tell me about the red radio.")]


class Radio(BaseModel):
    color: Literal["red", "blue"]
    rooms: Literal[1, 2, 3]


def weather(city: Annotated[Literal["Paris", "Rome"], "which"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def main(url: str) -> None:
    common: dict[str, Any] = {"api_key": Secret.from_token("none"), "model": "baton-demo", "api_base_url": url}
    for kind, limit in ((OpenAIChatGenerator, "max_tokens"), (OpenAIResponsesChatGenerator, "max_output_tokens")):
        options = {"temperature": 0, limit: 100}
        generator = kind(**common, generation_kwargs=options)
        (whole,) = generator.run(QUESTION)["replies"]
        parts: list[StreamingChunk] = []
        (streamed,) = generator.run(QUESTION, streaming_callback=parts.append)["replies"]
        text = "".join(part.content for part in parts)
        assert text and whole.text == text == streamed.text, (whole, streamed)
        assert whole.meta["usage"], whole.meta
        forced = {**options, "tool_choice": "required"}
        tools = [create_tool_from_function(weather)]
        (called,) = generator.run(QUESTION, tools=tools, generation_kwargs=forced)["replies"]
        (again,) = generator.run(QUESTION, tools=tools, generation_kwargs=forced, streaming_callback=parts.append)[
            "replies"
        ]
        assert called.tool_calls and called.tool_calls[0].tool_name == "weather", called
        assert [one.arguments for one in called.tool_calls] == [one.arguments for one in again.tool_calls], again
        form = {"response_format": Radio} if kind is OpenAIChatGenerator else {"text_format": Radio}
        (formed,) = kind(**common, generation_kwargs={**options, **form}).run(QUESTION)["replies"]
        assert Radio.model_validate_json(formed.text)
        print(f"haystack, {kind.__name__}: {text!r}, streamed alike, {called.tool_calls[0].arguments}, {formed.text}")


if __name__ == "__main__":
    main(sys.argv[1])
