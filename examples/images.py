"""Ask a question about an image file: `python examples/images.py picture.png "What is in this picture?"`."""

import base64
import mimetypes
import os
import sys
from pathlib import Path

from openai import OpenAI

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000/v1")
file, question = Path(sys.argv[1]), " ".join(sys.argv[2:]) or "What is in this picture?"
image = f"data:{mimetypes.guess_type(file)[0]};base64,{base64.b64encode(file.read_bytes()).decode()}"

with OpenAI(base_url=URL, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}],
            }
        ],
        max_tokens=64,
        temperature=0,
    )
    print(answer.choices[0].message.content)
    print(f"{answer.usage.prompt_tokens} prompt tokens, the image's included")
