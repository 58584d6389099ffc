"""`baton-bench media`: it measures new and cached images and windows of speech with tiny models on this CPU."""

import io
import json
import subprocess
import sys

import pytest
import torch

from baton_serve.bench.micro import media
from baton_serve.bench.progress import BenchProgress
from baton_serve.engine.model.speech.encoder import SpeechEncoder

pytestmark = pytest.mark.slow

SMALL = ["--small", "--device", "cpu", "--rounds", "2", "--json"]


def rows_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, float]]:
    media.run([*SMALL, *options])
    return {row["case"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


def test_images_are_new_or_cached_as_their_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "--cases", "images", "--image-size", "224", "--text-tokens", "40")
    tokens = rows["image: tokens"]["value"]
    assert tokens == (224 // 28) ** 2
    assert rows["image: cached tokens of a new image"]["value"] == 0
    # The last block of the cached prefix may end with text, which is new.
    for state in ("image", "text"):
        assert tokens - 16 < rows[f"image: cached tokens of a cached {state}"]["value"] <= tokens
    alone = rows["image: tower alone"]["value"] + rows["image: text prompt of as many tokens"]["value"]
    for case in ("new image", "new image from its file"):
        assert rows[f"image: TTFT, {case}"]["limit"] == pytest.approx(alone)
    assert rows["image: TTFT, cached image"]["value"] > 0


def test_progress_says_what_runs_and_bounds_the_rounds() -> None:
    out, now = io.StringIO(), iter([0.0, 1.5, 2.0, 2.0, 5.0, 5.0, 5.0, 8.0, 8.0, 8.5])
    progress = BenchProgress("images", 12.0, clock=lambda: next(now), out=out)
    progress.stage("loading weights", 0.5)
    progress.stage("loading weights", 1.0)
    assert list(progress.rounds(9)) == [0, 1]
    assert out.getvalue().splitlines() == [
        "images: 1.5 s: loading weights",
        "images: 2.0 s: round 1 of 9",
        "images: 5.0 s: round 2 of 9",
        "images: 8.5 s: ends after 2 of 9 rounds, since a longer time needs a larger --max-s",
    ]


def test_what_hangs_is_ended_and_named() -> None:
    code = """
import time
from baton_serve.bench.progress import BenchProgress
def hanging(): time.sleep(60)
with BenchProgress("images", 0.2): hanging()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert "ends after 0.2 s at the latest (--max-s)" in ended.stderr
    assert "in hanging" in ended.stderr


def test_every_window_of_speech_is_new(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, encode = list[bytes](), SpeechEncoder.encode

    def seen(encoder: SpeechEncoder, windows: list[torch.Tensor]) -> list[torch.Tensor]:
        # The encoder is tried and measured alone with silence, whose features are all equal.
        encoded.extend(window.float().numpy().tobytes() for window in windows if window.min() < window.max())
        return encode(encoder, windows)

    monkeypatch.setattr(SpeechEncoder, "encode", seen)
    rows = rows_of(capsys, "--cases", "speech", "--windows", "3", "--tokens", "8")
    rounds, windows = 2 + 1, 1 + 1 + 3 + 3
    assert len(encoded) == len(set(encoded)) == rounds * windows
    for case in ("one window", "one window from its file", "3 windows at once", "3 windows at once from their files"):
        assert rows[f"speech: {case}"]["value"] > 0
