"""Puts images and videos into prompts of the offline API: from `multi_modal_data`, or from the parts of a chat message.

An image becomes a file (PNG) and is then handled as a server handles it: equal pixels give equal tokens and cached KV.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlparse

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from baton_serve.contracts.audio import is_wav
from baton_serve.contracts.media import (
    Embedded,
    MediaHeader,
    MediaSpan,
    digest_of,
    has_header,
    source_span,
    span_digests,
    split_header,
    with_header,
)
from baton_serve.contracts.vision import (
    HEARD,
    SERVED,
    ImageFamily,
    MediaText,
    configured,
    expand_runs,
    media_spans,
    write_parts,
    write_parts_as_tokens,
)
from baton_serve.engine.errors import ConfigError, RequestError
from baton_serve.engine.model.vision.image_types import ImageReader, Pixels
from baton_serve.engine.offline.audio_inputs import is_list_of_sounds, sound_file
from baton_serve.engine.offline.prompts import ParsedPrompt
from baton_serve.engine.offline.videos import GivenVideo, file_of, given_video

Kind = Literal["image", "video", "audio"]
MAX_KEPT_BYTES = 256 << 20
"""Size of the files that are kept by their uuid, in bytes."""


_KINDS: Mapping[str, Kind] = {"image_url": "image", "image_pil": "image", "video_url": "video", "audio_url": "audio"}
"""The kind of content that a part of a chat message with only a uuid refers to, by the type of the part."""


class GivenMedia(NamedTuple):
    """An image or audio (the bytes of a file) or a video of a prompt. With a `uuid`, the content may be None later."""

    kind: Kind
    content: bytes | GivenVideo | None
    uuid: str | None = None


class ImagePrompt(NamedTuple):
    """A tokenized prompt with its images: which spans of tokens stand for images, and the preprocessed pixels of each
    image by its digest."""

    token_ids: list[int]
    media: list[MediaSpan]
    pixels: Pixels


@dataclass
class MediaRules:
    """How an engine reads images and videos. `limits` has the most of each kind in one prompt, and `settings` those of
    the model's processor; a prompt may replace them.
    """

    family: ImageFamily | None
    limits: Mapping[str, int]
    settings: Mapping[str, Any]
    known: dict[str, bytes | GivenVideo] = field(default_factory=dict)
    """The most recently used contents by uuid."""

    def content_of(self, media: GivenMedia) -> bytes | GivenVideo:
        """Return the content of an image or video, and keep it if it has a uuid. Raises `ConfigError`."""
        content = media.content
        if media.uuid is None:
            assert content is not None, "without a uuid there is a content"
            return content
        if content is None:
            content = self.known.get(media.uuid)
        if content is None:
            raise ConfigError(f"multi_modal_uuids: there is no {media.kind} {media.uuid[:80]!r} here: give its data")
        # Keeping it again makes it the most recently used one.
        self.known.pop(media.uuid, None)
        self.known[media.uuid] = content
        while sum(map(_num_bytes, self.known.values())) > MAX_KEPT_BYTES:
            self.known.pop(next(iter(self.known)))
        return content

    def check_number(self, media: Sequence[GivenMedia]) -> None:
        """Raise `ConfigError` if a prompt has more images or videos than it may."""
        for kind, most in self.limits.items():
            if (count := sum(one.kind == kind for one in media)) > most:
                raise ConfigError(f"a prompt has {count} {kind}s, limit_mm_per_prompt is {most}")


def _num_bytes(content: bytes | GivenVideo) -> int:
    if isinstance(content, bytes):
        return len(content)
    return len(content.file) if content.frames is None else int(content.frames.nbytes)


def media_of(data: Mapping[str, Any], uuids: Mapping[str, Any]) -> list[GivenMedia]:
    """Return the images, then the videos and then the audio in vLLM's `multi_modal_data`. `uuids` are its
    `multi_modal_uuids`.

    Raises `ConfigError` for anything else.
    """
    if others := {name for name, value in data.items() if value is not None} - {"image", "video", "audio"}:
        raise ConfigError(f"multi_modal_data: {sorted(others)[0]} is not supported; only image, video and audio are")
    given = data.get("image")
    images = _items({"image": _split(given)}, uuids, "image", lambda image: isinstance(image, list | tuple), _file_of)
    videos = _items(data, uuids, "video", _is_list_of_videos, given_video)
    return images + videos + _items(data, uuids, "audio", is_list_of_sounds, sound_file)


def _items(
    data: Mapping[str, Any],
    uuids: Mapping[str, Any],
    kind: Kind,
    is_list: Callable[[Any], bool],
    read: Callable[[Any], bytes | GivenVideo],
) -> list[GivenMedia]:
    value: Any = data.get(kind)
    names = uuids.get(kind)
    named = [names] if isinstance(names, str) else list(names or [])
    values = [] if value is None and not named else list(value) if is_list(value) else [value]
    if value is None and named:
        values = [None] * len(named)
    named += [None] * (len(values) - len(named))
    if len(named) != len(values):
        raise ConfigError(f"multi_modal_uuids: there are {len(named)} for {len(values)} {kind}s")
    for one, name in zip(values, named, strict=True):
        if one is None and name is None:
            raise ConfigError(f"multi_modal_data: an {kind} is None, and has no uuid")
    return [GivenMedia(kind, None if one is None else read(one), name) for one, name in zip(values, named, strict=True)]


def _is_list_of_videos(value: Any) -> bool:
    """Return whether a value holds several videos: a list of frames is one."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return first is None or isinstance(first, list | tuple | bytes) or getattr(first, "ndim", 0) == 4


