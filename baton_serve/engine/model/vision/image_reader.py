"""Decodes image files and preprocesses them with the model's own processor. Callable from any thread."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.media import FORMATS, TURNED_FORMATS, digest_of, is_strip
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.engine.model.vision.placeholders import DecodedImage
from baton_serve.engine.model_folder import LOAD_ERRORS, first_line

MAX_PIXELS = 1 << 27
"""Largest image in pixels, before it is resized.

The router has a lower limit; this one is for callers without a router.
"""
_DECODE_ERRORS = (*LOAD_ERRORS, SyntaxError, MemoryError, UnidentifiedImageError, Image.DecompressionBombError)


class HFImageReader:
    """Implements `ImageReader` with Pillow and the model's image processor of transformers."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Load the image processor of the model in a folder. `settings` are passed to each call of it. Raises
        `ModelError`.
        """
        self._processor = _processor_of(folder)
        self._settings = settings
        self.embedding_layout: KVLayout | None = None
        """The layout of blocks with embeddings of these images; the tower sets it, which knows their width."""

    def read(self, images: Iterable[bytes]) -> dict[bytes, DecodedImage]:
        """Decode image files and preprocess them for the vision tower; the result is keyed by the digest of the file.

        Raises `RequestError` if Pillow cannot decode a file, or if the image is too large or too narrow.
        """
        return {digest_of(image): self._read(image) for image in images}

    def _read(self, data: bytes) -> DecodedImage:
        """Decode one image file, turn it upright and preprocess it. Raises `RequestError` if that fails."""
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as opened:
                # Opening reads only the header, so large images are rejected before they are decoded.
                if opened.width * opened.height > MAX_PIXELS:
                    raise ValueError(f"{opened.width} x {opened.height} pixels are more than {MAX_PIXELS}")
                if is_strip(opened.width, opened.height):
                    raise ValueError(f"{opened.width} x {opened.height} pixels are a strip")
                # Cameras store how the picture is turned; the tower must see it upright.
                image = ImageOps.exif_transpose(opened) if opened.format in TURNED_FORMATS else opened
                return self.picture_of(image.convert("RGB"))
        except _DECODE_ERRORS as exc:
            raise RequestError("invalid", f"an image cannot be read: {first_line(exc)}") from exc

    def picture_of(self, image: Image.Image) -> DecodedImage:
        """Preprocess a decoded RGB image for the vision tower."""
        found = self._processor(images=image, return_tensors="pt", **self._settings)
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        inputs = {name: one.to(torch.float32) if one.is_floating_point() else one for name, one in tensors.items()}
        return DecodedImage(inputs, image.width, image.height)


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
