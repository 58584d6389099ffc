"""Checks that the images of a request match the placeholder tokens of its prompt, and refuses the request otherwise.
Imports neither Pillow nor transformers.
"""

from collections.abc import Collection, Sequence

from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.messages import Work
from baton_serve.contracts.vision import ImageFamily, UnfitImageError, num_embeddings
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import EncodedImage, Pixels, PromptImages


def check_spans(
    media: Sequence[MediaSpan],
    token_ids: Sequence[int],
    family: ImageFamily,
    pixels: Pixels,
    *,
    num_unsent_tokens: int = 0,
    awaited: Collection[bytes] = (),
) -> None:
    """Check that all images of a prompt behind its first `num_unsent_tokens` tokens were sent (`pixels`, by digest), or
    come later (digests in `awaited`). Check that the placeholder tokens of the sent images are in the prompt's
    `token_ids`.

    Raises `RequestError`: `invalid` if an image is missing, is of a size that the family refuses, or is not at its
    place; `internal` if an encode instance computed another number of embeddings than the prompt has placeholders.
    """
    at = 0
    for span in media:
        picture = pixels.get(span.digest)
        if picture is None and at <= span.start and (span.end <= num_unsent_tokens or span.digest in awaited):
            at = span.end
            continue
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
        is_image = ends == {text.token_id} and tokens.count(text.token_id) == count
        if isinstance(picture, EncodedImage) and len(picture.features) != count:
            raise RequestError("internal", f"an image has {len(picture.features)} embeddings instead of {count}")
        if span.start < at or not is_image or span.grid != text.grids[0]:
            raise RequestError("invalid", "the placeholder tokens of an image are not at its place in the prompt")
        at = span.end


def check_images(work: Work, images: PromptImages | None, pixels: Pixels, awaited: Collection[bytes]) -> None:
    """Raise `RequestError` if an image of a request was not sent with it, or if this instance cannot read images
    (`images` is None). `pixels` are the images that were sent, by digest; those in `awaited` come later.
    """
    if not work.media:
        return
    if images is None:
        raise RequestError(
            "invalid", "this instance has no vision tower or other encoder: it cannot compute prompts with media"
        )
    images.check(work, pixels, awaited)


def give_images(request: Request, images: PromptImages | None, pixels: Pixels, awaited: Collection[bytes] = ()) -> None:
    """Hand the decoded images of a request to `images`, which keeps them for the request's steps; those in `awaited`
    come later. Call it after `check_images`.
    """
    if images is not None and request.work.media:
        images.give(request, pixels, awaited)