def chat_with_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[GivenMedia]]:
    """Return the messages with a part `{"type": "image"}` or `{"type": "video"}` for each image and video, as chat
    templates expect it, and the contents.

    Raises `ConfigError` for a part that is neither text nor an image or a video.
    """
    given: list[GivenMedia] = []
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        parts: Any = content
        if isinstance(content, list):
            parts = []
            for part in content:
                media = _media_of_part(part)
                given += [] if media is None else [media]
                parts.append(part if media is None else {"type": media.kind})
            # Templates of text models expect a string, and parts that are all text have the same meaning.
            if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
                parts = content
        found.append({**message, "content": parts})
    return found, given


def add_images(
    prompt: ParsedPrompt,
    token_ids: list[int],
    rules: MediaRules,
    reader: ImageReader | None,
    tokenizer: Any,
    *,
    add_special_tokens: bool,
) -> ImagePrompt:
    """Read the images and videos of a prompt and put them in the place of its placeholders.

    `token_ids` are the prompt's. `tokenizer` is transformers', or None if the engine has none. Raises `ConfigError` if
    the model does not accept them, and `RequestError` if one cannot be read or the prompt does not have one placeholder
    for each.
    """
    given: Sequence[GivenMedia] = prompt.media
    settings = {**rules.settings, **prompt.settings}
    rules.check_number(given)
    if rules.family is None and reader is not None and all(one.kind == "audio" for one in given):
        return _source(token_ids, [rules.content_of(one) for one in given], reader)
    if rules.family is None or reader is None:
        served = HEARD if any(one.kind == "audio" for one in given) else SERVED
        raise ConfigError(f"this model does not accept {given[0].kind}s here: {served}, with pipeline_parallel_size 1")
    try:
        family = configured(rules.family, settings)
    except ValueError as exc:
        raise ConfigError(f"mm_processor_kwargs: {exc}") from exc
    try:
        ordered = _in_order(given, prompt, family, tokenizer)
        files = [_with_header(rules.content_of(one), family, settings) for one in ordered]
        pixels = reader.read(dict.fromkeys(files))
        digests = [digest_of(file) for file in files]
        media = [_text_of(file, family, pixels) for file in files]
        written = _written(prompt, token_ids, family, media, tokenizer, add_special_tokens)
        expanded, places = expand_runs(written, media)
    except ValueError as exc:
        raise RequestError("invalid", str(exc)) from exc
    return ImagePrompt(expanded, media_spans(places, media, digests), pixels)


def _source(token_ids: list[int], contents: Sequence[bytes | GivenVideo], reader: ImageReader) -> ImagePrompt:
    """Return the prompt of a model that transcribes one window of audio, such as Whisper."""
    if len(contents) != 1:
        raise ConfigError(f"a prompt of this model has one audio, not {len(contents)}")
    file = contents[0]
    assert isinstance(file, bytes), "audio is the bytes of a file"
    return ImagePrompt(token_ids, [source_span(digest_of(file))], reader.read([file]))


