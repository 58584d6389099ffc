"""Made-up pictures and prompts with them, and what transformers answers: the reference of all tests with images."""

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from baton_serve.contracts.media import MediaSpan, digest_of
from baton_serve.contracts.vision import image_family, num_embeddings
from baton_serve.contracts.vision.facts import ModelFacts
from tests.tiny_models import IMAGE_ID, IMAGE_TOKENS

Piece = int | bytes
"""Of a prompt: a token, or a picture."""


def picture(number: int, *, kind: str = "PNG", size: tuple[int, int] = (24, 18)) -> bytes:
    """A file; each number's is another one."""
    width, height = size
    image = Image.new("RGB", size)
    for x in range(width):
        for y in range(height):
            image.putpixel((x, y), ((37 * number + 11 * x) % 256, (91 * number + 7 * y) % 256, (13 * x * y) % 256))
    out = BytesIO()
    image.save(out, kind)
    return out.getvalue()


def data_url(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def tokens_of(folder: Path, image: bytes) -> int:
    """Of a picture, to the model there."""
    family = image_family(ModelFacts.of(folder))
    assert family is not None
    with Image.open(BytesIO(image)) as opened:
        return num_embeddings(family.parts(width=opened.width, height=opened.height))


def prompt_of(pieces: Sequence[Piece], folder: Path | None = None) -> tuple[list[int], list[MediaSpan]]:
    """Without a folder: of a model whose images are `IMAGE_TOKENS`."""
    tokens: list[int] = []
    spans: list[MediaSpan] = []
    for piece in pieces:
        if isinstance(piece, int):
            tokens.append(piece)
        else:
            count = IMAGE_TOKENS if folder is None else tokens_of(folder, piece)
            spans.append(MediaSpan(len(tokens), count, digest_of(piece)))
            tokens += [IMAGE_ID] * count
    return tokens, spans


class Reference:
    """transformers' own model and processor, in float32. No token ends an answer."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        torch.set_num_threads(1)
        self._folder = folder
        self._model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def answer(self, pieces: Sequence[Piece], count: int) -> list[int]:
        """Return the greedy answer of transformers."""
        tokens, _ = prompt_of(pieces, self._folder)
        images = [Image.open(BytesIO(piece)).convert("RGB") for piece in pieces if isinstance(piece, bytes)]
        read = self._processor(images=images, return_tensors="pt") if images else {}
        ids = torch.tensor([tokens])
        limits = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        generated = self._model.generate(ids, attention_mask=torch.ones_like(ids), **read, **limits)
        return [int(token) for token in generated[0, len(tokens) :]]
