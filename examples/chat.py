"""Ask one question, and print the answer and which workers served it."""

import os

from openai import OpenAI

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000/v1")

with OpenAI(base_url=URL, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 2 plus 3?"}],
        max_tokens=32,
        temperature=0,
        extra_headers={"x-baton-explain": "1"},
    )
    print(answer.choices[0].message.content)
    # The field `baton` is Baton's own: decision, workers, cached tokens and times.
    explanation = answer.to_dict()["baton"]
    print(f"decision: {explanation['decision']}, TTFT: {explanation['ttft_s'] * 1e3:.1f} ms")
