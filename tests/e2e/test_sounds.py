"""Audio in chats through router, prefill, transfer and decode: prompts and answers equal transformers'."""

import asyncio
import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.instance import Role
from tests.e2e.breaking import Breaking
from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tests.e2e.test_images import body_of, tokens_of
from tests.images import data_url, picture
from tests.sound_families import FAMILIES, WINDOW_S, Samples, SoundFamily, SoundReference, write_sound_model
from tests.speech import tones, wav
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

COUNT = 8
Content = list[str | bytes | Samples]
SHORT, OTHER, LONG = tones(1, 1.03), tones(2, 1.03), tones(3, WINDOW_S * 1.6)
CHATS: list[Content] = [
    [SHORT, "What is it, and where does the river end?"],
    [OTHER, "What is it, and where does the river end?"],
    ["Compare ", LONG, " with the other one, ", SHORT, " please."],
    [SHORT, "What is it, and where does the river end?"],
    ["What is it, and where does the river end?"],
]
IMAGE = picture(1, size=(40, 20))
OMNI: list[Content] = [["See ", IMAGE, " and hear ", SHORT, " and see ", IMAGE]]


def audio_url(file: bytes, kind: str = "wav") -> str:
    return f"data:audio/{kind};base64,{base64.b64encode(file).decode()}"


def part_of(piece: str | bytes | Samples, number: int) -> dict[str, Any]:
    """Return a content part. Audio is written in OpenAI's and in vLLM's way in turn."""
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    if isinstance(piece, bytes):
        return {"type": "image_url", "image_url": {"url": data_url(piece)}}
    if number % 2:
        return {"type": "audio_url", "audio_url": {"url": audio_url(wav(piece))}}
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(wav(piece)).decode(), "format": "wav"},
    }


def messages_of(content: Content) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part_of(piece, number) for number, piece in enumerate(content)]}]


def wanted(
    folder: Path, family: SoundFamily, chats: Sequence[Content], count: int
) -> list[tuple[list[int], list[int]]]:
    """Return transformers' prompts and answers of `count` tokens."""
    reference = SoundReference(folder, family)
    found = []
    for content in chats:
        sounds = [piece for piece in content if not isinstance(piece, str | bytes)]
        images = [piece for piece in content if isinstance(piece, bytes)]
        text = "".join(
            piece if isinstance(piece, str) else family.image if isinstance(piece, bytes) else family.audio
            for piece in content
        )
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        found.append(reference.answer(text, sounds, count, images))
    return found


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("qwen2_audio", ("prefill", "decode")),
        ("voxtral", ("unified",)),
        ("qwen2_5_omni", ("prefill", "decode")),
    ],
)
def test_chats_equal_transformers(name: str, roles: tuple[Role, ...], tmp_path: Path) -> None:
    family = FAMILIES[name]
    write_sound_model(tmp_path, family)
    chats = CHATS + (OMNI if family.image else [])

    async def ask() -> list[tuple[dict[str, Any], list[int]]]:
        async with asyncio.timeout(60), served(tmp_path, transport="usm", roles=roles) as client:
            await until_ready(client, len(roles))
            found = []
            for content in chats:
                body = {**body_of([], max_tokens=COUNT), "messages": messages_of(content)}
                answer = await client.post("/v1/chat/completions", json=body, headers={"x-baton-explain": "1"})
                assert answer.status_code == 200, answer.text
                tokens = await client.post("/tokenize", json={"messages": body["messages"]})
                found.append((dict(answer.json()), tokens.json()["tokens"]))
            return found

    answers = asyncio.run(ask())
    found = [(prompt, tokens_of(answer)) for answer, prompt in answers]
    assert found == wanted(tmp_path, family, chats, COUNT)
    decisions = {answer["baton"]["decision"] for answer, _ in answers}
    assert decisions == ({"unified"} if len(roles) == 1 else {"disaggregated"})
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer, _ in answers]
    assert cached[1] < cached[3]


