"""Replaces placeholders of images in a prompt by their tokens; how many, is decided in `contracts/vision`.

A prompt is tokenized with the texts of its images in it, as transformers does, because they may join with the text
around them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from baton_serve.contracts.media import MAX_IMAGES, Clip, MediaHeader, MediaSpan, VideoFile, span_digests
from baton_serve.contracts.vision import (
    ImageFamily,
    MediaText,
    UnfitImageError,
    configured,
    expand_runs,
    media_spans,
    num_embeddings,
    write_parts,
)
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.image_limits import ImageLimits, media_error
from baton_serve.services.router.text.multimodal.image_files import SoundDecoder, load
from baton_serve.services.router.text.multimodal.image_memory import ImageMemory, ImageReservation
from baton_serve.services.router.text.multimodal.media_cache import ImageFile
from baton_serve.services.router.text.multimodal.media_parts import MediaPart


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt as tokens with its images. `media` are the spans of image tokens in `token_ids`; `images` are the
    distinct image files.
    """

    token_ids: list[int]
    media: Sequence[MediaSpan] = ()
    images: Sequence[bytes] = ()
    files: Sequence[tuple[bytes, ...]] = ()
    """For each of `images`, the digests of its spans in `media`; empty for one that encode instances do not read."""
    source_tokens: int = 0
    """Positions of the source that an encoder reads with the prompt, to which no token corresponds; 0 without one."""


class ImagePlaces:
    """Writes the images and videos of one prompt into its text, and then into its tokens."""

    def __init__(
        self,
        text: str,
        parts: Sequence[MediaPart],
        family: ImageFamily,
        token: Callable[[int], str | None],
        settings: Mapping[str, Any],
    ) -> None:
        """Take the text of a chat template with a placeholder for each of `parts`.

        `token` returns the text of a token. `settings` are the request's `mm_processor_kwargs` over those of the
        server. Raises `BadRequestError` for a setting that the model's family does not know.
        """
        self.media = parts
        self._text = text
        self._settings = dict(settings)
        self._token = token
        try:
            self._family = configured(family, settings)
        except ValueError as exc:
            raise BadRequestError(f"mm_processor_kwargs: {exc}", param="mm_processor_kwargs") from exc

    @property
    def is_fixed(self) -> bool:
        """Return whether all of them become the same, whatever is in the files."""
        return self._family.is_fixed and all(part.kind == "image" and not part.is_embedded for part in self.media)

    @property
    def least(self) -> list[MediaText]:
        """Return images and videos that take the least space."""
        audio = self._family.audio
        return [
            audio.least_text
            if part.kind == "audio" and audio is not None
            else self._family.least_text(is_video=part.kind == "video")
            for part in self.media
        ]

    def describe(self, video: VideoFile | None) -> MediaHeader:
        """Return the header of a file. Raises `BadRequestError` for a video that is too short for the model."""
        rules = self._family.video
        if video is None or rules is None:
            return MediaHeader(self._settings)
        try:
            indexes = rules.sample(video.num_frames, video.fps)
        except UnfitImageError as exc:
            raise media_error(str(exc), "video") from exc
        clip = Clip(width=video.width, height=video.height, num_frames=video.num_frames, fps=video.fps, indexes=indexes)
        return MediaHeader(self._settings, clip)

    def texts_of(self, files: Sequence[ImageFile]) -> list[MediaText]:
        """Return what the files become, in the order of the prompt.

        Raises `BadRequestError` for one that the model cannot read.
        """
        try:
            return [self._text_of(file) for file in files]
        except UnfitImageError as exc:
            raise media_error(str(exc)) from exc

    def _text_of(self, file: ImageFile) -> MediaText:
        if file.embedded is not None:
            return self._family.text_of_rows(file.embedded)
        if self._family.audio is not None and file.num_samples:
            return self._family.audio.text_of(file.num_samples)
        return self._family.text_of(width=file.width, height=file.height, clip=file.clip)

    def written(self, media: Sequence[MediaText]) -> str:
        """Return the text with the texts of its images, in which a run of image tokens is one token.

        Raises `BadRequestError` if the number of placeholders is not the number of images: the chat template has left
        one out, or the text of a message contains the placeholder.
        """
        try:
            return write_parts(self._family.framed(self._text), media, lambda token_id: self._token(token_id) or "")
        except ValueError as exc:
            raise _misplaced(exc) from exc

    def expanded(
        self, token_ids: Sequence[int], media: Sequence[MediaText]
    ) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """Return the tokens of `written` with all image tokens, and the places of each image.

        Raises `BadRequestError` if the text of a message contains the image token.
        """
        try:
            return expand_runs(token_ids, media)
        except ValueError as exc:
            raise _misplaced(exc) from exc


