"""Measure images and speech without a server, with random weights: Qwen2.5-VL 7B and Whisper large-v3.

`baton-bench media [--device auto] [--cases images speech] [--image-size 1024] [--windows 32] [--max-s 600] [--json]`

Images: the limit of TTFT with a new image is the vision tower alone plus a text prompt of as many tokens, and the limit
with an image whose prefix is cached is a text prompt with as long a cached prefix. Speech: windows are encoded, and
then decoded to a fixed number of tokens.

"From its file" includes the decoding and preprocessing of the file, which an instance does in another thread before the
engine gets the request. Values are medians; the cases of a round follow each other, so that other load on the machine
meets all of them.
"""

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from baton_serve.bench.micro.media_shapes import write_media_shape
from baton_serve.bench.progress import BenchProgress
from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.datasets import random_image
from baton_serve.contracts.block_hash import root_hash
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.media import MediaSpan, digest_of
from baton_serve.contracts.messages import Work, with_prompt_root
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.contracts.vision import image_family, num_embeddings
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine import Engine, EngineConfig, device
from baton_serve.engine.model.vision.decoded_media import KeptPictures
from baton_serve.engine.model.vision.image_types import NO_PIXELS, DecodedImage, Pixels
from baton_serve.engine.model.vision.tower import load_tower

SMALL_KV_BYTES = 64 << 20


def engine_config(
    options: argparse.Namespace, folder: Path, *, max_num_seqs: int, max_model_len: int | None = None
) -> EngineConfig:
    """Return the config of an engine that reads images or audio, with random weights."""
    return EngineConfig(
        model=str(folder),
        device=options.device,
        dtype="bfloat16",
        load_format="dummy",
        reads_images=True,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_bytes=SMALL_KV_BYTES if options.small else None,
        enforce_eager=options.enforce_eager,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )


def row(case: str, value: float, unit: str, limit: float | None = None) -> Row:
    """Return a row of this benchmark, and show it at once. Of values with a limit, less is better."""
    sys.stderr.write(f"{case}: {value:.4g} {unit}\n")
    return Row("media", case, value, unit, limit, None if limit is None else limit / value)


