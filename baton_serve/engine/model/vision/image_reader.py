"""Decodes images and preprocesses them as the model's own image processor does; videos and audio are passed on.

All of it can be called from any thread.
"""

from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from baton_serve.contracts.audio import is_wav
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.media import (
    FORMATS,
    TURNED_FORMATS,
    Clip,
    Embedded,
    digest_of,
    is_strip,
    span_digests,
    split_header,
)
from baton_serve.contracts.vision import ImageFamily, MediaText, configured
from baton_serve.contracts.vision.framewise_videos import FrameRules
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.engine.model.speech.chat_audio import HFSoundReader
from baton_serve.engine.model.vision.image_types import DecodedImage, EncodedImage
from baton_serve.engine.model.vision.pixel_table import PixelTable, pixel_table
from baton_serve.engine.model.vision.video_reader import frames_of, pixel_values, pixels_of
from baton_serve.engine.model_folder import LOAD_ERRORS, first_line

MAX_PIXELS = 1 << 27
"""Largest image in pixels, before it is resized.

The router has a lower limit; this one is for callers without a router.
"""
_DECODE_ERRORS = (*LOAD_ERRORS, SyntaxError, MemoryError, UnidentifiedImageError, Image.DecompressionBombError)


class HFImageReader:
    """Implements `ImageReader` with Pillow and the model's image processor of transformers."""

    def __init__(self, folder: Path, family: ImageFamily) -> None:
        """Load the image processor of the model in a folder. Raises `ModelError`."""
        self._processor = _processor_of(folder) if family.reads_images else None
        self.sounds = None if family.audio is None else HFSoundReader(folder, family.audio)
        """Decodes audio; None if the model does not read it."""
        self._family = family
        self.embedding_layout: KVLayout | None = None
        """The layout of blocks with embeddings of these images; the tower sets it, which knows their width."""
        self.dtype = torch.float32
        """The dtype of pixels (see `use_dtype`)."""
        self._table: PixelTable | None = None

    def use_dtype(self, dtype: torch.dtype) -> None:
        """Let pixels have the tower's dtype, so that the engine's thread has nothing to convert."""
        self.dtype = dtype
        self._table = None if self._processor is None else pixel_table(self._processor, self._family, dtype)

    def read(self, images: Iterable[bytes]) -> dict[bytes, DecodedImage | EncodedImage]:
        """Decode and preprocess images, videos and audio; the result is keyed by the digests of their spans.
        Embeddings are taken as they are.

        Raises `RequestError` if a file cannot be decoded, or if its size is out of bounds.
        """
        found: dict[bytes, DecodedImage | EncodedImage] = {}
        for data in images:
            found |= self._read(data)
        return found

    def _read(self, data: bytes) -> Mapping[bytes, DecodedImage | EncodedImage]:
        """Decode one file and preprocess it as its header says."""
        digest = digest_of(data)
        if self.sounds is not None and is_wav(data):
            return {digest: self.sounds.read(data)}
        try:
            header, file = split_header(data)
            family = configured(self._family, header.settings)
            if header.embedded is not None:
                return {digest: self._embedded(file, header.embedded, family)}
            if header.clip is None:
                return _spans_of(digest, self._image(file, family))
            frames = self.clip_of(frames_of(file, header.clip), header.clip, family)
        except (ValueError, *LOAD_ERRORS) as exc:
            raise RequestError("invalid", f"an image or video cannot be read: {_cause(exc)}") from exc
        return dict(zip(span_digests(digest, len(frames)), frames, strict=True))

    def _embedded(self, data: memoryview, stated: Embedded, family: ImageFamily) -> EncodedImage:
        """Return embeddings that a client has computed, in the tower's dtype.

        Raises `UnfitImageError` or `ValueError` if they cannot be those of an image of this model.
        """
        text = family.text_of_rows(stated)
        if self.embedding_layout is None:
            raise ValueError("this model reads no embeddings of images")
        if stated.width != (width := self.embedding_layout.head_dim):
            raise ValueError(f"embeddings of this model have {width} values, not {stated.width}")
        dtype = getattr(torch, stated.dtype)
        if len(data) != stated.num_rows * stated.width * dtype.itemsize:
            raise ValueError("the embeddings do not have the size that their header states")
        # A copy, because torch must not write to the bytes of a message.
        rows = torch.frombuffer(bytearray(data), dtype=dtype).view(stated.num_rows, stated.width).to(self.dtype)
        # After the conversion, which makes large values infinite. They would spread to all tokens behind the image.
        if not bool(rows.isfinite().all()):
            raise ValueError(f"the embeddings contain NaN, or a value that {str(self.dtype)[6:]} does not have")
        return EncodedImage(rows, 0, 0, text)

    def clip_of(self, frames: Iterator[Tensor], clip: Clip, family: ImageFamily) -> list[DecodedImage]:
        """Preprocess the frames of a video, uint8 [3, height, width] each; return one picture for each of its spans.

        Raises `RequestError`, and `UnfitImageError` if the model cannot read such a video.
        """
        text = family.text_of(width=clip.width, height=clip.height, clip=clip)
        assert family.video is not None, "what a video becomes is known"
        if isinstance(family.video, FrameRules):
            return self._pictures(pixels_of(frames, family.video).to(self.dtype), clip, text)
        patches, grid = pixel_values(frames, clip, family.video)
        per_token = (family.video.side // family.video.patch) ** 2
        joined = family.video.side // family.video.patch
        # A video of several spans has one for each group of frames.
        parts = len(text.grids)
        shape = torch.tensor([[grid.frames // parts, grid.rows * joined, grid.columns * joined]])
        one = text if parts == 1 else replace(text, parts=(grid.rows * grid.columns,), grids=text.grids[:1])
        assert len(patches) == grid.frames * grid.rows * grid.columns * per_token, "each token has its patches"
        return [
            DecodedImage({"pixel_values_videos": part, "video_grid_thw": shape}, clip.width, clip.height, one)
            for part in patches.to(self.dtype).chunk(parts)
        ]

    def _pictures(self, pixels: Tensor, clip: Clip, text: MediaText) -> list[DecodedImage]:
        """Return the pictures of a video from the pixels of its frames [frames, 3, height, width]: one for each frame
        that has a span of its own, or one for all."""
        if isinstance(text.parts[0], int):
            return [DecodedImage({"pixel_values_videos": pixels[None]}, clip.width, clip.height, text)]
        one = replace(text, parts=text.parts[1:2], grids=(None,))
        return [DecodedImage({"pixel_values": frame[None]}, clip.width, clip.height, one) for frame in pixels]

    def _image(self, data: memoryview, family: ImageFamily) -> DecodedImage:
        """Decode one image and preprocess it."""
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as opened:
                # Opening reads only the header, so large images are rejected before they are decoded.
                if opened.width * opened.height > MAX_PIXELS:
                    raise ValueError(f"{opened.width} x {opened.height} pixels are more than {MAX_PIXELS}")
                if is_strip(opened.width, opened.height):
                    raise ValueError(f"{opened.width} x {opened.height} pixels are a strip")
                # Cameras store how the picture is turned; the tower must see it upright.
                image = ImageOps.exif_transpose(opened) if opened.format in TURNED_FORMATS else opened
                return self.picture_of(image.convert("RGB"), family)
        except _DECODE_ERRORS as exc:
            raise RequestError("invalid", f"an image cannot be read: {_cause(exc)}") from exc

    def picture_of(self, image: Image.Image, family: ImageFamily | None = None) -> DecodedImage:
        """Preprocess a decoded RGB image, with the settings of `family` or else those of the model."""
        family = family or self._family
        if self._processor is None:
            raise ValueError("this model reads no images")
        if self._table is None:
            found = self._processor(images=image, return_tensors="pt", **family.processor_settings)
        else:
            found = self._table.patches(image, family)
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        inputs = {name: one.to(self.dtype) if one.is_floating_point() else one for name, one in tensors.items()}
        text = None if family is self._family else family.text_of(width=image.width, height=image.height)
        return DecodedImage(inputs, image.width, image.height, text)


def _cause(exc: BaseException) -> str:
    """Return why a file cannot be read, for its client: the first line of the message, or the exception's type."""
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__


def _spans_of(digest: bytes, picture: DecodedImage) -> dict[bytes, DecodedImage]:
    """Return an image by the digest of its span. If crops of it have spans of their own, return each by its digest."""
    text = picture.text
    if text is None or len(text.grids) == 1:
        return {digest: picture}
    one = replace(text, parts=text.parts[1:2], grids=(None,))
    pieces = [picture._replace(inputs={"pixel_values": row[None]}, text=one) for row in picture.inputs["pixel_values"]]
    return dict(zip(span_digests(digest, len(text.grids)), pieces, strict=True))


def _processor_of(folder: Path) -> Any:
    """Load the image processor of the model in a folder. Raises `ModelError` if it cannot be loaded."""
    import transformers  # takes seconds: only models with a tower should pay them

    # Use the processor with Pillow: the other kind uses torchvision and rounds differently. Older versions call it
    # slow.
    kind = {"backend": "pil"} if hasattr(transformers, "CLIPImageProcessorPil") else {"use_fast": False}
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, **kind)
    except LOAD_ERRORS as exc:
        raise ModelError(f"cannot load an image processor from {folder}: {first_line(exc)}") from exc
