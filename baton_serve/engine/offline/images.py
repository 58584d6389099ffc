"""Images in prompts of the offline API: from `multi_modal_data`, or from the parts of a chat message.

An image becomes a file (PNG) and is then handled as a server handles it: equal pixels give equal tokens and cached KV.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

import numpy as np
from PIL import Image

from baton_serve.contracts.media import MediaSpan, digest_of
from baton_serve.contracts.vision import (
    SERVED,
    ImageFamily,
    Parts,
    expand_runs,
    write_parts,
    write_parts_as_tokens,
)
from baton_serve.engine.errors import ConfigError, RequestError
from baton_serve.engine.model.vision.placeholders import ImageReader, Pixels
from baton_serve.engine.offline.prompts import ParsedPrompt


class ImagePrompt(NamedTuple):
    """A tokenized prompt with its images: which spans of tokens stand for images, and the preprocessed pixels of each
    image by its digest."""

    token_ids: list[int]
    media: list[MediaSpan]
    pixels: Pixels


def files_of(data: Mapping[str, Any]) -> list[bytes]:
    """Return the images in vLLM's `multi_modal_data` as image files, in order. Raises `ConfigError` for data other than
    images."""
    if others := {name for name, value in data.items() if value is not None} - {"image"}:
        raise ConfigError(f"multi_modal_data: {sorted(others)[0]} is not supported; only image is")
    images = data.get("image")
    if images is None:
        return []
    return [_file_of(image) for image in (images if isinstance(images, list | tuple) else [images])]


def chat_with_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return chat messages in which each image is replaced by a part `{"type": "image"}`, as chat templates expect it,
    and the image files in their order.

    Raises `ConfigError` for a part that is neither text nor an image.
    """
    files: list[bytes] = []
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        parts: Any = content
        if isinstance(content, list):
            parts = []
            for part in content:
                file = _file_of_part(part)
                files += [] if file is None else [file]
                parts.append(part if file is None else {"type": "image"})
            # Templates of text models expect a string, and parts that are all text have the same meaning.
            if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
                parts = content
        found.append({**message, "content": parts})
    return found, files


def add_images(
    prompt: ParsedPrompt,
    token_ids: list[int],
    model: tuple[ImageFamily | None, ImageReader | None],
    tokenizer: Any,
    *,
    add_special_tokens: bool,
) -> ImagePrompt:
    """Preprocess the images of a prompt, and replace its placeholders by the tokens that stand for them.

    `token_ids` are the prompt's. `model` says how the model reads images; None: not at all. `tokenizer` is
    transformers', or None if the engine has none. Raises `ConfigError` if the model does not accept images, and
    `RequestError` if an image cannot be read or the prompt does not have one placeholder for each image.
    """
    family, reader = model
    if family is None or reader is None:
        raise ConfigError(f"this model does not accept images here: {SERVED}, with tensor_parallel_size 1")
    pixels = reader.read(dict.fromkeys(prompt.images))
    digests = [digest_of(file) for file in prompt.images]
    try:
        images = [family.parts(width=pixels[name].width, height=pixels[name].height) for name in digests]
        written = _written(prompt, token_ids, images, family, tokenizer, add_special_tokens)
        expanded, places = expand_runs(written, images, family.image_token_id)
    except ValueError as exc:
        raise RequestError("invalid", str(exc)) from exc
    grids = [family.token_grid(width=pixels[name].width, height=pixels[name].height) for name in digests]
    spans = [MediaSpan(*place, name, grid) for place, name, grid in zip(places, digests, grids, strict=True)]
    return ImagePrompt(expanded, spans, pixels)


def _written(
    prompt: ParsedPrompt,
    token_ids: list[int],
    images: Sequence[Parts],
    family: ImageFamily,
    tokenizer: Any,
    add_special_tokens: bool,
) -> list[int]:
    """Return the tokens of a prompt in which each image's placeholder is replaced by the image's text, as the model's
    `family` writes it. In it each run of image tokens is still a single token. `add_special_tokens` False is for texts
    of a chat template."""
    if not family.placeholder and all(isinstance(part, int) for parts in images for part in parts):
        return write_parts_as_tokens(token_ids, images, family.image_token_id, family.image_token_id, lambda text: [])
    if tokenizer is None:
        raise ConfigError("skip_tokenizer_init: images of this model are written as text, which needs a tokenizer")

    def encode(text: str, with_special: bool) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=with_special)["input_ids"]
        return found

    token = tokenizer.convert_ids_to_tokens(family.image_token_id)
    placeholder = family.placeholder or token
    if prompt.token_ids is None:
        return encode(write_parts(prompt.text or "", images, placeholder, token), add_special_tokens)
    placeholder_id = tokenizer.convert_tokens_to_ids(placeholder)
    return write_parts_as_tokens(
        token_ids, images, placeholder_id, family.image_token_id, lambda text: encode(text, False)
    )


def _file_of(image: object) -> bytes:
    """Return an image in any form of vLLM's API as an image file: a Pillow image, an array [height, width, 3], or the
    bytes of a file. Raises `ConfigError` for other objects."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray):
        shape = image.shape
        try:
            image = Image.fromarray(image)
        except TypeError as exc:
            raise ConfigError(f"an image array must be uint8 [height, width, 3], not {shape}") from exc
    if not isinstance(image, Image.Image):
        raise ConfigError(
            f"an image must be a Pillow image, an array or the bytes of a file, not {type(image).__name__}: embeddings"
            " of images are not supported"
        )
    written = BytesIO()
    # PNG loses nothing, and the file identifies the image in the prefix cache.
    image.convert("RGB").save(written, "PNG")
    return written.getvalue()


def _file_of_part(part: object) -> bytes | None:
    """Return the image file of one part of a chat message; None if the part is text. Raises `ConfigError` for other
    parts."""
    match part:
        case str() | {"type": "text"}:
            return None
        case {"type": "image_pil", "image_pil": image} | {"type": "image", "image": image}:
            return _file_of(image)
        case {"type": "image_url", "image_url": str(url)} | {"type": "image_url", "image_url": {"url": str(url)}}:
            return _file_at(url)
        case {"type": kind}:
            raise ConfigError(f"a chat part of type {kind!r} is not supported; text, image_url and image_pil are")
        case _:
            raise ConfigError("a chat part must be a text or a dict with a type")


def _file_at(url: str) -> bytes:
    """Return the image file in a data: URL, or at a file: URL. Raises `ConfigError` for other URLs, or if it cannot be
    read."""
    parsed = urlparse(url)
    try:
        if parsed.scheme == "data":
            return base64.b64decode(url.partition(",")[2], validate=True)
        if parsed.scheme == "file":
            return Path(unquote(parsed.path)).read_bytes()
    except (OSError, binascii.Error) as exc:
        raise ConfigError(f"an image cannot be read: {exc}") from exc
    raise ConfigError(f"an image of the scheme {parsed.scheme!r} is not fetched here: give a data: or file: URL")