class Works:
    """Makes requests with greedy answers of a fixed length, and runs them."""

    def __init__(self, engine: Engine) -> None:
        assert engine.image_reader is not None, "the model reads images or audio"
        self.engine = engine
        self._kept = KeptPictures(engine.image_reader)
        self._numbers = itertools.count()
        layout = engine.layout
        self._root = root_hash(fingerprint=layout.fingerprint, kv_dtype=layout.dtype, block_tokens=layout.block_tokens)

    def work(self, tokens: list[int], media: list[MediaSpan], max_tokens: int) -> Work:
        """Return a request for a prompt with these spans of images or audio."""
        work = Work(
            request_id=RequestId(str(next(self._numbers))),
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=SamplingSpec(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            root=self._root,
        )
        return with_prompt_root(msgspec.structs.replace(work, media=media), self.engine.layout)

    def read(self, file: bytes) -> Pixels:
        """Decode and preprocess a file as an instance does, which keeps recent ones decoded."""
        return self._kept.read(self._root, [file])

    def answer_s(self, work: Work, pixels: Pixels = NO_PIXELS) -> float:
        """Return the seconds from giving a request to the engine, which is idle, to its last token."""
        started = time.perf_counter()
        self.engine.add(work, pixels=pixels)
        while self.engine.has_work():
            self.engine.step()
        return time.perf_counter() - started


class ImageCases:
    """Measures prompts of an image with text behind it, and text prompts of the same length, on one engine."""

    def __init__(self, engine: Engine, folder: Path, *, side: int, text_tokens: int) -> None:
        """`side` is the width and height of images in pixels; `text_tokens` is the number of tokens behind them."""
        family = image_family(ModelFacts.of(folder))
        assert family is not None, "the shape reads images"
        self._works = Works(engine)
        self._side, self._text_tokens = side, text_tokens
        self._grid = family.token_grid(width=side, height=side)
        self._token_id = family.image_token_id
        self.image_tokens = num_embeddings(family.parts(width=side, height=side))
        self._draw = np.random.default_rng(11)
        self._num_rounds = 0

    def round(self) -> dict[str, float]:
        """Return the seconds of each case, and the numbers of cached tokens of prompts whose prefix is cached or new,
        with an image and text that no earlier round had."""
        file, text = random_image(self._draw.bytes, self._side, self._side), self._text(self.image_tokens)
        started = time.perf_counter()
        pixels = self._works.read(file)
        found = {"read": time.perf_counter() - started}
        # The first request after a long one is slower than the next, so the order changes with each round.
        self._num_rounds += 1
        kinds = ("image", "text") if self._num_rounds % 2 else ("text", "image")
        for state, kind in itertools.product(("new", "cached"), kinds):
            is_image = kind == "image"
            plain = [*text, *self._text(self._text_tokens)]
            work = self._image_prompt(file) if is_image else self._works.work(plain, [], 1)
            found[f"hits of {state} {kind}"], found[f"{state} {kind}"] = self._measured(
                work, pixels if is_image else NO_PIXELS
            )
        for state, other in (("new", random_image(self._draw.bytes, self._side, self._side)), ("cached", file)):
            work = self._image_prompt(other)
            started = time.perf_counter()
            self._works.answer_s(work, self._works.read(other))
            found[f"{state} image from its file"] = time.perf_counter() - started
        return found

    def _image_prompt(self, file: bytes) -> Work:
        """Return a prompt of an image and of new text behind it, which is answered by one token."""
        span = MediaSpan(0, self.image_tokens, digest_of(file), self._grid)
        tokens = [self._token_id] * self.image_tokens + self._text(self._text_tokens)
        return self._works.work(tokens, [span], 1)

    def _text(self, count: int) -> list[int]:
        drawn: list[int] = self._draw.integers(0, self._token_id, count).tolist()
        return drawn

    def _measured(self, work: Work, pixels: Pixels) -> tuple[int, float]:
        """Return (the number of cached tokens of a prompt, seconds to its first token)."""
        before = self._works.engine.stats().prefix_hit_tokens
        seconds = self._works.answer_s(work, pixels)
        return self._works.engine.stats().prefix_hit_tokens - before, seconds


def tower_s(options: argparse.Namespace, config: EngineConfig, progress: BenchProgress) -> float:
    """Return the median seconds in which the vision tower encodes an image alone, from host memory."""
    target = device.select_device(options.device)
    progress.stage("loading the tower alone")
    tower = load_tower(config, target, torch.bfloat16)
    assert tower is not None, "the shape reads images"
    file = random_image(np.random.default_rng(3).bytes, options.image_size, options.image_size)
    (picture,) = tower.reader.read([file]).values()
    assert isinstance(picture, DecodedImage)
    progress.stage("encoding by the tower alone")
    return median_s(target, lambda: tower.encode(picture), options.rounds)


def median_s(target: torch.device, call: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of a call, after two that warm up."""
    times = list[float]()
    for _ in range(rounds + 2):
        device.synchronize(target)
        started = time.perf_counter()
        call()
        device.synchronize(target)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each value over all rounds."""
    values = defaultdict[str, list[float]](list)
    for one in rounds:
        for name, value in one.items():
            values[name].append(value)
    return {name: statistics.median(found) for name, found in values.items()}


def image_rows(options: argparse.Namespace, folder: Path, progress: BenchProgress) -> Iterator[Row]:
    """Measure images with the model of a folder and yield the rows."""
    config = engine_config(options, folder, max_num_seqs=8, max_model_len=options.max_model_len)
    tower = tower_s(options, config, progress)
    yield row("image: tower alone", tower * 1e3, "ms")
    release(options)
    with Engine(config, progress=progress.stage) as engine:
        cases = ImageCases(engine, folder, side=options.image_size, text_tokens=options.text_tokens)
        progress.stage("two rounds to warm up")
        for _ in range(2):
            cases.round()  # libraries load code for each size
        found = medians([cases.round() for _ in progress.rounds(options.rounds)])
    yield row("image: tokens", cases.image_tokens, "tok")
    yield row("image: decode and preprocess a file", found["read"] * 1e3, "ms")
    yield row("image: text prompt of as many tokens", found["new text"] * 1e3, "ms")
    alone = (tower + found["new text"]) * 1e3
    yield row("image: TTFT, new image", found["new image"] * 1e3, "ms", alone)
    yield row("image: TTFT, new image from its file", found["new image from its file"] * 1e3, "ms", alone)
    cached = found["cached text"] * 1e3
    yield row("image: TTFT, cached image", found["cached image"] * 1e3, "ms", cached)
    yield row("image: TTFT, cached image from its file", found["cached image from its file"] * 1e3, "ms", cached)
    for state in ("new image", "cached image", "cached text"):
        yield row(f"image: cached tokens of a {state}", found[f"hits of {state}"], "tok")


def release(options: argparse.Namespace) -> None:
    """Return the device memory of objects that are gone, so that the next engine can use it."""
    gc.collect()
    device.release_unused(device.select_device(options.device))


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all cases."""
    from baton_serve.bench.micro.media_speech import speech_rows  # uses the parts of this module

    for case in options.cases:
        with tempfile.TemporaryDirectory() as made, BenchProgress(case, options.max_s) as progress:
            folder = write_media_shape(case, Path(made), is_small=options.small)
            yield from (image_rows if case == "images" else speech_rows)(options, folder, progress)
        release(options)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench media", description=__doc__)
    made.add_argument("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto", help="device of the engine")
    made.add_argument("--cases", nargs="+", choices=["images", "speech"], default=["images", "speech"], help="cases")
    made.add_argument("--image-size", type=int, default=1024, help="width and height of images in pixels")
    made.add_argument("--text-tokens", type=int, default=100, help="tokens of text behind an image")
    made.add_argument("--windows", type=int, default=32, help="windows of speech that are given at once")
    made.add_argument("--tokens", type=int, default=100, help="tokens to which each window is decoded")
    made.add_argument("--rounds", type=int, default=9, help="repetitions of each case, of which the median is taken")
    made.add_argument(
        "--max-s",
        type=float,
        default=600.0,
        help="longest time of each case in seconds: rounds end early for it, and what hangs is ended by status 1",
    )
    made.add_argument("--max-model-len", type=int, default=4096, help="longest prompt with an image, in tokens")
    made.add_argument(
        "--gpu-memory-utilization", type=float, default=0.8, help="fraction of the device's memory that the engine uses"
    )
    made.add_argument("--enforce-eager", action="store_true", help="do not capture graphs")
    made.add_argument("--small", action="store_true", help="use tiny shapes, whose values say nothing about speed")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    """Run `baton-bench media` with these arguments."""
    options = parser().parse_args(arguments)
    with torch.inference_mode():
        rows = list(measure(options))
    show(rows, as_json=options.json)
