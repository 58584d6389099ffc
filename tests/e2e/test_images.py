"""Images in chats through router, prefill, transfer and decode: greedy tokens equal transformers' own LLaVA."""

import asyncio
import base64
import os
import signal
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from baton_serve.contracts.instance import Role
from baton_serve.contracts.messages import Generate, Prefill
from baton_serve.engine import EngineConfig
from baton_serve.engine.model.vision.tower import load_tower
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.request_server import RoleHandler, RoleMessage
from tests.e2e.cluster import Cluster
from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tests.images import Piece, Reference, data_url, picture
from tests.tiny_models import IMAGE_ID, IMAGE_TOKENS, write_tiny_llava

pytestmark = pytest.mark.slow

NEW_TOKENS = 10
Content = list[str | bytes]
"""Of one message: texts and pictures."""

CHATS: dict[str, Content] = {
    "one image": [picture(1), "What is it, and where does the river end?"],
    "the same text and another image": [picture(2), "What is it, and where does the river end?"],
    "two images": ["Compare ", picture(3), " with the other one, ", picture(4), " please."],
    "the first again": [picture(1), "What is it, and where does the river end?"],
    "text alone": ["What is it, and where does the river end?"],
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("models") / "llava")


def parts_of(content: Content) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in content
    ]


def body_of(content: Content, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": parts_of(content)}], "max_tokens": NEW_TOKENS, "temperature": 0}
    return body | {"ignore_eos": True, "logprobs": True, "return_tokens_as_token_ids": True, **more}


def pieces_of(folder: Path, content: Content) -> list[Piece]:
    """Return the prompt that the chat template makes of this content."""
    text = "".join("<image>" if isinstance(part, bytes) else part for part in content)
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    images = iter(part for part in content if isinstance(part, bytes))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt, add_special_tokens=False).ids
    return [next(images) if token == IMAGE_ID else token for token in tokens]


def expected(folder: Path, contents: Sequence[Content], count: int = NEW_TOKENS) -> list[list[int]]:
    reference = Reference(folder)
    return [reference.answer(pieces_of(folder, content), count) for content in contents]


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return [int(one["token"].removeprefix("token_id:")) for one in answer["choices"][0]["logprobs"]["content"]]


