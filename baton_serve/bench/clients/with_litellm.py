"""LiteLLM against a server: `python with_litellm.py http://127.0.0.1:8000/v1 [embedding URL]`."""

import json
import sys
from typing import Any

import litellm

QUESTION = [{"role": "user", "content": "Tell me about the red radio."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
        },
    },
}


def main(url: str, embedding_url: str | None) -> None:
    common: dict[str, Any] = {
        "model": "hosted_vllm/baton-demo",
        "api_base": url,
        "api_key": "none",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = litellm.completion(**common)
    text = whole.choices[0].message.content
    chunks = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text and text == streamed, (text, streamed)
    assert whole.usage.completion_tokens > 0
    called = litellm.completion(**common | {"max_tokens": 100}, tools=[WEATHER], tool_choice="required")
    function = called.choices[0].message.tool_calls[0].function
    assert (function.name, json.loads(function.arguments)) == ("weather", {"city": "Paris"}), called
    texted = litellm.text_completion(
        model="text-completion-openai/baton-demo", api_base=url, api_key="none", prompt="The red", max_tokens=8
    )
    assert texted.choices[0].text
    print(f"litellm: chat {text!r}, streamed alike, a call of a tool, a completion")
    if embedding_url is not None:
        found = litellm.embedding(
            model="hosted_vllm/minilm",
            api_base=embedding_url,
            api_key="none",
            input=["a", "b"],
            encoding_format="float",
        )
        assert len(found.data) == 2 and len(found.data[0]["embedding"]) == 384
        print("litellm: two embeddings")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
