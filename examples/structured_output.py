"""Get an answer that follows a JSON schema."""

import json
import os

from openai import OpenAI

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000/v1")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"enum": [2, 4, 6, 8]}},
    "required": ["name", "legs"],
}

with OpenAI(base_url=URL, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe an animal."}],
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
        max_tokens=64,
        temperature=0,
    )
    animal = json.loads(answer.choices[0].message.content)
    print(f"{animal['name']} has {animal['legs']} legs")
