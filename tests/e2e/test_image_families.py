"""Chats with images through router, prefill, transfer and decode: their prompts and answers equal transformers'.

The router alone writes what stands around an image, so these families have marks and labels of each kind.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tests.e2e.test_images import body_of, parts_of, tokens_of
from tests.engine.test_image_families import CROPS
from tests.images import picture
from tests.vision_families import FAMILIES, VisionReference, write_vision_model

pytestmark = pytest.mark.slow

COUNT = 10
Turns = list[list[str | bytes]]
CHATS: list[Turns] = [
    [[picture(1, size=(40, 30)), "What is it, and where does the river end?"]],
    [["Compare ", picture(2, size=(70, 20)), "\n\n", picture(3, size=(9, 60)), " please."]],
    [[picture(1, size=(40, 30)), "What is it?"], ["a boat"], ["And this?\n", picture(4)]],
    [["What is it?"]],
]


def messages_of(turns: Turns) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": parts_of(turn)} for role, turn in zip(roles, turns, strict=False)]


def text_of(turns: Turns, placeholder: str) -> str:
    """Return the prompt that the chat template makes."""
    roles = ["user", "assistant"] * len(turns)
    texts = ["".join(placeholder if isinstance(part, bytes) else part for part in turn) for turn in turns]
    said = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, texts, strict=False))
    return "".join(said) + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "transport", "settings"),
    [
        ("gemma3", "zeromq", {}),
        ("gemma3", "usm", CROPS),
        ("idefics3", "usm", {}),
        ("mistral3", "usm", {}),
        ("aya_vision", "zeromq", {}),
        ("paligemma", "zeromq", {}),
        ("paligemma2", "usm", {}),
    ],
    ids=["gemma3", "gemma3_crops", "idefics3", "mistral3", "aya_vision", "paligemma", "paligemma2"],
)
def test_chats_equal_transformers(name: str, transport: str, settings: dict[str, Any], tmp_path: Path) -> None:
    family = FAMILIES[name]
    more, step = {"mm_processor_kwargs": settings}, {"max_num_batched_tokens": max(32, family.least_step)}
    write_vision_model(tmp_path, family)

    async def ask() -> tuple[list[dict[str, Any]], list[list[int]]]:
        async with asyncio.timeout(60), served(tmp_path, transport=transport, instance=step) as client:
            await until_ready(client)
            answers, prompts = [], []
            for turns in CHATS * 2:
                body = {
                    **body_of([], max_tokens=COUNT),
                    "messages": messages_of(turns),
                    "mm_processor_kwargs": settings,
                }
                answer = await client.post("/v1/chat/completions", json=body, headers={"x-baton-explain": "1"})
                assert answer.status_code == 200, answer.text
                answers.append(dict(answer.json()))
                tokens = await client.post("/tokenize", json={"messages": body["messages"], **more})
                prompts.append(tokens.json()["tokens"])
            return answers, prompts

    answers, prompts = asyncio.run(ask())
    reference = VisionReference(tmp_path, family)
    expected = []
    for turns in CHATS:
        images = [part for turn in turns for part in turn if isinstance(part, bytes)]
        expected.append(reference.answer(text_of(turns, family.placeholder), images, COUNT, **settings))
    found = [(prompt, tokens_of(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    assert found == expected * 2
    assert {answer["baton"]["decision"] for answer in answers if answer["usage"]["prompt_tokens"] > 60} == {
        "disaggregated"
    }
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert all(cached[4:7])
