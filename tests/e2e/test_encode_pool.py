"""Images, videos and audio through an encode pool: the same tokens, each file encoded once, and no request lost with an
instance.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from baton_serve.contracts.instance import Role
from baton_serve.engine.model.speech.encoder import SpeechEncoder
from tests import speech
from tests.e2e import test_sounds, test_videos
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tests.e2e.test_grid_images import COUNT, pieces_of, write_model
from tests.e2e.test_images import Content, body_of, chat, tokens_of
from tests.engine.test_videos import SETTINGS
from tests.images import Reference, picture
from tests.sound_families import FAMILIES, write_sound_model
from tests.speech import Reference as SpeechReference
from tests.speech import write_tiny_whisper
from tests.videos import video, video_url

pytestmark = pytest.mark.slow

TRANSCRIPTIONS = "/v1/audio/transcriptions"
RIVER, TOWN, WIDE = picture(1, size=(50, 70)), picture(2, size=(50, 70)), picture(4, kind="JPEG", size=(600, 40))
CHATS: list[Content] = [
    [RIVER, "What is it?"],
    ["Compare ", TOWN, " with ", RIVER, " and ", WIDE, "."],
    [WIDE, "And this? It is ", RIVER],
]
"""Each of the three images is in several prompts, behind other tokens, so that their KV is not cached."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embeddings have columns for several layers (DeepStack), and images fill several blocks."""
    folder = tmp_path_factory.mktemp("model")
    write_model("qwen3_vl", folder)
    return folder


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    reference = Reference(model)
    return [reference.answer(pieces_of(model, [("user", content)]), COUNT) for content in CHATS]


def form_of(number: int) -> dict[str, Any]:
    """Return the body of a request to transcribe `tones(number)`."""
    form = {"language": "en", "max_completion_tokens": str(COUNT)}
    return {"files": {"file": ("speech.wav", speech.wav(speech.tones(number)))}, "data": form}


async def transcript(client: httpx.AsyncClient, number: int) -> str:
    answer = await client.post(TRANSCRIPTIONS, **form_of(number))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


async def counts_of(client: httpx.AsyncClient, role: str, name: str) -> dict[str, float]:
    """Return a counter of the only instance of a role, by its label `result`."""
    instances = (await client.get("/health")).json()["instances"]
    (address,) = [one["http_address"] for one in instances if one["role"] == role]
    return results_in((await client.get(f"http://{address}/metrics")).text, name)


def results_in(metrics: str, name: str) -> dict[str, float]:
    samples = [s for family in text_string_to_metric_families(metrics) for s in family.samples if s.name == name]
    return {sample.labels["result"]: sample.value for sample in samples}


@pytest.mark.parametrize(
    ("transport", "pools"), [("usm", ["prefill", "decode"]), ("zeromq", ["prefill", "decode"]), ("usm", ["unified"])]
)
def test_tokens_equal_transformers_and_each_image_is_encoded_once(
    model: Path, wanted: list[list[int]], transport: str, pools: list[Role]
) -> None:
    async def ask() -> list[dict[str, Any]]:
        roles: list[Role] = [*pools, "encode"]
        small = {"max_model_len": 400, "embedding_cache_gb": 0.01}
        async with asyncio.timeout(60), served(model, transport=transport, roles=roles, instance=small) as client:
            await until_ready(client, len(roles))
            assert (await client.get("/health")).json()["pools"]["encode"] == 1
            answers = [await chat(client, content) for content in CHATS]
            encoded = await counts_of(client, "encode", "baton:encoded_images_total")
            assert encoded == {"computed": 3.0, "cached": 3.0, "damaged": 0.0}
            assert await counts_of(client, pools[0], "baton:image_embeddings_total") == {"fetched": 6.0, "missed": 0.0}
            for _ in range(20):  # until the router knows that the KV of the first prompt is cached
                answers[0] = await chat(client, CHATS[0])
                before, encoded = encoded, await counts_of(client, "encode", "baton:encoded_images_total")
                if encoded == before:
                    break
            assert encoded == before, "an image whose KV is cached was fetched"
            assert encoded["computed"] == 3.0
            return answers

    answers = asyncio.run(ask())
    assert [tokens_of(answer) for answer in answers] == wanted
    assert {answer["baton"]["decision"] for answer in answers} == {"disaggregated" if len(pools) == 2 else "unified"}


