"""The data sets of `vllm bench`: random prompts, also with images, conversations in ShareGPT's format, and own prompts
in JSON lines.

Lengths are exact with a tokenizer. Without one, random prompts are words that most tokenizers encode as one token
each, and the lengths of other texts are estimated.
"""

import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from tokenizers import Tokenizer

from baton_serve.bench.serving.workload import WORDS, BenchRequest
from baton_serve.model_hub import find_model

CHARACTERS_PER_TOKEN = 4
"""The estimate for text without a tokenizer."""
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""Conversations of ShareGPT outside these lengths are left out, as in vLLM."""


class DatasetError(Exception):
    """The data set or the tokenizer cannot be read. The message names the file, the cause and the expected form."""


class TextMeasure:
    """Counts the tokens of texts and makes random prompts: exactly with a tokenizer, or else approximately."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def count(self, text: str) -> int:
        if self.tokenizer is None:
            return max(1, round(len(text) / CHARACTERS_PER_TOKEN))
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, rng: random.Random, count: int, prefix: Sequence[int] = ()) -> str:
        """Return a random text of `count` tokens after the symbols `prefix`, which `symbols` has made."""
        found = [*prefix, *self.symbols(rng, count)]
        if self.tokenizer is None:
            return " ".join(WORDS[symbol] for symbol in found)
        # Adjacent tokens of a random list may merge when the server encodes their text, so it is encoded again.
        text: str = self.tokenizer.decode(found)
        for _ in range(10):
            again = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(again) == len(found):
                break
            again = again[: len(found)] + self.symbols(rng, len(found) - len(again))
            text = self.tokenizer.decode(again)
        return text

    def symbols(self, rng: random.Random, count: int) -> list[int]:
        """Return random tokens, or without a tokenizer random numbers of words."""
        size = len(WORDS) if self.tokenizer is None else self.tokenizer.get_vocab_size(with_added_tokens=False)
        return [rng.randrange(size) for _ in range(max(0, count))]


def read_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer of a model's folder or of a model in the hub's cache, or None if there is none."""
    folder = Path(name) if Path(name).is_dir() else find_model(name, os.environ, weights=False)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths of random requests in tokens. Input and output vary by ± `range_ratio`, each for itself; the prefix is
    the same text in all prompts."""

    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    range_ratio: float = 0.0


def random_dataset(count: int, lengths: RandomLengths, measure: TextMeasure, seed: int) -> list[BenchRequest]:
    """Return random requests, all at time 0. Raises `DatasetError` for impossible lengths."""
    if not 0 <= lengths.range_ratio < 1:
        raise DatasetError(f"--random-range-ratio is {lengths.range_ratio:g}; give a value from 0 to below 1")
    if lengths.input_tokens < 1 or lengths.output_tokens < 1 or lengths.prefix_tokens < 0:
        raise DatasetError("--random-input-len and --random-output-len must be at least 1, --random-prefix-len 0")
    rng = random.Random(seed)
    prefix = measure.symbols(rng, lengths.prefix_tokens)

    def vary(tokens: int) -> int:
        low = max(1, math.floor(tokens * (1 - lengths.range_ratio)))
        return rng.randint(low, math.ceil(tokens * (1 + lengths.range_ratio)))

    return [
        BenchRequest(0.0, measure.prompt(rng, vary(lengths.input_tokens), prefix), vary(lengths.output_tokens))
        for _ in range(count)
    ]


class ImageSize(NamedTuple):
    """Height and width of random images, and their share among all images."""

    height: int
    width: int
    share: float


@dataclass(frozen=True, slots=True)
class RandomImages:
    """How many images each request has, varied by ± `range_ratio`, and their sizes."""

    per_request: int
    sizes: tuple[ImageSize, ...]
    range_ratio: float = 0.0


def with_images(requests: Sequence[BenchRequest], images: RandomImages, seed: int) -> list[BenchRequest]:
    """Return the requests with images that are all different. Raises `DatasetError` for impossible numbers."""
    if images.per_request < 0 or not 0 <= images.range_ratio < 1:
        raise DatasetError("--random-mm-base-items-per-request is at least 0, and its range ratio from 0 to below 1")
    rng = random.Random(seed)
    low = math.floor(images.per_request * (1 - images.range_ratio))
    high = math.ceil(images.per_request * (1 + images.range_ratio))
    shares = [size.share for size in images.sizes]

    def image() -> bytes:
        (chosen,) = rng.choices(images.sizes, shares)
        return random_image(rng.randbytes, chosen.width, chosen.height)

    return [replace(request, images=tuple(image() for _ in range(rng.randint(low, high)))) for request in requests]


