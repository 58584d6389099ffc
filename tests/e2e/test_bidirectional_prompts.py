"""PaliGemma, whose prompts are seen in both directions, through router, encode, prefill, transfer and decode: chats
without a template of the model equal transformers' answers, also after a replay, and only equal prompts hit the cache.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.instance import Role
from tests.e2e.breaking import Breaking
from tests.e2e.in_process import served
from tests.e2e.test_encode_pool import counts_of
from tests.e2e.test_families import until_ready
from tests.e2e.test_images import Content, body_of, tokens_of
from tests.images import picture
from tests.vision_families import FAMILIES, VisionReference, write_vision_model

pytestmark = pytest.mark.slow

COUNT = 10
REPLAYED: dict[str, Any] = {"wrap": Breaking, "retry_budget": 1000.0}
A, B = picture(1, size=(40, 30)), picture(2, size=(70, 20))
CHATS: list[Content] = [
    [A, "What is it, and where does the river end?"],
    [A, "What is it, and where does the river end? Here."],
    ["Compare ", B, " with ", A, " please."],
    ["What is it?"],
]


@pytest.fixture(scope="module", params=["paligemma", "paligemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VisionReference]:
    folder = write_vision_model(tmp_path_factory.mktemp("model"), FAMILIES[request.param])
    # The folders of PaliGemma have no chat template.
    (folder / "chat_template.jinja").unlink()
    return folder, VisionReference(folder, FAMILIES[request.param])


def wanted_of(reference: VisionReference, content: Content) -> list[int]:
    """Return transformers' answer to the text that its processor is given: it adds the beginning and the end."""
    text = "".join("<image>" if isinstance(part, bytes) else part for part in content)
    images = [part for part in content if isinstance(part, bytes)]
    return reference.answer(text if images else f"<|endoftext|>{text}\n", images, COUNT)[1]


@pytest.mark.parametrize(
    ("transport", "roles", "more"),
    [
        ("usm", ["prefill", "decode", "encode"], {}),
        ("zeromq", ["prefill", "decode", "encode"], {}),
        ("zeromq", ["prefill", "decode"], REPLAYED),
        ("usm", ["prefill", "decode"], {"decode": {"block_size": 8}}),
        ("usm", ["unified"], {}),
    ],
    ids=["encode_usm", "encode_zeromq", "replayed", "different_blocks", "unified"],
)
def test_answers_equal_transformers(
    model: tuple[Path, VisionReference], transport: str, roles: list[Role], more: dict[str, Any]
) -> None:
    folder, reference = model
    step = {"max_num_batched_tokens": 120, "embedding_cache_gb": 0.01, "max_model_len": 400}

    async def ask() -> list[dict[str, Any]]:
        async with (
            asyncio.timeout(90),
            served(folder, transport=transport, roles=roles, instance=step, **more) as client,
        ):
            await until_ready(client, len(roles))
            answers = []
            for content in [*CHATS, *CHATS]:
                answer = await client.post(
                    "/v1/chat/completions", json=body_of(content, max_tokens=COUNT), headers={"x-baton-explain": "1"}
                )
                assert answer.status_code == 200, answer.text
                answers.append(dict(answer.json()))
            if "encode" in roles:
                encoded = await counts_of(client, "encode", "baton:encoded_images_total")
                assert encoded["computed"] == 2.0
            long = body_of([A, "river " * 40], max_tokens=COUNT)
            refused = await client.post("/v1/chat/completions", json=long)
            assert refused.status_code == 400, refused.text
            assert "raise max_num_batched_tokens" in refused.json()["error"]["message"]
            scored = await client.post("/v1/chat/completions", json=body_of(CHATS[0], prompt_logprobs=1))
            assert scored.status_code == 400, scored.text
            return answers

    answers = asyncio.run(ask())
    assert [tokens_of(answer) for answer in answers] == [wanted_of(reference, content) for content in CHATS] * 2
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    if more != REPLAYED:
        assert not any(cached[:4]) and all(cached[4:7])
        decisions = {answer["baton"]["decision"] for answer in answers}
        assert decisions == {"unified" if roles == ["unified"] else "disaggregated"}
