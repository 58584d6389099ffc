"""Let the model call a function. `tool_choice` forces the call, so that every model can do it."""

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
                "properties": {"city": {"enum": ["Paris", "Oslo"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city", "unit"],
            },
        },
    }
]

with OpenAI(base_url=URL, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=64,
        temperature=0,
    )
    call = answer.choices[0].message.tool_calls[0].function
    print(f"{call.name}({json.loads(call.arguments)})")
