"""Requests as LangChain, LlamaIndex and Open WebUI send them are answered with what these programs read.

recorded_requests.jsonl has the requests of `with_langchain.py` and `with_llama_index.py`, benchmarks' clients,
which run the real clients, each with its version. The requests of Open WebUI follow its backend: the list of models,
chats with marks for caches, and the title of a chat.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.slow

FILE = Path(__file__).with_name("recorded_requests.jsonl")
RECORDED: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
USER = {"authorization": "Bearer none", "x-openwebui-user-name": "a%20user", "x-openwebui-chat-id": "1"}


@pytest.fixture(scope="module")
def demo() -> Iterator[Cluster]:
    with Cluster(None, args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes")) as running:
        yield running


def numbered(recorded: dict[str, Any]) -> str:
    return f"{RECORDED.index(recorded)}-{recorded['client'].partition(' ')[0]}"


@pytest.mark.parametrize("recorded", RECORDED, ids=numbered)
def test_a_recorded_request_is_answered_in_its_form(demo: Cluster, recorded: dict[str, Any]) -> None:
    path, body = recorded["path"], recorded["body"]
    if body is None:
        answer = demo.client.get(path, headers=USER)
        assert [model["id"] for model in answer.json()["data"]] == ["baton-demo"]
        return
    answer = demo.client.post(path, json=body, headers=USER, timeout=120)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        check_stream(answer.text, body, answer.headers["content-type"])
    elif path == "/v1/responses":
        (message,) = answer.json()["output"]
        assert message["role"] == "assistant" and message["content"][0]["text"]
    elif path == "/v1/completions":
        assert answer.json()["choices"][0]["text"]
    else:
        check_message(answer.json()["choices"][0]["message"], body)
        assert answer.json()["usage"]["completion_tokens"] > 0


def check_stream(text: str, body: dict[str, Any], content_type: str) -> None:
    """Assert that a stream has an answer, and its usage if that was asked for."""
    assert content_type.startswith("text/event-stream")
    *lines, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if "prompt" in body:
        assert "".join(choice["text"] for choice in choices)
        return
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for delta in (choice["delta"] for choice in choices):
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls") or []:
            if len(message["tool_calls"]) == part["index"]:
                message["tool_calls"].append({"function": {"name": part["function"]["name"], "arguments": ""}})
            message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
    check_message(message, body)
    asks_for_usage = body.get("stream_options", {}).get("include_usage", False)
    assert any((chunk.get("usage") or {}).get("completion_tokens") for chunk in chunks) == asks_for_usage


def check_message(message: dict[str, Any], body: dict[str, Any]) -> None:
    """Assert that a message has a text, a call of the required tool, or an object of the schema."""
    if "tools" in body:
        (tool,), call = body["tools"], message["tool_calls"][0]["function"]
        assert call["name"] == tool["function"]["name"]
        assert json.loads(call["arguments"]).keys() >= set(tool["function"]["parameters"]["required"])
    elif "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        assert json.loads(message["content"]).keys() == set(schema["required"])
    else:
        assert message["content"]
