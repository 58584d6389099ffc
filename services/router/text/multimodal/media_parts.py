"""Finds the images, videos and audio in the content parts of chat messages, and checks the form of each part."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from baton_serve.services.router.protocol.image_limits import media_error
from baton_serve.services.router.protocol.openai_requests import ChatMessage, ContentPart

Kind = Literal["image", "video", "audio"]

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "image_url": "image",
        "image_embeds": "image",
        "video_url": "video",
        "audio_url": "audio",
        "input_audio": "audio",
    }
)
"""The kind of file that a content part of a type holds. The names are those of OpenAI's and vLLM's chat API."""


_NOUNS: Mapping[Kind, str] = MappingProxyType({"image": "an image", "video": "a video", "audio": "an audio"})
_FILES: Mapping[Kind, str] = MappingProxyType({"image": "image/png", "video": "video/mp4", "audio": "audio/wav"})
_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "aiff", "au", "caf")
"""Values of `input_audio.format` that are accepted. OpenAI names the first two; a file is read as what it is."""


class MediaPart(NamedTuple):
    """One image, video or audio of a chat."""

    kind: Kind
    url: str
    """Empty for a file that was sent before with the same `uuid`."""
    uuid: str | None = None
    is_embedded: bool = False
    """True: `url` is the base64 of a tensor with the embeddings of an image, and `grid` of one with their grid."""
    grid: str = ""

    @property
    def noun(self) -> str:
        """Return the words for it in messages."""
        return _NOUNS[self.kind]

    @property
    def example(self) -> str:
        """Return a URL for messages that show how a file is sent."""
        return f"data:{_FILES[self.kind]};base64,…"


def media_of(messages: Sequence[ChatMessage]) -> list[MediaPart]:
    """Return all images, videos and audio in the order of the prompt. Raises `BadRequestError` for a part without a
    file.
    """
    lists = [message.content for message in messages if isinstance(message.content, list)]
    return [_of(part, KINDS[part.type]) for parts in lists for part in parts if part.type in KINDS]


def image_part(url: str) -> ContentPart:
    """Return a content part with an image. The endpoints of other APIs convert their images to it."""
    return ContentPart(type="image_url", image_url={"url": url})


def _of(part: ContentPart, kind: Kind) -> MediaPart:
    if part.type == "input_audio":
        return _input_audio(part)
    if part.type == "image_embeds":
        return _image_embeds(part)
    stated = {"image": part.image_url, "video": part.video_url, "audio": part.audio_url}[kind]
    url = stated.get("url") if isinstance(stated, dict) else stated
    if part.uuid is not None and not url:
        return MediaPart(kind, "", part.uuid)
    found = MediaPart(kind, url if isinstance(url, str) else "", part.uuid)
    if not found.url:
        raise media_error(f'it must be {{"type": "{kind}_url", "{kind}_url": {{"url": "{found.example}"}}}}', kind)
    return found


def _image_embeds(part: ContentPart) -> MediaPart:
    """Return the embeddings of an image: a tensor in base64, or an object with it and its grid."""
    stated = part.image_embeds
    values = stated if isinstance(stated, dict) else {"image_embeds": stated}
    rows, grid = values.get("image_embeds"), values.get("image_grid_thw", "")
    if part.uuid is not None and not rows:
        return MediaPart("image", "", part.uuid, is_embedded=True)
    is_known = values.keys() <= {"image_embeds", "image_grid_thw"}
    if not is_known or not isinstance(rows, str) or not rows or not isinstance(grid, str):
        raise media_error(
            'it must be {"type": "image_embeds", "image_embeds": "base64…"}, or with a grid {"type": "image_embeds",'
            ' "image_embeds": {"image_embeds": "base64…", "image_grid_thw": "base64…"}}, each the base64 of a file of'
            " torch.save or safetensors with one tensor"
        )
    return MediaPart("image", rows, part.uuid, is_embedded=True, grid=grid)


def _input_audio(part: ContentPart) -> MediaPart:
    """Return audio that a client has sent as OpenAI's part, which has the file's bytes in base64 and its format."""
    stated = part.input_audio or {}
    data, name = stated.get("data"), stated.get("format")
    if part.uuid is not None and not data:
        return MediaPart("audio", "", part.uuid)
    if not isinstance(data, str) or not data or not isinstance(name, str):
        raise media_error(
            'it must be {"type": "input_audio", "input_audio": {"data": "base64…", "format": "wav"}}', "audio"
        )
    if name.lower() not in _FORMATS:
        raise media_error(f"input_audio.format is {name[:40]!r}; it must be {' or '.join(_FORMATS)}", "audio")
    return MediaPart("audio", f"data:audio/{name.lower()};base64,{data}", part.uuid)
