"""Puts the tokens of images and videos in the place of a prompt's placeholders; how many, its family decides."""

import re
from collections.abc import Callable, Sequence
from itertools import repeat

from baton_serve.contracts.media import MediaSpan, span_digests
from baton_serve.contracts.vision.media_text import MediaText

Place = tuple[int, int]
"""The position of a span's first image token, and the number of tokens up to and with its last one."""


def write_parts(text: str, media: Sequence[MediaText], token: Callable[[int], str]) -> str:
    """Return the text of a prompt with the parts of each image or video in the place of its placeholder.

    `token` returns the text of a token. Raises `ValueError` if the text does not have one placeholder for each, in
    order.
    """
    patterns = {_pattern(one, token): None for one in media}
    # The text is split once, so that placeholders within the parts stay: Gemma 3's parts contain its placeholder.
    around = re.split(f"({'|'.join(patterns)})", text) if patterns else [text]
    _check_count(len(around) // 2, len(media))
    found = [around[0]]
    for one, placeholder, after in zip(media, around[1::2], around[2::2], strict=True):
        if not re.fullmatch(_pattern(one, token), placeholder):
            raise ValueError("the placeholders are not in the order of the images and videos")
        found += [*(token(one.token_id) if isinstance(part, int) else part for part in one.parts), after]
    return "".join(found)


def _pattern(one: MediaText, token: Callable[[int], str]) -> str:
    """Return the regular expression of a placeholder, with what is replaced around it."""
    placeholder = token(one.placeholder) if isinstance(one.placeholder, int) else one.placeholder
    before, behind = map(re.escape, one.around)
    alone = re.escape(placeholder)
    return f"{before}{alone}{behind}|{alone}" if before or behind else alone


def write_parts_as_tokens(
    token_ids: Sequence[int], media: Sequence[MediaText], encode: Callable[[str], list[int]]
) -> list[int]:
    """Return the tokens of a prompt with the parts of each image or video in the place of its placeholder.

    This is `write_parts` for a prompt whose text is not known. `encode` tokenizes each text of an image by itself, and
    each run of image tokens is one token, as `expand_runs` takes it. Raises `ValueError` if the prompt does not have
    one placeholder for each image or video, in order.
    """
    wanted = [_token_forms(one, encode) for one in media]
    every = [form for forms in wanted for form in forms]
    firsts = {form[0] for form in every}
    found: list[int] = []
    number = at = 0
    while at < len(token_ids):
        # Only at the first token of some placeholder the longer comparison is made.
        forms = (wanted[number] if number < len(media) else every) if token_ids[at] in firsts else []
        form = next((form for form in forms if list(token_ids[at : at + len(form)]) == form), None)
        if form is None:
            found.append(token_ids[at])
            at += 1
            continue
        if number == len(media):
            _check_count(number + 1, number)
        for part in media[number].parts:
            found += [media[number].token_id] if isinstance(part, int) else encode(part)
        number, at = number + 1, at + len(form)
    _check_count(number, len(media))
    return found


def _token_forms(one: MediaText, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the tokens that may stand for an image or video, with what is replaced around them first."""
    alone = [one.placeholder] if isinstance(one.placeholder, int) else encode(one.placeholder)
    around = [encode(text) if text else [] for text in one.around]
    return [form for form in ([*around[0], *alone, *around[1]], alone) if form]


def expand_runs(token_ids: Sequence[int], media: Sequence[MediaText]) -> tuple[list[int], list[list[Place]]]:
    """Repeat the image tokens of a prompt whose images are written, and return it with the places of each image.

    Raises `ValueError` if the tokens are not those of the images: a text contains an image token.
    """
    runs = [(number, part) for number, one in enumerate(media) for part in one.parts if isinstance(part, int)]
    marks = {one.token_id for one in media}
    if (count := sum(token_id in marks for token_id in token_ids)) != len(runs):
        raise ValueError(f"the images need {len(runs)} runs of image tokens, but the prompt has {count}")
    found: list[int] = []
    places: list[list[Place]] = [[] for _ in media]
    following = iter(runs)
    for token_id in token_ids:
        if token_id not in marks:
            found.append(token_id)
            continue
        number, length = next(following)
        if token_id != media[number].token_id:
            raise ValueError("the image tokens are not in the order of the images and videos")
        places[number].append((len(found), length))
        found += repeat(token_id, length)
    return found, [_joined(runs) if len(one.grids) == 1 else runs for one, runs in zip(media, places, strict=True)]


def _joined(runs: list[Place]) -> list[Place]:
    """Return one place from the first run to the last one. It includes the texts between them."""
    start = runs[0][0]
    return [(start, sum(runs[-1]) - start)]


def media_spans(
    places: Sequence[Sequence[Place]], media: Sequence[MediaText], digests: Sequence[bytes]
) -> list[MediaSpan]:
    """Return the spans of a prompt's images and videos, from the places that `expand_runs` has returned."""
    return [
        MediaSpan(*place, name, grid)
        for where, one, digest in zip(places, media, digests, strict=True)
        for place, name, grid in zip(where, span_digests(digest, len(one.grids)), one.grids, strict=True)
    ]


def _check_count(num_placeholders: int, num_images: int) -> None:
    """Raise `ValueError` if the numbers of a prompt's placeholders and images differ."""
    if num_placeholders != num_images:
        raise ValueError(f"there are {num_images} images, but the prompt has {num_placeholders} image tokens")
