"""A chat's images, from URLs in its messages to a prompt that shows them."""

from collections.abc import Sequence

from baton_serve.contracts.vision import VisionProfile
from baton_serve.services.router.protocol.image_limits import ImageLimits, image_error
from baton_serve.services.router.text.multimodal.image_files import ImageFile, load
from baton_serve.services.router.text.multimodal.image_tokens import TokenizedPrompt, media_spans, repeat_image_tokens
from baton_serve.services.router.text.sampling_params import ModelLimits, check_prompt


async def expand_placeholders(
    token_ids: Sequence[int], urls: Sequence[str], profile: VisionProfile | None, image_limits: ImageLimits
) -> list[int]:
    """`token_ids` as long as they are with the images. Raises `BadRequestError`."""
    if profile is None or not urls:
        return list(token_ids)
    least = _expand_to_minimum(token_ids, urls, profile, image_limits)
    if not profile.grid:
        return least
    return repeat_image_tokens(token_ids, _counts(await load(urls, image_limits), profile), profile)


async def expand_image_tokens(
    token_ids: Sequence[int],
    urls: Sequence[str],
    profile: VisionProfile,
    image_limits: ImageLimits,
    limits: ModelLimits,
) -> TokenizedPrompt:
    """What can be refused without a file is refused before one is fetched. Raises `BadRequestError`."""
    check_prompt(_expand_to_minimum(token_ids, urls, profile, image_limits), limits, param="messages")
    files = await load(urls, image_limits)
    counts = _counts(files, profile)
    found = repeat_image_tokens(token_ids, counts, profile)
    images = {file.digest: file.data for file in files}
    return TokenizedPrompt(
        found, media_spans(found, counts, [file.digest for file in files], profile), list(images.values())
    )


def _expand_to_minimum(
    token_ids: Sequence[int], urls: Sequence[str], profile: VisionProfile, image_limits: ImageLimits
) -> list[int]:
    """With as few tokens as images can be."""
    if len(urls) > image_limits.per_prompt:
        raise image_error(f"{len(urls)} images, and at most {image_limits.per_prompt} are read (--limit-mm-per-prompt)")
    return repeat_image_tokens(token_ids, [profile.tokens_per_image] * len(urls), profile)


def _counts(files: Sequence[ImageFile], profile: VisionProfile) -> list[int]:
    return [profile.tokens_of(width=file.width, height=file.height) for file in files]