def video_bodies() -> list[dict[str, Any]]:
    """Two videos, the first of them twice, behind other texts."""
    found = []
    for text, number in (("Look: ", 1), ("And now look: ", 2), ("Once more, ", 1)):
        shown = {"type": "video_url", "video_url": {"url": video_url(video(number))}}
        content = [{"type": "text", "text": text}, shown, {"type": "text", "text": " What happens?"}]
        found.append({**body_of([], max_tokens=COUNT), "messages": [{"role": "user", "content": content}]})
    return [body | {"mm_processor_kwargs": SETTINGS} for body in found]


def sound_bodies() -> list[dict[str, Any]]:
    """Three audios, the first of them in three prompts, behind other texts in the last two."""
    short, other, long = test_sounds.SHORT, test_sounds.OTHER, test_sounds.LONG
    chats: list[test_sounds.Content] = [
        [short, "What is it?"],
        ["Compare ", long, " with ", short, " and ", other, "."],
        ["And this? ", short],
    ]
    return [{**body_of([], max_tokens=COUNT), "messages": test_sounds.messages_of(content)} for content in chats]


async def answers_of(
    model: Path, bodies: Sequence[dict[str, Any]], transport: str, roles: Sequence[Role]
) -> tuple[list[list[int]], dict[str, float], dict[str, float]]:
    """Return the tokens of the answers, the counts of the encode instance, and those of the first other instance."""
    small = {"max_model_len": 600, "embedding_cache_gb": 0.01}
    found, encoded, fetched = [], dict[str, float](), dict[str, float]()
    async with asyncio.timeout(90), served(model, transport=transport, roles=roles, instance=small) as client:
        await until_ready(client, len(roles))
        for body in bodies:
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            found.append(tokens_of(answer.json()))
        if "encode" in roles:
            encoded = await counts_of(client, "encode", "baton:encoded_images_total")
            fetched = await counts_of(client, roles[0], "baton:image_embeddings_total")
    return found, encoded, fetched


@pytest.mark.parametrize(
    ("kind", "transport", "pools"),
    [("qwen2_5_vl", "zeromq", ["prefill", "decode"]), ("qwen3_vl", "zeromq", ["prefill", "decode"])],
)
def test_videos_are_encoded_once_and_answered_as_without_a_pool(
    kind: str, transport: str, pools: list[Role], tmp_path: Path
) -> None:
    """The embeddings of a video have one name, or one for each group of frames that has a place of its own."""
    pytest.importorskip("av")
    test_videos.write_model(kind, tmp_path)
    alone, _, _ = asyncio.run(answers_of(tmp_path, video_bodies(), transport, pools))
    pooled, encoded, fetched = asyncio.run(answers_of(tmp_path, video_bodies(), transport, [*pools, "encode"]))
    assert pooled == alone
    assert len({tuple(tokens) for tokens in alone}) > 1
    spans = encoded["computed"] / 2
    assert spans == 1 if kind == "qwen2_5_vl" else spans > 1
    assert encoded == {"computed": 2 * spans, "cached": spans, "damaged": 0.0}
    assert fetched == {"fetched": 3 * spans, "missed": 0.0}


@pytest.mark.parametrize(
    ("name", "transport", "pools"),
    [("qwen2_audio", "zeromq", ["prefill", "decode"]), ("voxtral", "usm", ["unified"])],
)
def test_audio_is_encoded_once_and_answered_as_without_a_pool(
    name: str, transport: str, pools: list[Role], tmp_path: Path
) -> None:
    write_sound_model(tmp_path, FAMILIES[name])
    alone, _, _ = asyncio.run(answers_of(tmp_path, sound_bodies(), transport, pools))
    pooled, encoded, fetched = asyncio.run(answers_of(tmp_path, sound_bodies(), transport, [*pools, "encode"]))
    assert pooled == alone
    assert len({tuple(tokens) for tokens in alone}) > 1
    assert encoded == {"computed": 3.0, "cached": 2.0, "damaged": 0.0}
    assert fetched == {"fetched": 5.0, "missed": 0.0}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("models") / "whisper")


def transcribed(folder: Path, numbers: Sequence[int]) -> list[str]:
    """Return what transformers hears in audio of these numbers."""
    reference, tokenizer = SpeechReference(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode(reference.answer(speech.tones(number), COUNT)).strip() for number in numbers]


