"""Transcriptions and translations through router, prefill, transfer and decode: greedy tokens and times equal those of
transformers' own Whisper."""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from baton_serve.audio_samples import cuts, resampled
from baton_serve.engine.model.speech.encoder import SpeechEncoder
from tests.e2e.breaking import Breaking
from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tests.engine.rank_threads import use_threads
from tests.speech import (
    IDS,
    LANGUAGES,
    PROMPT,
    RATE_HZ,
    SENTENCES,
    TIMED_PROMPT,
    WINDOW_S,
    Reference,
    has_espeak,
    spoken,
    tones,
    wav,
    write_tiny_whisper,
)
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

COUNT = 12
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
FIRST_TIME = IDS["<|0.00|>"]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("models") / "whisper")


@pytest.fixture(scope="module")
def reference(whisper: Path) -> Reference:
    return Reference(whisper)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of windows of each run of the encoder after the start."""
    counts: list[int] = []
    own = SpeechEncoder.encode

    def encode(self: SpeechEncoder, windows: list[Any]) -> list[Any]:
        counts.append(len(windows))
        return own(self, windows)

    monkeypatch.setattr(SpeechEncoder, "encode", encode)
    yield counts


async def post(client: httpx.AsyncClient, file: bytes, path: str = TRANSCRIPTIONS, **fields: Any) -> httpx.Response:
    form = {"language": "en", "max_completion_tokens": str(COUNT), **fields}
    form = {name: value for name, value in form.items() if value is not None}
    return await client.post(path, files={"file": ("speech.wav", file)}, data=form)


async def ask(client: httpx.AsyncClient, file: bytes, path: str = TRANSCRIPTIONS, **fields: Any) -> dict[str, Any]:
    answer = await post(client, file, path, **fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(folder: Path, tokens: list[int]) -> str:
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode([t for t in tokens if t < FIRST_TIME])
    return text


def windows_of(samples: NDArray[np.int16]) -> list[NDArray[np.int16]]:
    bounds = cuts(np.asarray(samples / 32768.0, dtype=np.float32), RATE_HZ, WINDOW_S)
    return [samples[start:end] for start, end in pairwise(bounds)]


def times_of(tokens: list[int]) -> list[float]:
    """Return the times of a window in seconds."""
    return [(token - FIRST_TIME) / 50 for token in tokens if token >= FIRST_TIME]


@pytest.mark.parametrize("transport", ["usm", "zeromq"])
def test_words_and_times_equal_transformers(
    whisper: Path, reference: Reference, encoded: list[int], transport: str
) -> None:
    long = tones(4, 10.0)

    async def run() -> dict[str, dict[str, Any]]:
        async with asyncio.timeout(90), served(whisper, transport=transport) as client:
            await until_ready(client)
            encoded.clear()
            return {
                "plain": await ask(client, wav(tones(0))),
                "timed": await ask(client, wav(tones(0)), response_format="verbose_json"),
                "long": await ask(client, wav(long)),
                "translated": await ask(client, wav(tones(0)), TRANSLATIONS),
                "prompted": await ask(client, wav(tones(0)), prompt="the baton"),
                "detected": await ask(client, wav(tones(0)), language=None, response_format="verbose_json"),
            }

    found = asyncio.run(run())
    assert found["plain"]["text"] == text_of(whisper, reference.answer(tones(0), COUNT)).strip()
    assert found["plain"]["usage"] == {"type": "duration", "seconds": 3}
    timed = reference.answer(tones(0), COUNT, prompt=TIMED_PROMPT, timestamps=True)
    segments = found["timed"]["segments"]
    assert [t for one in segments for t in one["tokens"]] == [t for t in timed if t < FIRST_TIME]
    assert {time for one in segments for time in (one["start"], one["end"])} <= {*times_of(timed), 0.0, 3.0}
    windows = windows_of(long)
    assert len(windows) == 3
    assert found["long"]["text"] == "".join(text_of(whisper, reference.answer(w, COUNT)) for w in windows).strip()
    translate = [IDS["<|translate|>"] if token == IDS["<|transcribe|>"] else token for token in PROMPT]
    expected = text_of(whisper, reference.answer(tones(0), COUNT, prompt=translate)).strip()
    assert found["translated"]["text"] == expected
    before = Tokenizer.from_file(str(whisper / "tokenizer.json")).encode(" the baton", add_special_tokens=False).ids
    prompt = [IDS["<|startofprev|>"], *before, *PROMPT]
    expected = text_of(whisper, reference.answer(tones(0), COUNT, prompt=prompt)).strip()
    assert found["prompted"]["text"] == expected
    others = [token for token in range(IDS[f"<|{WINDOW_S}.00|>"] + 1) if token not in _languages().values()]
    (token,) = reference.answer(tones(0), 1, prompt=PROMPT[:1], suppress_tokens=others, begin_suppress_tokens=None)
    assert found["detected"]["language"] == next(name for name, one in _languages().items() if one == token)
    # Two files of one and three windows: all other answers found the blocks of the first one.
    assert sum(encoded) == 4


def _languages() -> dict[str, int]:
    return {language: IDS[f"<|{language}|>"] for language in LANGUAGES}


def test_streams_and_formats(whisper: Path) -> None:
    file = wav(tones(4, 10.0))

    async def run() -> dict[str, Any]:
        async with asyncio.timeout(90), served(whisper, transport="usm") as client:
            await until_ready(client)
            found: dict[str, Any] = {"whole": await ask(client, file)}
            for form in ("text", "srt", "vtt", "verbose_json"):
                found[form] = await post(client, file, response_format=form)
            found["stream"] = await post(client, file, stream="true", stream_include_usage="true")
            api = openai.AsyncOpenAI(
                base_url=str(client.base_url) + "/v1", api_key="none", http_client=cast(Any, client)
            )
            asked = await api.audio.transcriptions.create(
                file=("a.wav", file), model=await _model(client), language="en", response_format="verbose_json"
            )
            found["openai"] = asked
            return found

    found = asyncio.run(run())
    text = found["whole"]["text"]
    assert found["text"].text == f"{text}\n"
    segments = found["verbose_json"].json()["segments"]
    assert found["verbose_json"].json()["duration"] == 10.0
    assert all(0 <= one["start"] <= one["end"] <= 12 and one["avg_logprob"] < 0 for one in segments)
    assert found["srt"].text.startswith("1\n00:00:0") and found["srt"].text.count(" --> ") == len(segments)
    assert found["vtt"].text.startswith("WEBVTT\n\n00:00:0") and found["vtt"].text.count(" --> ") == len(segments)
    events = [line.removeprefix("data: ") for line in found["stream"].text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks if c["choices"]).strip() == text
    assert chunks[-1]["usage"]["completion_tokens"] == 3 * COUNT
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
    assert found["openai"].segments


def test_a_window_that_is_not_good_enough_is_computed_again(whisper: Path) -> None:
    """The words of a random model are unlikely, so that every temperature is tried; the last one is kept."""

    async def run() -> list[dict[str, Any]]:
        async with asyncio.timeout(60), served(whisper, transport="usm", roles=("unified",)) as client:
            await until_ready(client, 1)
            options = {"response_format": "verbose_json", "seed": "3"}
            several = await ask(client, wav(tones(0)), temperature=["0", "0.7"], **options)
            return [several, await ask(client, wav(tones(0)), temperature="0.7", **options)]

    several, one = asyncio.run(run())
    assert {segment["temperature"] for segment in several["segments"]} == {0.7}
    assert several == one


async def _model(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


def test_preempted_sequences_read_their_audio_again(whisper: Path, reference: Reference) -> None:
    """Decode has blocks for two sources and few tokens. It preempts sequences, and cannot encode."""
    count = 60

    async def run() -> list[dict[str, Any]]:
        small = {"num_gpu_blocks_override": 2 * 13 + 8}
        patient: dict[str, Any] = {"retry_budget": 1.0, "max_replays": 50}
        async with asyncio.timeout(90), served(whisper, transport="usm", instance=small, **patient) as client:
            await until_ready(client)
            files = [wav(tones(number)) for number in range(4)]
            options = {"max_completion_tokens": str(count)}
            return list(await asyncio.gather(*(ask(client, file, **options) for file in files)))

    expected = [text_of(whisper, reference.answer(tones(number), count)).strip() for number in range(4)]
    assert [one["text"] for one in asyncio.run(run())] == expected


def test_transcriptions_go_on_when_prefill_and_decode_break(whisper: Path, reference: Reference) -> None:
    """Prefill breaks each request before a block has left, and decode in the middle of its answer."""
    count = 40

    async def run() -> tuple[list[dict[str, Any]], str]:
        breaking: dict[str, Any] = {"wrap": Breaking, "retry_budget": 1000.0, "max_replays": 50}
        async with asyncio.timeout(90), served(whisper, transport="zeromq", **breaking) as client:
            await until_ready(client)
            files = [wav(tones(number)) for number in range(3)]
            options = {"max_completion_tokens": str(count)}
            asked = await asyncio.gather(*(ask(client, file, **options) for file in files))
            return list(asked), (await client.get("/metrics")).text

    answers, metrics = asyncio.run(run())
    expected = [text_of(whisper, reference.answer(tones(number), count)).strip() for number in range(3)]
    assert [one["text"] for one in answers] == expected
    (replays,) = (line.split()[-1] for line in metrics.splitlines() if line.startswith("baton:replays_total{"))
    assert float(replays) >= 2 * len(answers)


def test_a_prefill_instance_of_two_stages_hands_over_to_one(
    whisper: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)

    async def run() -> list[dict[str, Any]]:
        two, one = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 1}
        async with asyncio.timeout(90), served(whisper, transport="zeromq", instance=two, decode=one) as client:
            await until_ready(client)
            return [await ask(client, wav(tones(number))) for number in (0, 1, 0)]

    expected = [text_of(whisper, reference.answer(tones(number), COUNT)).strip() for number in (0, 1, 0)]
    assert [one["text"] for one in asyncio.run(run())] == expected


def test_what_cannot_be_served_is_refused(whisper: Path) -> None:
    async def run() -> list[tuple[int, str]]:
        limits: dict[str, Any] = {"max_audio_bytes": 400_000, "max_audio_s": 10.0}
        async with asyncio.timeout(60), served(whisper, transport="usm", roles=("unified",), **limits) as client:
            await until_ready(client, 1)
            found = [
                await post(client, b"not audio"),
                await post(client, wav(tones(0)), language="xx"),
                await post(client, wav(tones(0)), response_format="verbose_json", timestamp_granularities="word"),
                await post(client, wav(tones(0)), response_format="srt", stream="true"),
                await post(client, wav(tones(0, 11.0))),
                await post(client, bytes(500_000)),
                await post(client, wav(tones(0)), temperature="3"),
                await post(client, wav(tones(0)), unknown="1"),
                await client.post(TRANSCRIPTIONS, json={"file": "x"}),
                await client.post(TRANSCRIPTIONS, data={"model": "x"}, files={"other": b""}),
                await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}),
                await client.post(TRANSCRIPTIONS, files={"file": b"x"}, headers={"origin": "http://elsewhere.example"}),
            ]
            answer = await ask(client, wav(tones(0)), response_format="verbose_json")
            assert answer["segments"]
            models = (await client.get("/v1/models")).json()["data"]
            assert all(card["inputs"] == ["speech"] for card in models)  # then the page records in place of a chat
            return [(one.status_code, one.text) for one in found]

    found = asyncio.run(run())
    assert [status for status, _ in found] == [400] * 5 + [413] + [400] * 2 + [415, 400, 400, 403]
    reasons = ["cannot be decoded", "knows de, en, fr", "word", "streamed", "longer than 10 s", "--max-audio-bytes"]
    for (_, text), reason in zip(found, reasons, strict=False):
        assert reason in text


def test_another_model_names_the_reason(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)

    async def run() -> httpx.Response:
        async with asyncio.timeout(60), served(tmp_path, transport="usm", roles=("unified",)) as client:
            await until_ready(client, 1)
            return await post(client, wav(tones(0)))

    answer = asyncio.run(run())
    assert answer.status_code == 400
    assert "does not transcribe audio" in answer.text


@pytest.mark.skipif(not has_espeak(), reason="espeak-ng is not installed")
def test_spoken_sentences_equal_transformers(whisper: Path, reference: Reference, tmp_path: Path) -> None:
    import wave
    from io import BytesIO

    files = [spoken(sentence, tmp_path) for sentence in SENTENCES]

    async def run() -> list[dict[str, Any]]:
        async with asyncio.timeout(90), served(whisper, transport="usm") as client:
            await until_ready(client)
            return [await ask(client, file, response_format="verbose_json") for file in files]

    for file, found in zip(files, asyncio.run(run()), strict=True):
        with wave.open(BytesIO(file)) as opened:
            rate = opened.getframerate()
            samples = np.frombuffer(opened.readframes(opened.getnframes()), dtype="<i2") / 32768.0
        whole = np.rint(resampled(np.asarray(samples, dtype=np.float32), rate, RATE_HZ) * 32768).astype(np.int16)
        answers = [reference.answer(w, COUNT, prompt=TIMED_PROMPT, timestamps=True) for w in windows_of(whole)]
        words = [token for tokens in answers for token in tokens if token < FIRST_TIME]
        assert [token for one in found["segments"] for token in one["tokens"]] == words
