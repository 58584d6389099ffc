"""Let the model call a function and answer with its result. `tool_choice="required"` makes every model call one."""

import json
import os

from openai import OpenAI

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000/v1")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str) -> str:
    """Stand in for a service that knows the weather."""
    return {"Paris": "sunny, 21 degrees"}.get(city, "Error: unknown city")


with OpenAI(base_url=URL, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
    common = {"model": client.models.list().data[0].id, "tools": TOOLS, "max_tokens": 64, "temperature": 0}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = client.chat.completions.create(messages=messages, **common).choices[0].message
    messages.append(asked)
    for call in asked.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        print(f"{call.function.name}({arguments})")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)})
    print(client.chat.completions.create(messages=messages, **common).choices[0].message.content)
