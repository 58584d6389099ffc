"""A chat's images, from URLs in its messages to a prompt that shows them."""

from collections.abc import Sequence

from contracts.vision import VisionProfile
from services.router.images.files import load
from services.router.images.limits import ImageLimits, refused
from services.router.images.places import Prompt, expanded, spans_of
from services.router.parameters import Limits, check_prompt


def placed(
    token_ids: Sequence[int], urls: Sequence[str], profile: VisionProfile | None, image_limits: ImageLimits
) -> list[int]:
    """`token_ids` as long as they are with the images, none of which is looked at. Raises `BadRequestError`."""
    if profile is None or not urls:
        return list(token_ids)
    if len(urls) > image_limits.per_prompt:
        raise refused(f"{len(urls)} images, and at most {image_limits.per_prompt} are read (--limit-mm-per-prompt)")
    return expanded(token_ids, len(urls), profile)


async def shown(
    token_ids: Sequence[int], urls: Sequence[str], profile: VisionProfile, image_limits: ImageLimits, limits: Limits
) -> Prompt:
    """What can be refused without a file is refused before one is fetched. Raises `BadRequestError`."""
    found = placed(token_ids, urls, profile, image_limits)
    check_prompt(found, limits, param="messages")
    files = await load(urls, image_limits)
    images = {file.digest: file.data for file in files}
    return Prompt(found, spans_of(found, [file.digest for file in files], profile), list(images.values()))