async def chat(client: httpx.AsyncClient, content: Content) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=body_of(content), headers={"x-baton-explain": "1"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("transport", ["usm", "zeromq"])
def test_tokens_equal_transformers(llava: Path, transport: str) -> None:
    async def ask() -> list[dict[str, Any]]:
        async with asyncio.timeout(60), served(llava, transport=transport) as client:
            await until_ready(client)
            return [await chat(client, content) for content in CHATS.values()]

    answers = asyncio.run(ask())
    assert [tokens_of(answer) for answer in answers] == expected(llava, list(CHATS.values()))
    assert {answer["baton"]["decision"] for answer in answers} == {"disaggregated"}
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[1] < IMAGE_TOKENS < cached[3]
    sizes = [answer["usage"]["prompt_tokens"] for answer in answers]
    assert sizes[0] == sizes[1] == sizes[4] + IMAGE_TOKENS


@pytest.mark.parametrize("roles", [["prefill", "decode"], ["unified"]])
def test_images_of_earlier_turns_are_sent_again_only_if_their_kv_is_gone(llava: Path, roles: list[Role]) -> None:
    """In the third turn it is evicted after the router has looked: the answer is the same, after one more message."""
    content = CHATS["two images"]
    turns: list[Content] = [content, [*content, " And now?"], [*content, " And then?"]]
    sent: list[int] = []

    def wrap(role: Role, handler: RoleHandler) -> RoleHandler:
        serve = handler.serve

        async def recorded(request: AttemptEntry, message: RoleMessage) -> None:
            if isinstance(message, Prefill | Generate):
                sent.append(len(message.images))
                if len(sent) == 3:
                    await cast(Any, handler)._engine.call(lambda engine: engine.reset_prefix_cache())
            await serve(request, message)

        cast(Any, handler).serve = recorded
        return handler

    async def ask() -> list[dict[str, Any]]:
        async with asyncio.timeout(60), served(llava, transport="usm", roles=roles, wrap=wrap) as client:
            await until_ready(client, len(roles))
            answers = []
            for turn in turns:
                answers.append(await chat(client, turn))
                await asyncio.sleep(0.3)  # until the router knows which blocks are cached
            return answers

    answers = asyncio.run(ask())
    assert [tokens_of(answer) for answer in answers] == expected(llava, turns)
    assert sent == [2, 0, 0, 2]


def test_embeddings_of_a_client(llava: Path) -> None:
    """The answer is that to the picture, and the same embeddings are found in the prefix cache."""
    tower = load_tower(EngineConfig(model=str(llava), dtype="float32"), torch.device("cpu"), torch.float32)
    assert tower is not None
    opened = Image.open(BytesIO(picture(1))).convert("RGB")
    rows = BytesIO()
    torch.save(tower.encode(tower.reader.picture_of(opened)), rows)
    body = body_of(CHATS["one image"])
    part = {"type": "image_embeds", "image_embeds": base64.b64encode(rows.getvalue()).decode()}
    body["messages"][0]["content"][0] = part
    damaged = BytesIO()
    torch.save(torch.full((IMAGE_TOKENS, 64), torch.nan), damaged)
    other = {**part, "image_embeds": base64.b64encode(damaged.getvalue()).decode()}
    wrong = {**body, "messages": [{"role": "user", "content": [other]}]}

    async def ask() -> list[httpx.Response]:
        async with asyncio.timeout(60), served(llava, transport="usm", enable_mm_embeds=True) as client:
            await until_ready(client)
            return [await client.post("/v1/chat/completions", json=one) for one in (body, body, wrong)]

    first, again, refused = asyncio.run(ask())
    assert [tokens_of(answer.json()) for answer in (first, again)] == expected(llava, [CHATS["one image"]]) * 2
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > IMAGE_TOKENS
    assert refused.status_code == 400 and "contain NaN" in refused.json()["error"]["message"]


def test_images_of_tiles(tmp_path: Path) -> None:
    """LLaVA-NeXT: as many tokens as the image's shape makes of it."""
    write_tiny_llava(tmp_path, "mistral", tiles=True)
    contents: list[Content] = [
        [picture(number, kind=kind, size=size), "What is it?"]
        for number, (kind, size) in enumerate([("PNG", (60, 20)), ("JPEG", (20, 60)), ("WEBP", (33, 31))])
    ]

    async def ask() -> list[dict[str, Any]]:
        async with asyncio.timeout(60), served(tmp_path, transport="usm") as client:
            await until_ready(client)
            return [await chat(client, content) for content in contents]

    answers = asyncio.run(ask())
    assert [tokens_of(answer) for answer in answers] == expected(tmp_path, contents)
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 3


def test_by_one_instance_that_does_all(llava: Path) -> None:
    async def ask() -> list[dict[str, Any]]:
        async with asyncio.timeout(60), served(llava, transport="usm", roles=("unified",)) as client:
            await until_ready(client, 1)
            return [await chat(client, content) for content in CHATS.values()]

    assert [tokens_of(answer) for answer in asyncio.run(ask())] == expected(llava, list(CHATS.values()))


def test_preempted_sequences_go_on_from_their_blocks_or_are_read_again(llava: Path) -> None:
    """Together the sequences need more blocks than decode has, so it preempts some. It cannot compute image blocks
    again."""
    contents: list[Content] = [[picture(number), f"What is it, number {number}?"] for number in range(4)]
    count = 60

    async def ask() -> tuple[list[dict[str, Any]], str]:
        small = {"num_gpu_blocks_override": 14, "max_model_len": 192}
        patient: dict[str, Any] = {"retry_budget": 1.0, "max_replays": 50}
        async with asyncio.timeout(90), served(llava, transport="usm", instance=small, **patient) as client:
            await until_ready(client)
            bodies = [body_of(content, max_tokens=count) for content in contents]
            asked = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
            return [dict(answer.json()) for answer in asked], (await client.get("/metrics")).text

    answers, metrics = asyncio.run(ask())
    assert [tokens_of(answer) for answer in answers] == expected(llava, contents, count)
    (replays,) = (line.split()[-1] for line in metrics.splitlines() if line.startswith("baton:replays_total{"))
    assert float(replays) > 0


def test_a_broken_image_is_the_clients_fault(llava: Path) -> None:
    """The header of the file is right, so that only decoding the whole image finds the error. The prompt may have begun
    with the images before it: then its blocks are freed on both sides."""
    cut = picture(1, size=(64, 64))[:300]
    contents: list[Content] = [[cut, "What is it?"], [picture(7), picture(8), picture(9), "and ", cut, "What is it?"]]

    async def ask(roles: list[Role]) -> list[httpx.Response]:
        async with asyncio.timeout(60), served(llava, transport="usm", roles=roles) as client:
            await until_ready(client, len(roles))
            answers = [await client.post("/v1/chat/completions", json=body_of(content)) for content in contents]
            await chat(client, CHATS["one image"])
            async with asyncio.timeout(10):
                while any(one["free_blocks"] < one["total_blocks"] for one in await instances(client)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            return answers

    async def instances(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        return list((await client.get("/health")).json()["instances"])

    for roles in (["prefill", "decode"], ["unified"]):
        for answer in asyncio.run(ask(cast(list[Role], roles))):
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("an image cannot be read: ")


def test_a_stream_goes_on_when_its_decode_instance_dies(llava: Path) -> None:
    """Real processes: the prompt is read again, with its images, by the prefill instance."""
    content, count = CHATS["two images"], 400
    (answer,) = expected(llava, [content], count)
    flags = ("--dtype", "float32", "--disaggregation-min-tokens", "0")
    with Cluster(llava, prefill=1, decode=2, args=flags) as cluster:
        pids = {one["instance"]: cluster.pid("decode", n) for n, one in enumerate(cluster.instances("decode"))}
        tokens: list[int] = []
        for event in cluster.stream("/v1/chat/completions", body_of(content, max_tokens=count)):
            before = len(tokens)
            for choice in event["choices"]:
                logprobs = (choice.get("logprobs") or {}).get("content") or []
                tokens += [int(one["token"].removeprefix("token_id:")) for one in logprobs]
            if before < 5 <= len(tokens):
                os.kill(pids["decode-0"], signal.SIGKILL)  # of two idle ones, the first is taken
        assert tokens == answer
        assert cluster.metrics()["baton:replays_total"] == 1
        cluster.wait_idle()
