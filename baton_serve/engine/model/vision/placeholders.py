"""What the engine is given of images, and what it needs of who reads them. Imports neither Pillow nor transformers."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from baton_serve.contracts.messages import Work
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.batch_inputs import ImageRows


class DecodedImage(NamedTuple):
    """Of `width` and `height` as it was sent. `pixels` are what the tower sees of it: [channels, height, width], with
    the number of tiles before that where it is cut into several; float32, in host memory."""

    pixels: Tensor
    width: int
    height: int


Pixels = Mapping[bytes, DecodedImage]
"""Of images, by digest."""
NO_PIXELS: Pixels = MappingProxyType({})


class ImageReader(Protocol):
    def read(self, images: Iterable[bytes]) -> Pixels:
        """Of files. Raises `RequestError` for one that is no image."""
        ...


class PromptImages(Protocol):
    """`engine.model.vision.prompt.PromptImages`."""

    @property
    def reader(self) -> ImageReader: ...
    def check(self, work: Work, pixels: Pixels) -> None: ...
    def give(self, request: Request, pixels: Pixels) -> None: ...
    def rows(self, plan: ScheduledBatch) -> list[ImageRows]: ...


def check_images(work: Work, images: PromptImages | None, pixels: Pixels) -> None:
    """Raises `RequestError`."""
    if not work.media:
        return
    if images is None:
        raise RequestError("invalid", "prompts with images are not read here: this instance has no vision tower")
    images.check(work, pixels)


def give_images(request: Request, images: PromptImages | None, pixels: Pixels) -> None:
    """Those that `check_images` has found right."""
    if images is not None and request.work.media:
        images.give(request, pixels)
