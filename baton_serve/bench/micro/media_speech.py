"""The cases of `baton-bench media` with speech: windows of audio, one alone and many at once."""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch

from baton_serve.audio_samples import wav_of
from baton_serve.bench.micro.media import Works, engine_config, median_s, medians, release, row
from baton_serve.bench.progress import BenchProgress
from baton_serve.bench.report import Row
from baton_serve.contracts.media import digest_of, source_span
from baton_serve.contracts.messages import Work
from baton_serve.engine import Engine, EngineConfig, device
from baton_serve.engine.model.speech.encoder import load_encoder
from baton_serve.engine.model.vision.image_types import Pixels
from baton_serve.engine.model_folder import HfConfig, read_config

RATE_HZ = 16000
PROMPT_TOKENS = 4
"""Tokens before an answer of Whisper: start, language, task, and whether it has timestamps."""


class SpeechCases:
    """Measures windows of speech on one engine. Each window is new."""

    def __init__(self, engine: Engine, window_s: float, tokens: int) -> None:
        """`window_s` is the length of a window in seconds; `tokens` is the number of tokens of each answer."""
        self._works = Works(engine)
        self._window_s, self._tokens = window_s, tokens
        self._draw = np.random.default_rng(5)

    def round(self, count: int) -> dict[str, float]:
        """Return the seconds of each case; `count` is the number of windows that are given at once."""
        file = self._window()
        started = time.perf_counter()
        pixels = self._works.read(file)
        found = {"read": time.perf_counter() - started}
        found["first token"] = self._works.answer_s(self._work(file, tokens=1), pixels)
        file = self._window()
        work = self._work(file)
        started = time.perf_counter()
        pixels = self._works.read(file)
        found["one"] = self._works.answer_s(work, pixels)
        found["one from its file"] = time.perf_counter() - started
        files = [self._window() for _ in range(count)]
        found["all"] = self._all_s([(self._work(file), self._works.read(file)) for file in files])
        found["all from their files"] = self._all_from_files_s([self._window() for _ in range(count)])
        return found

    def _all_s(self, requests: Sequence[tuple[Work, Pixels]]) -> float:
        """Return the seconds of requests that are given to the engine at once."""
        engine, started = self._works.engine, time.perf_counter()
        for work, pixels in requests:
            engine.add(work, pixels=pixels)
        while engine.has_work():
            engine.step()
        return time.perf_counter() - started

    def _all_from_files_s(self, files: Sequence[bytes]) -> float:
        """Return the same with the reading of files, which begins at once in other threads, as in an instance. The
        engine begins with the first window that has been read."""
        engine, works = self._works.engine, {file: self._work(file) for file in files}
        with ThreadPoolExecutor() as pool:
            started = time.perf_counter()
            waiting = {pool.submit(self._works.read, file): work for file, work in works.items()}
            while waiting or engine.has_work():
                # The engine goes on while no other window is ready.
                ready = wait(waiting, 0 if engine.has_work() else None, FIRST_COMPLETED).done if waiting else ()
                for read in ready:
                    engine.add(waiting.pop(read), pixels=read.result())
                engine.step()
            return time.perf_counter() - started

    def _work(self, file: bytes, tokens: int | None = None) -> Work:
        prompt = list(range(10, 10 + PROMPT_TOKENS))
        return self._works.work(prompt, [source_span(digest_of(file))], tokens or self._tokens)

    def _window(self) -> bytes:
        """Return a WAV file of new noise that fills a window."""
        return wav_of(self._draw.normal(0.0, 0.1, int(self._window_s * RATE_HZ)).astype(np.float32), RATE_HZ)


def encoder_s(options: argparse.Namespace, config: EngineConfig, folder: Path, batch: int) -> float:
    """Return the median seconds in which the encoder alone encodes `batch` windows, from host memory."""
    target = device.select_device(options.device)
    encoder = load_encoder(config, folder, target, torch.bfloat16)
    windows = [encoder.reader.silence()] * batch
    return median_s(target, lambda: encoder.encode(windows), options.rounds)


def window_seconds(config: HfConfig) -> float:
    """Return the length of a window of a Whisper model: its encoder has 50 positions for a second."""
    positions: int = config.max_source_positions
    return positions / 50


def speech_rows(options: argparse.Namespace, folder: Path, progress: BenchProgress) -> Iterator[Row]:
    """Measure speech with the model of a folder and yield the rows."""
    config = engine_config(options, folder, max_num_seqs=max(8, options.windows))
    window_s = window_seconds(read_config(folder, config))
    for batch in sorted({1, options.windows}):
        progress.stage(f"encoder alone, {batch} windows")
        yield row(f"speech: encoder alone, {batch} windows", encoder_s(options, config, folder, batch) * 1e3, "ms")
        release(options)
    with Engine(config, progress=progress.stage) as engine:
        cases = SpeechCases(engine, window_s, options.tokens)
        progress.stage("a round to warm up")
        cases.round(options.windows)  # libraries load code for each size
        found = medians([cases.round(options.windows) for _ in progress.rounds(options.rounds)])
    yield row("speech: decode and preprocess a file", found["read"] * 1e3, "ms")
    yield row("speech: first token of a window", found["first token"] * 1e3, "ms")
    rest = (found["one"] - found["first token"]) / max(1, options.tokens - 1)
    yield row("speech: each further token of a window alone", rest * 1e3, "ms")
    for case, name in (("", "one"), (" from its file", "one from its file")):
        yield row(f"speech: one window{case}", window_s / found[name], "x real time")
    for case, name in (("", "all"), (" from their files", "all from their files")):
        yield row(f"speech: {options.windows} windows at once{case}", options.windows / found[name], "windows/s")
