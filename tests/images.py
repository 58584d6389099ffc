"""Made-up pictures and prompts with them, and what transformers answers: the reference of all tests with images."""

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from baton_serve.contracts.media import NO_HEADER, MediaSpan, digest_of
from baton_serve.contracts.vision import ImageFamily, image_family, num_embeddings
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.services.router.protocol.image_limits import ImageLimits
from baton_serve.services.router.text.multimodal.image_files import load
from baton_serve.services.router.text.multimodal.image_memory import ImageReservation
from baton_serve.services.router.text.multimodal.media_cache import ImageFile
from baton_serve.services.router.text.multimodal.media_parts import MediaPart
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


async def load_images(urls: Sequence[str], limits: ImageLimits, reservation: ImageReservation) -> list[ImageFile]:
    return await load([MediaPart("image", url) for url in urls], limits, reservation, lambda video: NO_HEADER)


def tokens_of(folder: Path, image: bytes) -> int:
    """Of a picture, to the model there."""
    return num_embeddings(family_of(folder).parts(**size_of(image)))


def family_of(folder: Path) -> ImageFamily:
    family = image_family(ModelFacts.of(folder))
    assert family is not None
    return family


def size_of(image: bytes) -> dict[str, int]:
    with Image.open(BytesIO(image)) as opened:
        return {"width": opened.width, "height": opened.height}


def prompt_of(pieces: Sequence[Piece], folder: Path | None = None) -> tuple[list[int], list[MediaSpan]]:
    """Without a folder: of a model whose images are `IMAGE_TOKENS`."""
    tokens: list[int] = []
    spans: list[MediaSpan] = []
    for piece in pieces:
        if isinstance(piece, int):
            tokens.append(piece)
        else:
            family = None if folder is None else family_of(folder)
            size = size_of(piece)
            count = IMAGE_TOKENS if family is None else num_embeddings(family.parts(**size))
            grid = None if family is None else family.token_grid(**size)
            spans.append(MediaSpan(len(tokens), count, digest_of(piece), grid))
            tokens += [IMAGE_ID if family is None else family.image_token_id] * count
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
        if "image_grid_thw" in read:  # these models ask which tokens are those of images
            read["mm_token_type_ids"] = (ids == family_of(self._folder).image_token_id).int()
        limits = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        generated = self._model.generate(ids, attention_mask=torch.ones_like(ids), **read, **limits)
        return [int(token) for token in generated[0, len(tokens) :]]
