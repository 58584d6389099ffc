"""LangChain's ChatOpenAI against a server: `python baton_serve/bench/clients/with_langchain.py URL [embedding URL]`."""

import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION = [SystemMessage("You are helpful."), HumanMessage("Tell me about the red radio.")]


class Opinion(BaseModel):
    """An opinion of something: good or not."""

    is_good: bool


def main(url: str, embedding_url: str | None) -> None:
    common: dict[str, Any] = {"model": "baton-demo", "base_url": url, "api_key": "none", "temperature": 0}
    chat = ChatOpenAI(**common, max_tokens=24)
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    streamed = "".join(str(chunk.content) for chunk in chunks)
    assert whole.content and whole.content == streamed, (whole.content, streamed)
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    both = chat.batch([QUESTION, QUESTION])
    assert both[0].content == both[1].content == whole.content
    print(f"langchain: chat {whole.content!r}, streamed and in a batch alike")
    structured = ChatOpenAI(**common, max_tokens=200).with_structured_output(Opinion, method="json_schema", strict=True)
    found = structured.invoke("Is it good?")
    assert isinstance(found, Opinion), found
    bound = ChatOpenAI(**common, max_tokens=200).bind_tools([Opinion], tool_choice="required", strict=True)
    called = bound.invoke("Is it good?")
    assert called.tool_calls[0]["name"] == "Opinion", called
    print(f"langchain: structured output {found}, a call of a tool {called.tool_calls[0]['args']}")
    responses = ChatOpenAI(**common, max_tokens=24, use_responses_api=True).invoke(QUESTION)
    assert responses.text == whole.content, responses
    print("langchain: the same through the Responses API")
    if embedding_url is not None:
        embedder = OpenAIEmbeddings(
            model="minilm", base_url=embedding_url, api_key="none", check_embedding_ctx_length=False
        )
        assert len(embedder.embed_documents(["a", "b"])[1]) == 384
        print("langchain: two embeddings")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
