"""Files of images to what a vision tower takes, by the model's own processor. Called from any thread."""

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from baton_serve.contracts.media import FORMATS, TURNED_FORMATS, digest_of, is_strip
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.engine.model.vision.placeholders import DecodedImage, Pixels
from baton_serve.engine.model_folder import LOAD_ERRORS, first_line

MAX_PIXELS = 1 << 27
"""Of an image before it is resized. The router's own limit is lower; this one is against what did not come from it."""
_DECODE_ERRORS = (*LOAD_ERRORS, SyntaxError, MemoryError, UnidentifiedImageError, Image.DecompressionBombError)


class HFImageReader:
    def __init__(self, folder: Path) -> None:
        """Raises `ModelError`."""
        self._processor = _processor_of(folder)

    def read(self, images: Iterable[bytes]) -> Pixels:
        """Raises `RequestError` for a file that is no image."""
        return {digest_of(image): self._read(image) for image in images}

    def _read(self, data: bytes) -> DecodedImage:
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise ValueError(f"{opened.width} x {opened.height} pixels are more than {MAX_PIXELS}")
                if is_strip(opened.width, opened.height):
                    raise ValueError(f"{opened.width} x {opened.height} pixels are a strip")
                image = ImageOps.exif_transpose(opened) if opened.format in TURNED_FORMATS else opened
                return self.picture_of(image.convert("RGB"))
        except _DECODE_ERRORS as exc:
            raise RequestError("invalid", f"an image cannot be read: {first_line(exc)}") from exc

    def picture_of(self, image: Image.Image) -> DecodedImage:
        pixels: Tensor = self._processor(images=image, return_tensors="pt")["pixel_values"][0]
        return DecodedImage(pixels.to(torch.float32), image.width, image.height)


def _processor_of(folder: Path) -> Any:
    import transformers  # seconds that only models with a tower should cost

    # With Pillow: the other kind is torchvision's, and rounds otherwise. Older versions call it slow.
    kind = {"backend": "pil"} if hasattr(transformers, "CLIPImageProcessorPil") else {"use_fast": False}
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, **kind)
    except LOAD_ERRORS as exc:
        raise ModelError(f"{folder} has no image processor that can be used: {first_line(exc)}") from exc