@pytest.mark.parametrize(
    ("transport", "pools"), [("usm", ["prefill", "decode"]), ("zeromq", ["prefill", "decode"]), ("usm", ["unified"])]
)
def test_windows_of_speech_are_encoded_once_and_heard_as_by_transformers(
    whisper: Path, transport: str, pools: list[Role], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request for an audio follows while its KV is cached, or its encoder's output: neither is computed."""
    numbers = [0, 1, 0, 2]
    runs: list[int] = []
    own = SpeechEncoder.encode

    def encoded(self: SpeechEncoder, windows: list[Any]) -> list[Any]:
        runs.append(len(windows))
        return own(self, windows)

    monkeypatch.setattr(SpeechEncoder, "encode", encoded)

    async def ask() -> list[str]:
        roles: list[Role] = [*pools, "encode"]
        small = {"embedding_cache_gb": 0.01}
        async with asyncio.timeout(60), served(whisper, transport=transport, roles=roles, instance=small) as client:
            await until_ready(client, len(roles))
            runs.clear()  # each encoder has heard silence
            heard = [await transcript(client, number) for number in numbers]
            assert sum(runs) == 3
            encoded = await counts_of(client, "encode", "baton:encoded_images_total")
            assert encoded["computed"] == 3.0 and encoded["damaged"] == 0.0
            fetched = await counts_of(client, pools[0], "baton:image_embeddings_total")
            assert fetched == {"fetched": 3.0 + encoded["cached"], "missed": 0.0}
            for _ in range(20):  # until the router knows that the KV of the first audio is cached
                before = encoded
                heard[0] = await transcript(client, 0)
                if before == (encoded := await counts_of(client, "encode", "baton:encoded_images_total")):
                    break
            assert encoded == before, "the encoder's output was fetched for audio whose KV is cached"
            assert sum(runs) == 3
            return heard

    assert asyncio.run(ask()) == transcribed(whisper, numbers)


def test_speech_is_heard_when_the_encode_instance_dies(whisper: Path) -> None:
    """It is stopped, gets a window and is killed: prefill encodes the window."""
    flags = ("--dtype", "float32", "--disaggregation-min-tokens", "0")
    with Cluster(whisper, encode=1, args=flags) as cluster, ThreadPoolExecutor() as pool:
        expected = transcribed(whisper, range(2))

        def ask(number: int) -> str:
            answer = cluster.client.post(TRANSCRIPTIONS, **form_of(number))
            assert answer.status_code == 200, answer.text
            return str(answer.json()["text"])

        assert ask(0) == expected[0]
        pid = cluster.pid("encode")
        os.kill(pid, signal.SIGSTOP)
        answer = pool.submit(ask, 1)
        wait_until(
            lambda: cluster.metrics()["baton:router_assigned_requests"] > 0, timeout_s=20, what="a placed request"
        )
        os.kill(pid, signal.SIGKILL)
        assert answer.result(timeout=30) == expected[1]
        (prefill,) = cluster.instances("prefill")
        text = httpx.get(f"http://{prefill['http_address']}/metrics").text
        assert results_in(text, "baton:image_embeddings_total") == {"fetched": 1.0, "missed": 1.0}
        cluster.wait_idle()


def test_prefill_encodes_when_the_encode_instance_dies(model: Path, wanted: list[list[int]]) -> None:
    """Real processes: the instance is stopped, gets the images, and is killed. The next one serves again."""
    flags = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--max-model-len", "400")

    def ask(content: Content) -> list[int]:
        answer = cluster.client.post("/v1/chat/completions", json=body_of(content))
        assert answer.status_code == 200, answer.text
        return tokens_of(answer.json())

    with Cluster(model, encode=1, args=flags) as cluster, ThreadPoolExecutor() as pool:
        assert ask(CHATS[0]) == wanted[0]
        pid, (instance,) = cluster.pid("encode"), cluster.instances("encode")
        os.kill(pid, signal.SIGSTOP)
        answer = pool.submit(ask, CHATS[1])
        wait_until(
            lambda: cluster.metrics()["baton:router_assigned_requests"] > 0, timeout_s=20, what="a placed request"
        )
        os.kill(pid, signal.SIGKILL)
        assert answer.result(timeout=30) == wanted[1]
        (prefill,) = cluster.instances("prefill")
        text = httpx.get(f"http://{prefill['http_address']}/metrics").text
        assert results_in(text, "baton:image_embeddings_total") == {"fetched": 1.0, "missed": 3.0}

        def is_replaced() -> bool:
            return any(one["generation"] != instance["generation"] for one in cluster.instances("encode"))

        wait_until(is_replaced, timeout_s=60, what="another encode instance")
        assert ask(CHATS[2]) == wanted[2]
        (address,) = [one["http_address"] for one in cluster.instances("encode")]
        assert cluster.metrics(address)["baton:encode_seconds_total"] > 0
        cluster.wait_idle()
