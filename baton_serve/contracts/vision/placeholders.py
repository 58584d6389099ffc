"""Puts the parts of images into prompts: first as text, in which a run of image tokens is one, then as tokens."""

from collections.abc import Callable, Sequence
from itertools import repeat

from baton_serve.contracts.vision.family import Parts


def num_embeddings(parts: Parts) -> int:
    """Return how many image tokens `parts`, which stand for one image, contain. The vision tower computes one embedding
    for each."""
    return sum(part for part in parts if isinstance(part, int))


def write_parts(text: str, images: Sequence[Parts], placeholder: str, image_token: str) -> str:
    """Return the text of a prompt in which each image's placeholder is replaced by what stands for the image: its
    texts, and one `image_token` for each run of image tokens.

    Raises `ValueError` if the text does not have one placeholder for each image.
    """
    # The text is split once, so that placeholders within the parts stay: Gemma 3's parts contain its placeholder.
    around = text.split(placeholder)
    _check_count(len(around) - 1, len(images))
    found = [around[0]]
    for parts, after in zip(images, around[1:], strict=True):
        found += [*(image_token if isinstance(part, int) else part for part in parts), after]
    return "".join(found)


def write_parts_as_tokens(
    token_ids: Sequence[int],
    images: Sequence[Parts],
    placeholder_id: int,
    image_token_id: int,
    encode: Callable[[str], list[int]],
) -> list[int]:
    """Return the tokens of a prompt in which each token `placeholder_id` is replaced by what stands for its image.

    This is `write_parts` for a prompt whose text is not known. `encode` tokenizes each text of an image by itself, and
    each run of image tokens is one token, as `expand_runs` takes it. Raises `ValueError` if the prompt does not have
    one placeholder for each image.
    """
    _check_count(token_ids.count(placeholder_id), len(images))
    found: list[int] = []
    rest = iter(images)
    for token_id in token_ids:
        if token_id != placeholder_id:
            found.append(token_id)
            continue
        for part in next(rest):
            found += [image_token_id] if isinstance(part, int) else encode(part)
    return found


def expand_runs(
    token_ids: Sequence[int], images: Sequence[Parts], image_token_id: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Repeat the image tokens of a prompt that `write_parts` has made: each becomes the number of tokens that its run
    has. Return the tokens, and the place of each image among them.

    A place is the position of an image's first image token, and the number of tokens up to and with its last one.
    Raises `ValueError` if the prompt has other image tokens, because a text contains the image token.
    """
    runs = [(number, part) for number, parts in enumerate(images) for part in parts if isinstance(part, int)]
    if (count := token_ids.count(image_token_id)) != len(runs):
        raise ValueError(f"the images need {len(runs)} runs of image tokens, but the prompt has {count}")
    found: list[int] = []
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    following = iter(runs)
    for token_id in token_ids:
        if token_id != image_token_id:
            found.append(token_id)
            continue
        image, length = next(following)
        # An image of several tiles has several runs. Its place reaches from the first to the last one, and includes the
        # texts between them.
        first.setdefault(image, len(found))
        found += repeat(image_token_id, length)
        last[image] = len(found)
    return found, [(first[image], last[image] - first[image]) for image in range(len(images))]


def _check_count(num_placeholders: int, num_images: int) -> None:
    """Raise `ValueError` if the numbers of a prompt's placeholders and images differ."""
    if num_placeholders != num_images:
        raise ValueError(f"there are {num_images} images, but the prompt has {num_placeholders} image tokens")
