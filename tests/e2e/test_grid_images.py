"""Images of models with M-RoPE through router, prefill, transfer and decode: greedy tokens equal transformers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tests.e2e.test_images import Content, body_of, chat, tokens_of
from tests.images import Piece, Reference, family_of, picture
from tests.tiny_models import VISION_TEMPLATE
from tools.model_verdicts import generating_families
from tools.tiny_families import write_family

pytestmark = pytest.mark.slow

COUNT = 10
CHATS: list[Content] = [
    [picture(1, size=(50, 70)), "What is it, and where does the river end?"],
    [picture(2, size=(50, 70)), "What is it, and where does the river end?"],
    ["Compare ", picture(3, size=(1, 1)), " with ", picture(4, kind="JPEG", size=(600, 40)), " please."],
    [picture(1, size=(50, 70)), "What is it, and where does the river end?"],
    ["What is it, and where does the river end?"],
]


def write_model(kind: str, folder: Path) -> None:
    """A tiny model with a token for images and a chat template that writes it."""
    write_family(kind, generating_families()[kind], folder)
    image_id = family_of(folder).image_token_id
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    between = range(tokenizer.get_vocab_size(), image_id)
    tokenizer.add_special_tokens([*(f"<unused {number}>" for number in between), "<image>"])
    assert tokenizer.token_to_id("<image>") == image_id
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": VISION_TEMPLATE}))


def pieces_of(folder: Path, messages: list[tuple[str, Content]], *, answers: bool = True) -> list[Piece]:
    """The prompt that the chat template makes of messages."""
    prompt = "".join(
        f"<|im_start|>{role}\n{''.join('<image>' if isinstance(part, bytes) else part for part in content)}<|im_end|>\n"
        for role, content in messages
    )
    images = iter(part for _, content in messages for part in content if isinstance(part, bytes))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = "<|im_start|>assistant\n" if answers else ""
    tokens = tokenizer.encode(f"{prompt}{end}", add_special_tokens=False).ids
    image_id = family_of(folder).image_token_id
    return [next(images) if token == image_id else token for token in tokens]


@pytest.mark.parametrize(("kind", "transport"), [("qwen2_5_vl", "usm"), ("qwen3_vl", "zeromq")])
def test_tokens_equal_transformers(kind: str, transport: str, tmp_path: Path) -> None:
    """Decode has no tower, and computes the positions from the grids in the request."""
    write_model(kind, tmp_path)
    turns: list[tuple[str, Content]] = [
        ("user", CHATS[0]),
        ("assistant", ["It is a river."]),
        ("user", [*CHATS[2], " And now?"]),
    ]

    async def ask() -> list[dict[str, Any]]:
        small = {"max_model_len": 400}
        async with asyncio.timeout(60), served(tmp_path, transport=transport, instance=small) as client:
            await until_ready(client)
            answers = [await chat(client, content) for content in CHATS]
            parts = body_of(turns[2][1])["messages"][0]["content"]
            first = body_of(turns[0][1])["messages"][0]
            said = [first, {"role": "assistant", "content": turns[1][1][0]}, {"role": "user", "content": parts}]
            later = await client.post("/v1/chat/completions", json=body_of([]) | {"messages": said})
            assert later.status_code == 200, later.text
            return [*answers, later.json()]

    answers = asyncio.run(ask())
    reference = Reference(tmp_path)
    chats: list[list[tuple[str, Content]]] = [*([("user", content)] for content in CHATS), turns]
    wanted = [reference.answer(pieces_of(tmp_path, messages), COUNT) for messages in chats]
    assert [tokens_of(answer) for answer in answers] == wanted
    assert wanted[0] != wanted[1]
    assert {answer["baton"]["decision"] for answer in answers[:-1]} == {"disaggregated"}
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[1] < cached[3]
