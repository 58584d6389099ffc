"""Types of images for the engine, and the interface of the vision package. Imports neither Pillow nor transformers."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.messages import Work
from baton_serve.contracts.vision import ImageFamily, UnfitImageError, num_embeddings
from baton_serve.contracts.vision.media_text import MediaText
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.errors import RequestError
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
    def check(self, work: Work, pixels: Pixels) -> None: ...
    def give(self, request: Request, pixels: Pixels) -> None: ...
    def rows(self, plan: ScheduledBatch) -> list[ImageRows]: ...


def check_spans(media: Sequence[MediaSpan], token_ids: Sequence[int], family: ImageFamily, pixels: Pixels) -> None:
    """Check that all images of a prompt were sent (`pixels`, by digest), and that their placeholder tokens are in the
    prompt's `token_ids`. Raises `RequestError` otherwise.
    """
    at = 0
    for span in media:
        picture = pixels.get(span.digest)
        if picture is None:
            raise RequestError("invalid", "an image of the prompt was not sent with the request")
        try:
            text = picture.text or family.text_of(width=picture.width, height=picture.height)
        except UnfitImageError as exc:
            raise RequestError("invalid", str(exc)) from exc
        tokens = token_ids[span.start : span.end]
        ends = {tokens[0], tokens[-1]} if tokens else set()
        # Rows of some families end with other tokens, but the first and the last are the image's.
        count = num_embeddings(text.parts)
        is_image = ends == {text.token_id} and list(tokens).count(text.token_id) == count
        if isinstance(picture, EncodedImage) and len(picture.features) != count:
            raise RequestError("internal", f"an image has {len(picture.features)} embeddings instead of {count}")
        if span.start < at or not is_image or span.grid != text.grids[0]:
            raise RequestError("invalid", "the placeholder tokens of an image are not at its place in the prompt")
        at = span.end


def check_images(work: Work, images: PromptImages | None, pixels: Pixels) -> None:
    """Raise `RequestError` if an image of a request was not sent with it, or if this instance cannot read images
    (`images` is None). `pixels` are the images that were sent, by digest.
    """
    if not work.media:
        return
    if images is None:
        raise RequestError(
            "invalid", "this instance has no vision tower or other encoder: it cannot compute prompts with media"
        )
    images.check(work, pixels)


def give_images(request: Request, images: PromptImages | None, pixels: Pixels) -> None:
    """Hand the decoded images of a request to `images`, which keeps them for the request's steps. Call it after
    `check_images`.
    """
    if images is not None and request.work.media:
        images.give(request, pixels)