def _in_order(
    given: Sequence[GivenMedia], prompt: ParsedPrompt, family: ImageFamily, tokenizer: Any
) -> Sequence[GivenMedia]:
    """Return images, videos and audio in the order of their placeholders. A dict has them apart from each other."""
    kinds = {one.kind for one in given}
    if "video" in kinds and family.video is None:
        raise ConfigError("this model does not accept videos here")
    if "audio" in kinds and family.audio is None:
        raise ConfigError(f"this model does not accept audio here: {HEARD}")
    if "image" in kinds and not family.reads_images:
        raise ConfigError("this model reads audio, but no images")
    if len(kinds) < 2 or prompt.text is None or tokenizer is None:
        return given
    rest = {kind: [one for one in given if one.kind == kind] for kind in kinds}
    marks: dict[str, Kind] = {}
    for kind in kinds:
        heard = family.audio if kind == "audio" else None
        mark = (family.least_text(is_video=kind == "video") if heard is None else heard.least_text).placeholder
        marks[tokenizer.convert_ids_to_tokens(mark) if isinstance(mark, int) else mark] = kind
    shown = [marks[found] for found in re.findall("|".join(map(re.escape, marks)), prompt.text)]
    # A wrong number of placeholders is reported when they are replaced.
    return [rest[kind].pop(0) for kind in shown if rest[kind]] + [one for left in rest.values() for one in left]


def _with_header(content: bytes | GivenVideo, family: ImageFamily, settings: Mapping[str, Any]) -> bytes:
    if isinstance(content, bytes) and (is_wav(content) or has_header(content)):
        return content
    if isinstance(content, bytes):
        return with_header(content, MediaHeader(dict(settings)))
    assert family.video is not None, "checked before"
    return file_of(content, family.video, settings)


def _text_of(file: bytes, family: ImageFamily, pixels: Pixels) -> MediaText:
    """Return what an image or video becomes in the prompt. Raises `ValueError` if the model cannot read it."""
    clip = split_header(file)[0].clip
    if clip is not None:
        return family.text_of(width=clip.width, height=clip.height, clip=clip)
    digest = digest_of(file)
    if digest not in pixels:
        # Crops of the image have spans of their own. The name of the first does not depend on their number.
        piece = pixels[span_digests(digest, 2)[0]]
        return family.text_of(width=piece.width, height=piece.height)
    picture = pixels[digest]
    return picture.text or family.text_of(width=picture.width, height=picture.height)


def _written(
    prompt: ParsedPrompt,
    token_ids: list[int],
    family: ImageFamily,
    media: Sequence[MediaText],
    tokenizer: Any,
    add_special_tokens: bool,
) -> list[int]:
    """Return the tokens of a prompt with the texts of its images, in which a run of image tokens is one token."""
    is_framed = prompt.text is not None and family.framed("") != ""
    if not is_framed and all(isinstance(part, int) for one in media for part in (*one.parts, one.placeholder)):
        return write_parts_as_tokens(token_ids, media, lambda text: [])
    if tokenizer is None:
        raise ConfigError("skip_tokenizer_init: images of this model are written as text, which needs a tokenizer")

    def encode(text: str, with_special: bool) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=with_special)["input_ids"]
        return found

    if prompt.token_ids is None:
        written = write_parts(family.framed(prompt.text or ""), media, tokenizer.convert_ids_to_tokens)
        # The processor has added the special tokens already.
        return encode(written, add_special_tokens and not is_framed)
    return write_parts_as_tokens(token_ids, media, lambda text: encode(text, False))


