"""Ask the base model and every LoRA adapter the same question."""

import os

from openai import OpenAI

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000/v1")

with OpenAI(base_url=URL, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
    # An adapter is a model of its own in this list; its `parent` is the base model.
    for model in client.models.list().data:
        parent = model.to_dict().get("parent")
        answer = client.completions.create(model=model.id, prompt="The sea is", max_tokens=16, temperature=0)
        print(f"{model.id} ({f'adapter of {parent}' if parent else 'base model'}): {answer.choices[0].text!r}")
