"""Audio files are decoded by another process: all formats alike, hostile files with a reason, within bounds."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from baton_serve.audio_cutter import begin_cut
from baton_serve.audio_samples import cuts
from baton_serve.contracts.audio import Cut, CutterLimits
from baton_serve.services.router.protocol.errors import BadRequestError, RateLimitError
from baton_serve.services.router.text.speech.cutter_processes import AudioCutter
from tests.speech import RATE_HZ, tones, wav

soundfile: Any = pytest.importorskip("soundfile")
LIMITS = CutterLimits(rate_hz=RATE_HZ, window_s=4.0, max_s=20.0)
T = TypeVar("T")


def written(kind: str, subtype: str | None = None, rate_hz: int = 48_000, seconds: float = 5.0) -> bytes:
    out = BytesIO()
    soundfile.write(out, tones(1, seconds, rate_hz), rate_hz, format=kind, subtype=subtype)
    return out.getvalue()


def _cut(file: bytes, limits: CutterLimits) -> Cut:
    start, windows = begin_cut(file, limits)
    cut = Cut(start.duration_s, list(windows), start.error)
    assert (start.num_windows, start.num_bytes) == (len(cut.windows), sum(len(one.file) for one in cut.windows))
    return cut


async def anything(num_bytes: int) -> None:
    """Reserve memory, of which there is enough."""


def run(work: Callable[[AudioCutter], Awaitable[T]], limits: CutterLimits = LIMITS) -> T:
    async def go() -> T:
        cutter = AudioCutter(limits)
        try:
            return await work(cutter)
        finally:
            cutter.close()

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", "PCM_24"), ("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]
)
def test_formats_are_cut_alike(kind: str, subtype: str | None) -> None:
    cut = _cut(written(kind, subtype), LIMITS)
    assert cut.error == ""
    assert cut.duration_s == pytest.approx(5.0, abs=0.1)
    assert [window.start_s for window in cut.windows] == [0.0, cut.windows[0].duration_s]
    assert all(window.duration_s <= LIMITS.window_s for window in cut.windows)


def test_a_file_of_the_models_rate_is_not_changed() -> None:
    assert _cut(wav(tones(0)), LIMITS).windows[0].file == wav(tones(0))


def test_cuts_lie_in_pauses() -> None:
    samples = np.ones(10 * RATE_HZ, dtype=np.float32)
    samples[int(3.7 * RATE_HZ) : int(3.8 * RATE_HZ)] = 0.0
    first = cuts(samples, RATE_HZ, 4.0)[1]
    assert 3.7 * RATE_HZ <= first <= 3.8 * RATE_HZ


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "cannot be decoded"),
        (b"RIFF" + bytes(60), "cannot be decoded"),
        (wav(np.zeros(0, dtype=np.int16)), "no audio"),
        (wav(tones(0, 21.0)), "longer than 20 s"),
        (wav(tones(0, 0.1), 15_999), "sample rate is 15999"),
        (wav(tones(0, 0.1), 192_000), "sample rate is 192000"),
        (wav(np.zeros((100, 9), dtype=np.int16)), "9 channels"),
    ],
)
def test_what_cannot_be_used_is_named(file: bytes, reason: str) -> None:
    assert reason in _cut(file, LIMITS).error


def test_random_changes_of_files_end_in_an_answer() -> None:
    draw = random.Random(0)
    for original in (written("FLAC"), written("OGG", "VORBIS"), written("MP3"), wav(tones(1))):
        for _ in range(12):
            data = bytearray(original)
            for _ in range(draw.randrange(1, 40)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            assert isinstance(_cut(bytes(data[: draw.randrange(len(data))]), LIMITS), Cut)


def test_a_process_serves_one_file_after_another() -> None:
    async def work(cutter: AudioCutter) -> None:
        first, second = await cutter.cut(wav(tones(0)), anything), await cutter.cut(written("FLAC"), anything)
        assert len(first.windows) == 1
        assert len(second.windows) == 2
        assert len(cutter._idle) == 1
        with pytest.raises(BadRequestError, match="cannot be decoded"):
            await cutter.cut(b"x", anything)

    run(work)


def test_a_process_that_dies_costs_one_request() -> None:
    async def work(cutter: AudioCutter) -> None:
        await cutter.cut(wav(tones(0)), anything)
        os.kill(cutter._idle[0].pid, signal.SIGKILL)
        with pytest.raises(BadRequestError, match="its decoder failed"):
            await cutter.cut(wav(tones(0)), anything)
        assert (await cutter.cut(wav(tones(0)), anything)).windows

    run(work)


def test_memory_and_time_are_bounded() -> None:
    async def work(cutter: AudioCutter) -> None:
        with pytest.raises(BadRequestError, match=r"memory|failed"):
            await cutter.cut(wav(tones(0, 19.0, 48_000), 48_000), anything)

    run(work, CutterLimits(rate_hz=RATE_HZ, window_s=4.0, max_s=20.0, memory_bytes=1 << 20))
    run(work, CutterLimits(rate_hz=RATE_HZ, window_s=4.0, max_s=20.0, cpu_s=0.001))


def test_a_long_file_is_taken_window_by_window_after_its_memory_was_reserved() -> None:
    """One message with two hours held the interpreter's lock, and so stopped the event loop, for half a second."""
    silence = BytesIO()
    soundfile.write(silence, np.zeros(3000 * RATE_HZ, dtype=np.int16), RATE_HZ, format="FLAC")

    async def work(cutter: AudioCutter) -> None:
        reserved: list[int] = []

        async def reserve(num_bytes: int) -> None:
            reserved.append(num_bytes)
            if len(reserved) == 1:
                raise RateLimitError("no memory", retry_after_s=1.0)

        file = silence.getvalue()
        before = psutil.Process().memory_info().rss
        with pytest.raises(RateLimitError, match="no memory"):
            await cutter.cut(file, reserve)
        assert psutil.Process().memory_info().rss - before < 40_000_000, "no window was taken"
        cut = await cutter.cut(file, reserve)
        assert reserved[1] == sum(len(window.file) for window in cut.windows) > 90_000_000
        assert len(cut.windows) >= 100

    run(work, CutterLimits(rate_hz=RATE_HZ, window_s=30.0))