def _split(images: Any) -> Any:
    """Return embeddings of several images in vLLM's forms as a list with those of one image each, other values as they
    are.

    The forms are a tensor [images, embeddings, hidden size], and a dict with the embeddings of all images in a row,
    `image_embeds`, and their `image_grid_thw` [images, 3]. Raises `ConfigError` if the two do not fit.
    """
    if isinstance(images, Tensor) and images.ndim == 3:
        return list(images)
    if not isinstance(images, dict):
        return images
    rows, grids = images.get("image_embeds"), images.get("image_grid_thw")
    if images.keys() != {"image_embeds", "image_grid_thw"} or not isinstance(rows, Tensor) or rows.ndim != 2:
        raise ConfigError("embeddings of images are a tensor, or a dict of the tensors image_embeds and image_grid_thw")
    shapes = [tuple(map(int, grid)) for grid in torch.as_tensor(grids).view(-1, 3)]
    if len(shapes) == 1:
        return [_Rows(rows, shapes[0])]
    patches = sum(map(prod, shapes))
    # Each embedding joins as many patches as any other.
    joined = patches // len(rows) if len(rows) else 0
    if not joined or patches != joined * len(rows):
        raise ConfigError(
            f"image_grid_thw has {patches} patches, which {len(rows)} embeddings cannot have in equal parts"
        )
    parts = torch.split(rows, [prod(shape) // joined for shape in shapes])
    return [_Rows(part, shape) for part, shape in zip(parts, shapes, strict=True)]


class _Rows(NamedTuple):
    """The embeddings of one image, with its `image_grid_thw`."""

    values: Tensor
    grid: tuple[int, ...] | None


def _embeddings(given: "_Rows") -> bytes:
    """Return embeddings [embeddings, hidden size] as the file that the engine takes. Raises `ConfigError`."""
    values, grid = given
    dtype: Any = str(values.dtype).removeprefix("torch.")
    if values.ndim != 2 or not values.numel() or dtype not in ("float32", "float16", "bfloat16"):
        raise ConfigError(
            "embeddings of an image must be floats [embeddings, hidden size] of float32, float16 or bfloat16, not"
            f" {dtype} {list(values.shape)}"
        )
    known: Any = grid
    header = Embedded(num_rows=len(values), width=values.shape[1], dtype=dtype, grid=known)
    data = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return with_header(data, MediaHeader(embedded=header))


def _file_of(image: object) -> bytes:
    """Return an image in any form of vLLM's API as an image file: a Pillow image, an array [height, width, 3], or the
    bytes of a file; or its embeddings, a tensor or a dict with their grid. Raises `ConfigError` for other objects."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, dict) and len(parts := _split(image)) == 1:
        return _embeddings(parts[0])
    if isinstance(image, Tensor | _Rows):
        return _embeddings(image if isinstance(image, _Rows) else _Rows(image, None))
    if isinstance(image, np.ndarray):
        shape = image.shape
        try:
            image = Image.fromarray(image)
        except TypeError as exc:
            raise ConfigError(f"an image array must be uint8 [height, width, 3], not {shape}") from exc
    if not isinstance(image, Image.Image):
        raise ConfigError(
            f"an image must be a Pillow image, an array, the bytes of a file or a tensor of embeddings, not"
            f" {type(image).__name__}"
        )
    written = BytesIO()
    # PNG loses nothing, and the file identifies the image in the prefix cache.
    image.convert("RGB").save(written, "PNG")
    return written.getvalue()


def _media_of_part(part: object) -> GivenMedia | None:
    """Return the image, video or audio of a part of a chat message, or None if it is text. Raises `ConfigError`."""
    uuid = part.get("uuid") if isinstance(part, dict) else None
    match part:
        case str() | {"type": "text"}:
            return None
        case {"type": "image_pil", "image_pil": image} | {"type": "image", "image": image}:
            return GivenMedia("image", _file_of(image), uuid)
        case {"type": "image_url", "image_url": str(url)} | {"type": "image_url", "image_url": {"url": str(url)}}:
            return GivenMedia("image", _file_at(url, "an image"), uuid)
        case {"type": "video", "video": video}:
            return GivenMedia("video", given_video(video), uuid)
        case {"type": "video_url", "video_url": str(url)} | {"type": "video_url", "video_url": {"url": str(url)}}:
            return GivenMedia("video", given_video(_file_at(url, "a video")), uuid)
        case {"audio": _} | {"audio_url": _} | {"input_audio": _}:
            return GivenMedia("audio", _sound_of_part(part), uuid)
        case {"type": "image_url" | "image_pil" | "video_url" | "audio_url" as kind} if uuid is not None:
            return GivenMedia(_KINDS[kind], None, uuid)
        case {"type": kind}:
            raise ConfigError(
                f"a chat part of type {kind!r} is not supported; text, image_url, video_url and audio_url are"
            )
        case _:
            raise ConfigError("a chat part must be a text or a dict with a type")


def _sound_of_part(part: object) -> bytes:
    """Return the audio of a part of a chat message as a WAV file. Raises `ConfigError`."""
    match part:
        case {"type": "audio", "audio": sound}:
            return sound_file(sound)
        case {"type": "audio_url", "audio_url": str(url)} | {"type": "audio_url", "audio_url": {"url": str(url)}}:
            return sound_file(_file_at(url, "an audio"))
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            return sound_file(_file_at(f"data:;base64,{data}", "an audio"))
        case _:
            raise ConfigError("a chat part with audio is like {'type': 'audio_url', 'audio_url': {'url': 'file:///…'}}")


def _file_at(url: str, noun: str) -> bytes:
    """Return the file in a data URL or on this machine. `noun` names it in errors. Raises `ConfigError`."""
    parsed = urlparse(url)
    try:
        if parsed.scheme == "data":
            return base64.b64decode(url.partition(",")[2], validate=True)
        if parsed.scheme == "file":
            return Path(unquote(parsed.path)).read_bytes()
    except (OSError, binascii.Error) as exc:
        raise ConfigError(f"{noun} cannot be read: {exc}") from exc
    raise ConfigError(f"{noun} of the scheme {parsed.scheme!r} is not fetched here: give a data: or file: URL")
