"""smolagents against a server: `python baton_serve/bench/clients/with_smolagents.py http://127.0.0.1:8000/v1`."""

import sys
from typing import Any, ClassVar

from smolagents import ChatMessage, MessageRole, OpenAIServerModel, Tool, ToolCallingAgent


class Weather(Tool):  # type: ignore[misc]
    name = "weather"
    description = "The weather in a city."
    inputs: ClassVar[dict[str, Any]] = {"city": {"type": "string", "description": "which", "enum": ["Paris", "Rome"]}}
    output_type = "string"
    asked: ClassVar[list[str]] = []

    def forward(self, city: str) -> str:
        self.asked.append(city)
        return "sunny"


def main(url: str) -> None:
    common: dict[str, Any] = {"model_id": "baton-demo", "api_base": url, "api_key": "none", "temperature": 0}
    model = OpenAIServerModel(**common, max_tokens=100)
    question = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "Tell me about the red radio."}])]
    whole = model.generate(question)
    streamed = "".join(part.content or "" for part in model.generate_stream(question))
    assert whole.content and whole.content == streamed, (whole.content, streamed)
    assert whole.token_usage.output_tokens > 0
    called = model.generate(question, tools_to_call_from=[Weather()])
    assert called.tool_calls and called.tool_calls[0].function.name == "weather", called
    # An agent that must call a tool at each step: the demo model does not know when to stop.
    for is_streamed in (False, True):
        agent = ToolCallingAgent([Weather()], model, max_steps=2, stream_outputs=is_streamed, verbosity_level=0)
        agent.run("What is the weather like?")
        steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
        assert len(steps) == 2 and not any(step.error for step in steps), steps
    print(f"smolagents: chat {whole.content!r}, streamed alike, weather in {Weather.asked}")


if __name__ == "__main__":
    main(sys.argv[1])
