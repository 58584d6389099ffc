"""Types of decoded and encoded images, and the interfaces of reading and encoding them. Imports neither Pillow nor
transformers.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.messages import Work
from baton_serve.contracts.vision.media_text import MediaText
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.model.batch_inputs import ImageRows


class DecodedImage(NamedTuple):
    """A preprocessed image or video. `width` and `height` are those of the file.

    `inputs` are what the model's image processor returns, by its names, in host memory: `pixel_values` in the tower's
    dtype or float32, and for some families sizes, masks or numbers of tiles.
    """

    inputs: Mapping[str, Tensor]
    width: int
    height: int
    text: MediaText | None = None
    """The texts and tokens that stand for the image in a prompt; for one group of frames, if each group of a video has
    a span of its own. None: they follow from the size alone."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensors."""
        return sum(value.nbytes for value in self.inputs.values())


class EncodedImage(NamedTuple):
    """An image that an encode instance or a client has encoded. `width` and `height` are those of the file.

    `features` are its embeddings [number of tokens, width of a row] in host memory.
    """

    features: Tensor
    width: int
    height: int
    text: MediaText | None = None
    """The texts and tokens that stand for embeddings of a client in a prompt. None: they follow from the size alone."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the embeddings."""
        return self.features.nbytes


Pixels = Mapping[bytes, DecodedImage | EncodedImage]
"""Images of a prompt, by digest."""
NO_PIXELS: Pixels = MappingProxyType({})
"""The pixels of prompts without images."""


class ImageReader(Protocol):
    """Decodes image files (or audio files) and preprocesses them for the vision tower (or audio encoder)."""

    @property
    def embedding_layout(self) -> KVLayout | None:
        """Return the layout of blocks in which embeddings of images can be fetched; None if none can."""
        ...

    def read(self, images: Iterable[bytes]) -> Pixels:
        """Decode and preprocess files; the result is keyed by the digest of the file. Embeddings stay as they are.
        Raises `RequestError` for a file that cannot be decoded.
        """
        ...


class PromptImages(Protocol):
    """Keeps the images of requests for the steps that compute them. It is the part of
    `engine.model.vision.prompt_images.VisionPromptImages` that the engine uses.
    """

    @property
    def reader(self) -> ImageReader: ...
    @property
    def are_whole(self) -> bool: ...
    @property
    def can_follow(self) -> bool: ...
    def check(self, work: Work, pixels: Pixels, awaited: Collection[bytes]) -> None: ...
    def give(self, request: Request, pixels: Pixels, awaited: Collection[bytes]) -> None: ...
    def supply(self, request: Request, pixels: Pixels) -> None: ...
    def rows(self, plan: ScheduledBatch) -> list[ImageRows]: ...
