"""LangChain's `ChatAnthropic` against a server: `python baton_serve/bench/clients/with_langchain_anthropic.py http://127.0.0.1:8000`."""

import sys
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from pydantic import BaseModel

QUESTION = "Tell me about the red radio."


class Radio(BaseModel):
    """A radio with its color and rooms."""

    color: Literal["red", "blue"]
    rooms: Literal[1, 2, 3]


def main(url: str) -> None:
    chat = ChatAnthropic(model="baton-demo", base_url=url, api_key="none", temperature=0, max_tokens=100, max_retries=0)
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    assert whole.content and whole.content == "".join(str(chunk.text) for chunk in chunks), (whole, chunks)
    assert whole.usage_metadata["output_tokens"] > 0
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], total.usage_metadata
    assert len(chat.batch([QUESTION, "Hello!"])) == 2
    found = chat.with_structured_output(Radio).invoke(QUESTION)
    assert isinstance(found, Radio)
    called = chat.bind_tools([Radio], tool_choice="any").invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "Radio", called
    counted = chat.get_num_tokens_from_messages([HumanMessage(QUESTION)])
    assert counted == whole.usage_metadata["input_tokens"], (counted, whole.usage_metadata)
    print(f"langchain-anthropic: {whole.content!r}, streamed alike, {found!r}, {counted} tokens counted")


if __name__ == "__main__":
    main(sys.argv[1])
