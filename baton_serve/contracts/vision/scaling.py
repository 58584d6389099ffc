"""Computes the size to which images and frames are scaled, for models that give each its own grid of tokens."""

from math import ceil, floor, sqrt


def scaled_grid(
    width: int,
    height: int,
    side: int,
    limits: tuple[int, int],
    *,
    frames: tuple[int, int] = (1, 1),
    enlarges_first: bool = False,
) -> tuple[int, int]:
    """Return the rows and columns of tokens of `side` pixels for a size in pixels. Same as transformers'
    `smart_resize`.

    `limits` are the fewest and the most pixels. `frames` is the number of frames whose pixels count together, exact and
    as it is rounded for the comparison. With `enlarges_first`, sizes below one token are enlarged before anything else.
    """
    low, high = limits
    exact, rounded = frames
    if enlarges_first and (height < side or width < side):
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    # Python rounds halves to even numbers, and so does transformers: rounding halves up would give other grids.
    rows, columns = round(height / side), round(width / side)
    pixels = rounded * rows * columns * side * side
    if pixels > high:
        # The factors follow from the real sides and not from the rounded ones. `floor` and `ceil` keep the result
        # within the limits.
        factor = sqrt((exact * height * width) / high)
        return max(1, floor(height / factor / side)), max(1, floor(width / factor / side))
    if pixels < low:
        factor = sqrt(low / (exact * height * width))
        return ceil(height * factor / side), ceil(width * factor / side)
    return rows, columns
