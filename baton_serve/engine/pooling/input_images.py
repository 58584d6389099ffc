"""Checks the images of inputs to pooling models, and turns them into arguments of the forward pass."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.pooling import PoolingInput
from baton_serve.contracts.vision import EmbedderImages, embedder_images, num_embeddings
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_reader import HFImageReader
from baton_serve.engine.model.vision.image_types import DecodedImage, Pixels
from baton_serve.engine.model.vision.placeholder_check import check_spans

_TRIED = 64, 48
"""Width and height of the image that is computed at the start, in pixels."""


class InputImages:
    """How a loaded model reads the images of its inputs. `reader` may be used from any thread."""

    def __init__(self, folder: Path, rules: EmbedderImages, dtype: torch.dtype) -> None:
        """Load the image processor of the model in a folder; pixels get the model's `dtype`. Raises `ModelError`."""
        self.rules = rules
        self.reader = HFImageReader(folder, rules.family)
        self.reader.use_dtype(dtype)

    def check(self, given: PoolingInput, pixels: Pixels) -> None:
        """Check that the images of an input were sent (`pixels`, by digest) and are at their places. Raises
        `RequestError` otherwise.
        """
        if not all(isinstance(pixels.get(span.digest), DecodedImage | None) for span in given.media):
            raise RequestError("invalid", "embeddings of images are not accepted in inputs: send the images")
        if self.rules.is_alone and len(given.media) > 1:
            raise RequestError("invalid", f"an input of this model has one image, not {len(given.media)}")
        check_spans(given.media, given.token_ids, self.rules.family, pixels)
        if self.has_own_length(given) and given.media[0].length != len(given.token_ids):
            raise RequestError("invalid", "an image is an input of this model by itself: send no tokens with it")

    def has_own_length(self, given: PoolingInput) -> bool:
        """Return whether an input is an image alone, whose length the limit for texts does not bound."""
        return bool(given.media) and self.rules.is_alone and self.rules.image_text is None

    def arguments(self, inputs: Sequence[PoolingInput], pixels: Sequence[Pixels]) -> dict[str, Tensor]:
        """Return the tensors of the images of inputs that share a pass, in their order and in host memory.

        `pixels` are the images of each input by their digests. An `image_grid_thw` comes with `mm_token_type_ids`
        [num_inputs, tokens], which are 1 at the tokens of images.
        """
        pictures = [known[span.digest] for given, known in zip(inputs, pixels, strict=True) for span in given.media]
        tensors = [picture.inputs for picture in pictures if isinstance(picture, DecodedImage)]
        found = {name: torch.cat([one[name] for one in tensors]) for name in tensors[0]}
        if "image_grid_thw" in found:
            kinds = torch.zeros((len(inputs), max(len(given.token_ids) for given in inputs)), dtype=torch.int64)
            for row, given in enumerate(inputs):
                for span in given.media:
                    kinds[row, span.start : span.end] = 1
            found["mm_token_type_ids"] = kinds
        return found

    def trial(self) -> tuple[PoolingInput, Pixels]:
        """Return an input with one gray image, for the pass at the start."""
        width, height = _TRIED
        family, digest = self.rules.family, bytes(32)
        text = family.text_of(width=width, height=height)
        count = num_embeddings(text.parts)
        span = MediaSpan(0, count, digest, text.grids[0])
        return PoolingInput([family.image_token_id] * count, media=[span]), {
            digest: self.reader.picture_of(Image.new("RGB", _TRIED, (90, 120, 150)))
        }


def read_images(folder: Path, dtype: torch.dtype) -> InputImages | None:
    """Return how the model in a folder reads images; None if it reads none. Raises `ModelError`."""
    rules = embedder_images(ModelFacts.of(folder))
    return None if rules is None else InputImages(folder, rules, dtype)
