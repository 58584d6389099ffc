"""Pydantic AI against a server: `python baton_serve/bench/clients/with_pydantic_ai.py http://127.0.0.1:8000/v1`."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

QUESTION = "Tell me about the red radio."
SETTINGS = ModelSettings(temperature=0, max_tokens=100)


class Radio(BaseModel):
    color: Literal["red", "blue"]
    rooms: Literal[1, 2, 3]


async def ask(model: Model) -> None:
    name = type(model).__name__
    agent = Agent(model, instructions="Be short.", model_settings=SETTINGS)
    whole = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as streaming:
        text = "".join([piece async for piece in streaming.stream_text(delta=True)])
        usage = streaming.usage
    assert text and text == whole.output, (text, whole.output)
    print(name, repr(text), whole.usage, usage)

    called = await Agent(model, output_type=ToolOutput(Radio), model_settings=SETTINGS, retries=0).run(QUESTION)
    assert isinstance(called.output, Radio)
    async with Agent(model, output_type=ToolOutput(Radio), model_settings=SETTINGS).run_stream(QUESTION) as streaming:
        assert await streaming.get_output() == called.output
    print(name, called.output, "by a call of a tool")
    if not isinstance(model, AnthropicModel):
        native = Agent(model, output_type=NativeOutput(Radio), model_settings=SETTINGS, retries=0)
        found = await native.run(QUESTION)
        assert isinstance(found.output, Radio)
        async with native.run_stream(QUESTION) as streaming:
            assert await streaming.get_output() == found.output
        print(name, found.output, "by a form")


async def main(url: str) -> None:
    provider = OpenAIProvider(base_url=url, api_key="none")
    await ask(OpenAIChatModel("baton-demo", provider=provider))
    await ask(OpenAIResponsesModel("baton-demo", provider=provider))
    anthropic = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="none")
    await ask(AnthropicModel("baton-demo", provider=anthropic))
    try:
        await Agent(OpenAIChatModel("no-such-model", provider=provider)).run(QUESTION)
    except ModelHTTPError as error:
        assert error.status_code == 404
        print(error.body)
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