def _misplaced(exc: ValueError) -> BadRequestError:
    return media_error(
        f"{exc}: the text of messages must not contain the model's image token, and the chat template must write one"
        " for each image"
    )


Tokenize = Callable[[str], Awaitable[list[int]]]
"""Returns the tokens of a prompt's text."""


async def count_image_tokens(
    tokenize: Tokenize,
    places: ImagePlaces,
    image_limits: ImageLimits,
    memory: ImageMemory,
    decoder: SoundDecoder | None = None,
) -> list[int]:
    """Return the tokens of a prompt, with the image tokens of its images, for a request that only counts tokens.

    The images are loaded only if their number of tokens depends on their size. Raises `BadRequestError` if the images
    cannot be loaded or do not match the prompt, and `RateLimitError` if the limits of `ImageMemory` are reached.
    """
    _check_media(places.media, image_limits)
    if places.is_fixed:
        media = places.least
    else:
        with ImageReservation(memory) as reservation:
            media = places.texts_of(await load(places.media, image_limits, reservation, places.describe, decoder))
    return places.expanded(await tokenize(places.written(media)), media)[0]


async def expand_image_tokens(
    tokenize: Tokenize,
    places: ImagePlaces,
    image_limits: ImageLimits,
    check: Callable[[Sequence[int]], None],
    reservation: ImageReservation,
    decoder: SoundDecoder | None = None,
) -> TokenizedPrompt:
    """Load the images, videos and audio of a prompt and return it with their tokens. `decoder` decodes audio. `check`
    raises `BadRequestError` for tokens that are too many for the model.

    The files count in `reservation`, which the caller releases after the last use of the prompt. Raises
    `BadRequestError` if the images cannot be loaded, do not match the prompt, or leave no room for an answer, and
    `RateLimitError` if the limits of `ImageMemory` are reached.
    """
    _check_media(places.media, image_limits)
    # A prompt that is too long already with the smallest images is rejected before anything is fetched.
    least = places.written(places.least)
    token_ids = await tokenize(least)
    check(places.expanded(token_ids, places.least)[0])
    files = await load(places.media, image_limits, reservation, places.describe, decoder)
    media = places.texts_of(files)
    written = places.written(media)
    if written != least:
        token_ids = await tokenize(written)
    found, where = places.expanded(token_ids, media)
    # Positions and hashes of blocks need the spans; checked first, because an instance accepts a limited number.
    check(found)
    spans = media_spans(where, media, [file.digest for file in files])
    if len(spans) > MAX_IMAGES:
        raise media_error(f"the images and the frames of videos are more than {MAX_IMAGES}", "video")
    own: dict[bytes, tuple[bytes, ...]] = {}
    for file, text in zip(files, media, strict=True):
        # Embeddings of a client are encoded already.
        own[file.digest] = () if file.embedded else tuple(span_digests(file.digest, len(text.grids)))
    images = {file.digest: file.data for file in files}
    return TokenizedPrompt(found, spans, list(images.values()), list(own.values()))


async def lone_image(places: ImagePlaces, image_limits: ImageLimits, reservation: ImageReservation) -> TokenizedPrompt:
    """Load the one image of an input that has nothing else, and return it with the tokens that count it.

    The file counts in `reservation`. Raises the errors of `expand_image_tokens`.
    """
    _check_media(places.media, image_limits)
    (file,) = await load(places.media, image_limits, reservation, places.describe)
    (text,) = places.texts_of([file])
    token_ids = [text.token_id] * num_embeddings(text.parts)
    return TokenizedPrompt(token_ids, [MediaSpan(0, len(token_ids), file.digest, text.grids[0])], [file.data])


def _check_media(media: Sequence[MediaPart], image_limits: ImageLimits) -> None:
    """Raise `BadRequestError` if a request has embeddings or more images, videos or audio than it may."""
    if any(part.is_embedded for part in media) and not image_limits.takes_embeddings:
        raise media_error("embeddings of images are accepted only with --enable-mm-embeds: send the image")
    for kind in ("image", "video", "audio"):
        image_limits.check_number(kind, sum(part.kind == kind for part in media))