def random_image(draw: Callable[[int], bytes], width: int, height: int) -> bytes:
    """Return a JPEG file of random soft spots, which compresses about as well as a photo. `draw` returns that many
    random bytes.
    """
    spots = max(2, width // 16), max(2, height // 16)
    out = BytesIO()
    Image.frombytes("RGB", spots, draw(3 * spots[0] * spots[1])).resize((width, height), Image.Resampling.BICUBIC).save(
        out, "JPEG", quality=90
    )
    return out.getvalue()


def sharegpt_dataset(
    path: Path, count: int, measure: TextMeasure, *, output_tokens: int | None, seed: int
) -> list[BenchRequest]:
    """Return the first turns of conversations, in random order. The output is as long as the recorded answer, or
    `output_tokens`. Conversations repeat if the file has too few. Raises `DatasetError`."""
    found: list[BenchRequest] = []
    conversations = [entry for entry in _read(path, _parse_sharegpt) if len(entry) >= 2]
    random.Random(seed).shuffle(conversations)
    for prompt, answer, *_ in conversations:
        if len(found) == count:
            break
        prompt_tokens, answer_tokens = measure.count(prompt), output_tokens or measure.count(answer)
        is_short = prompt_tokens < MIN_TOKENS or (output_tokens is None and answer_tokens < MIN_TOKENS)
        is_long = prompt_tokens > MAX_PROMPT_TOKENS or prompt_tokens + answer_tokens > MAX_TOTAL_TOKENS
        if not is_short and not is_long:
            found.append(BenchRequest(0.0, prompt, answer_tokens))
    return _repeat(found, count, path)


def custom_dataset(
    path: Path, count: int, *, output_tokens: int, seed: int, shuffle: bool = True
) -> list[BenchRequest]:
    """Return the prompts of a JSON-lines file; its `output_tokens` replace the parameter if this is -1. Prompts repeat
    if the file has too few. Raises `DatasetError`."""
    entries = _read(path, _parse_custom)
    if shuffle:
        random.Random(seed).shuffle(entries)
    found = []
    for entry in entries[:count]:
        tokens = entry.get("output_tokens") if output_tokens == -1 else output_tokens
        if not isinstance(tokens, int) or tokens < 1:
            raise DatasetError(f'{path}: --custom-output-len -1 needs a positive "output_tokens" in each line')
        found.append(BenchRequest(0.0, entry["prompt"], tokens))
    return _repeat(found, count, path)


def _read(path: Path, parse: Callable[[str], Iterator[Any]]) -> list[Any]:
    try:
        return list(parse(path.read_text()))
    except OSError as exc:
        raise DatasetError(f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DatasetError(
            f'{path} has another form ({exc!r}): `sharegpt` is a JSON list of objects with "conversations", a list of '
            'of objects with "value"; `custom` has one JSON object with "prompt" in each line'
        ) from exc


def _parse_sharegpt(text: str) -> Iterator[list[str]]:
    for entry in json.loads(text):
        yield [str(turn["value"]) for turn in entry.get("conversations", entry.get("conversation", []))]


def _parse_custom(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.strip():
            entry = json.loads(line)
            yield entry | {"prompt": str(entry["prompt"])}


def _repeat(found: list[BenchRequest], count: int, path: Path) -> list[BenchRequest]:
    if not found:
        raise DatasetError(f"{path} has no prompt of a usable length")
    return [found[number % len(found)] for number in range(count)]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent: `rate_per_s` (inf: all at once) with gaps of a gamma distribution, whose shape is
    `burstiness` (1: a Poisson process; less: more bursts). `ramp` (`linear`, `exponential`) changes the rate from
    `start_per_s` to `end_per_s` over the run."""

    rate_per_s: float = math.inf
    burstiness: float = 1.0
    ramp: str | None = None
    start_per_s: float = 0.0
    end_per_s: float = 0.0

    def times(self, count: int, seed: int) -> list[float]:
        """Return the time of each request in seconds."""
        rng, clock, found = random.Random(seed), 0.0, []
        for number in range(count):
            found.append(clock)
            rate = self._rate(number / max(1, count))
            # A ramp may begin with the rate 0, at which the next request would never be sent.
            rate = max(rate, 1e-3)
            clock += 0.0 if math.isinf(rate) else rng.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
        if self.ramp is None and clock and not math.isinf(self.rate_per_s):
            # As in vLLM: the mean rate is exact, whatever the random gaps were.
            factor = count / self.rate_per_s / clock
            found = [time * factor for time in found]
        return found

    def _rate(self, progress: float) -> float:
        if self.ramp == "linear":
            return self.start_per_s + (self.end_per_s - self.start_per_s) * progress
        if self.ramp == "exponential":
            return float(self.start_per_s * (self.end_per_s / self.start_per_s) ** progress)
        return self.rate_per_s
