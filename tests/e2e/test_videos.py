"""Videos in chats through router, prefill, transfer and decode: greedy tokens equal transformers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton_serve.contracts.vision.videos import VideoRules
from baton_serve.engine.model.vision.image_reader import HFImageReader
from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tests.e2e.test_images import tokens_of
from tests.engine.test_videos import COUNT, SETTINGS, Model
from tests.images import family_of
from tests.tiny_models import VISION_TEMPLATE
from tests.videos import video, video_url
from tools.model_verdicts import generating_families
from tools.tiny_families import write_family

pytest.importorskip("av")
pytestmark = pytest.mark.slow

EXPLAIN = {"x-baton-explain": "1"}
BEFORE, AFTER = "<|im_start|>user\nLook: ", " What happens?<|im_end|>\n<|im_start|>assistant\n"


def write_model(kind: str, folder: Path) -> None:
    """A tiny model with tokens for images and videos, and a chat template that writes them."""
    write_family(kind, generating_families()[kind], folder)
    family = family_of(folder)
    assert isinstance(family.video, VideoRules)
    names = {family.image_token_id: "<image>", family.video.placeholder_id: "<video>"}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    more = range(tokenizer.get_vocab_size(), max(names) + 1)
    tokenizer.add_special_tokens([names.get(number, f"<unused {number}>") for number in more])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    both = "{% if part['type'] == 'video' %}<video>{% elif part['type'] == 'image' %}"
    template = VISION_TEMPLATE.replace("{% if part['type'] == 'image' %}", both)
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


@pytest.mark.parametrize(("kind", "transport"), [("qwen2_5_vl", "usm"), ("qwen3_vl", "zeromq"), ("glm4v", "usm")])
def test_tokens_equal_transformers(kind: str, transport: str, tmp_path: Path) -> None:
    """Decode has no tower, and computes the positions from the grids in the request."""
    write_model(kind, tmp_path)
    files = [video(number, kind=("mp4", "webm")[number % 2]) for number in (1, 2)]

    async def ask() -> list[dict[str, Any]]:
        found = []
        async with (
            asyncio.timeout(60),
            served(tmp_path, transport=transport, instance={"max_model_len": 600}) as client,
        ):
            await until_ready(client)
            for file in [*files, files[0]]:
                parts = [
                    {"type": "text", "text": "Look: "},
                    {"type": "video_url", "video_url": {"url": video_url(file)}},
                    {"type": "text", "text": " What happens?"},
                ]
                body = {"messages": [{"role": "user", "content": parts}], "max_tokens": COUNT, "temperature": 0}
                body |= {"ignore_eos": True, "logprobs": True, "return_tokens_as_token_ids": True}
                answer = await client.post(
                    "/v1/chat/completions", json=body | {"mm_processor_kwargs": SETTINGS}, headers=EXPLAIN
                )
                assert answer.status_code == 200, answer.text
                found.append(answer.json())
        return found

    first, second, again = asyncio.run(ask())
    model = Model(kind, tmp_path)
    images = HFImageReader(tmp_path, family_of(tmp_path))
    before, after = (model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (BEFORE, AFTER))
    wanted = [model.answer(images, [*before, model.with_header(file), *after]) for file in files]
    assert [tokens_of(first), tokens_of(second), tokens_of(again)] == [*wanted, wanted[0]]
    assert wanted[0] != wanted[1]
    assert first["baton"]["decision"] == "disaggregated"
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (second, again)]
    assert cached[0] < cached[1]
