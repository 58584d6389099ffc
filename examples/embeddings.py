"""Compare texts by the cosine of their embeddings."""

import os

from openai import OpenAI

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000/v1")
QUESTION = "What is the capital of France?"
TEXTS = ["Bananas are yellow.", "Paris is the capital of France.", "The dog sleeps."]

with OpenAI(base_url=URL, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    question, *texts = (item.embedding for item in client.embeddings.create(model=model, input=[QUESTION, *TEXTS]).data)

# Most embedding models return vectors of length 1, so the dot product is the cosine.
similarity = [sum(a * b for a, b in zip(question, text, strict=True)) for text in texts]
for value, text in sorted(zip(similarity, TEXTS, strict=True), reverse=True):
    print(f"{value:.3f}  {text}")