@pytest.mark.parametrize(
    ("name", "disturbed"),
    [
        ("qwen2_audio", {"wrap": Breaking, "retry_budget": 1000.0}),
        ("qwen2_5_omni", {"wrap": Breaking, "retry_budget": 1000.0}),
        ("qwen2_audio", {"instance": {"num_gpu_blocks_override": 14, "max_model_len": 192}}),
    ],
    ids=["broken audio", "broken omni", "preempted"],
)
def test_disturbed_streams_equal_undisturbed_ones(name: str, disturbed: dict[str, Any], tmp_path: Path) -> None:
    """Prefill breaks each request before a block has left, and decode in the middle of its answer. Or decode has too
    few blocks, and cannot compute those of audio again."""
    family, count = FAMILIES[name], 60
    write_sound_model(tmp_path, family)
    chats = CHATS[:2] + (OMNI if family.image else [[tones(number, 1.03), "And this?"] for number in (5, 6)])
    patient: dict[str, Any] = {"retry_budget": 1.0, "max_replays": 50, **disturbed}

    async def ask() -> tuple[list[list[int]], str]:
        async with asyncio.timeout(90), served(tmp_path, transport="zeromq", **patient) as client:
            await until_ready(client)
            bodies = [{**body_of([], max_tokens=count), "messages": messages_of(content)} for content in chats]
            asked = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
            return [tokens_of(answer.json()) for answer in asked], (await client.get("/metrics")).text

    answers, metrics = asyncio.run(ask())
    assert answers == [tokens for _, tokens in wanted(tmp_path, family, chats, count)]
    (replays,) = (line.split()[-1] for line in metrics.splitlines() if line.startswith("baton:replays_total{"))
    assert float(replays) >= (2 * len(chats) if "wrap" in disturbed else 1)


def test_what_cannot_be_heard_is_refused(tmp_path: Path) -> None:
    write_sound_model(tmp_path / "voxtral", FAMILIES["voxtral"])
    write_tiny_model(tmp_path / "text")
    good = audio_url(wav(SHORT))
    flac = BytesIO()
    soundfile: Any = pytest.importorskip("soundfile")
    soundfile.write(flac, SHORT, 16_000, format="FLAC")
    stored = tmp_path / "media" / "a.wav"
    stored.parent.mkdir()
    stored.write_bytes(wav(SHORT))
    url = "/v1/chat/completions"

    def body(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {**body_of([], max_tokens=2, **more), "messages": [{"role": "user", "content": list(parts)}]}

    def heard(url: str) -> dict[str, Any]:
        return {"type": "audio_url", "audio_url": {"url": url}}

    def sent(data: str, kind: str) -> dict[str, Any]:
        return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}

    wrongs = [
        (body(heard(audio_url(b"not audio"))), "cannot be decoded"),
        (body(heard(audio_url(wav(tones(0, 7.0))))), "longer than 6 s"),
        (body(heard(audio_url(bytes(250_000)))), "--max-audio-bytes"),
        (body(heard("https://files.example/a.wav")), "--allowed-media-domains"),
        (body(heard("file:///etc/passwd")), "is not a file below --allowed-local-media-path"),
        (body(heard("data:text/plain;base64,AAAA")), "data:audio/wav;base64,"),
        (body(heard("")), '"audio_url": {"url"'),
        (body(*[heard(good)] * 3), "the limit is 2 (--limit-mm-per-prompt)"),
        (body(sent("AAAA", "pcm16")), "input_audio.format is 'pcm16'"),
        (body(sent("", "wav")), '"input_audio": {"data"'),
        (body({"type": "image_url", "image_url": {"url": data_url(IMAGE)}}), "'image_url' is not supported"),
        (body(heard(good), modalities=["text", "audio"]), "modalities"),
        (body(heard(good), audio={"voice": "alloy", "format": "wav"}), "audio"),
    ]

    async def run() -> None:
        limits: dict[str, Any] = {"max_audio_bytes": 240_000, "max_audio_s": 6.0, "limit_mm_per_prompt": "audio=2"}
        limits["allowed_local_media_path"] = str(stored.parent)
        limits["allowed_media_domains"] = ["127.0.0.1"]

        async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % stored.stat().st_size + stored.read_bytes())
            writer.close()

        site = await asyncio.start_server(give, "127.0.0.1", 0)
        web = f"http://127.0.0.1:{site.sockets[0].getsockname()[1]}/a.wav"
        async with (
            site,
            asyncio.timeout(90),
            served(tmp_path / "voxtral", transport="usm", roles=("unified",), **limits) as client,
        ):
            await until_ready(client, 1)
            for wrong, reason in wrongs:
                answer = await client.post(url, json=wrong)
                assert (answer.status_code, reason in answer.json()["error"]["message"]) == (400, True), answer.text
            files = [good, audio_url(flac.getvalue(), "flac"), stored.as_uri(), web]
            choices = [(await client.post(url, json=body(heard(file)))).json()["choices"] for file in files]
            assert choices == choices[:1] * 4
        async with asyncio.timeout(60), served(tmp_path / "text", transport="usm", roles=("unified",)) as client:
            await until_ready(client, 1)
            answer = await client.post(url, json=body(heard(good)))
            assert answer.status_code == 400
            assert "audio in chats is read by models of these types: qwen2_audio" in answer.json()["error"]["message"]

    asyncio.run(run())
