"""The OpenAI Agents SDK against a server: `python baton_serve/bench/clients/with_openai_agents.py http://127.0.0.1:8000/v1`."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

QUESTION = "Tell me about the red radio."


class Radio(BaseModel):
    color: Literal["red", "blue"]
    rooms: Literal[1, 2, 3]


called: list[str] = []


@function_tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    called.append(city)
    return "sunny"


async def ask(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> None:
    settings = ModelSettings(temperature=0, max_tokens=100, include_usage=True)
    agent = Agent(name="a", instructions="Be short.", model=model, model_settings=settings)
    whole = await Runner.run(agent, QUESTION)
    streamed = Runner.run_streamed(agent, QUESTION)
    text = ""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            text += event.data.delta
    assert text and text == whole.final_output == streamed.final_output, (text, whole.final_output)
    for result in (whole, streamed):
        assert result.context_wrapper.usage.output_tokens > 0, result

    typed = await Runner.run(Agent(name="b", model=model, model_settings=settings, output_type=Radio), QUESTION)
    assert isinstance(typed.final_output, Radio)

    # The call is required once; the SDK then lets the model choose, which answers with text.
    forced = ModelSettings(temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False)
    caller = Agent(name="c", model=model, model_settings=forced, tools=[weather])
    called.clear()
    answered = await Runner.run(caller, "What is the weather like?")
    again = Runner.run_streamed(caller, "What is the weather like?")
    kinds = [event.name async for event in again.stream_events() if event.type == "run_item_stream_event"]
    assert len(called) == 2 and "tool_called" in kinds and "tool_output" in kinds, (called, kinds)
    assert answered.final_output == again.final_output, (answered.final_output, again.final_output)
    print(f"{type(model).__name__}: {text!r}, streamed alike, {typed.final_output!r}, weather in {called}")


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    await ask(OpenAIChatCompletionsModel("baton-demo", client))
    await ask(OpenAIResponsesModel("baton-demo", client))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
