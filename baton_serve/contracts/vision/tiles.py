"""Decides into which tiles InternVL and similar models cut an image."""

from functools import lru_cache

import msgspec

from baton_serve.contracts.vision.model_files import ModelFacts


class TileRules(msgspec.Struct, frozen=True):
    """How an image processor cuts an image into tiles of `height` x `width` pixels, at most `max_tiles`. With `cuts`
    False an image is one tile."""

    height: int
    width: int
    min_tiles: int = 1
    max_tiles: int = 12
    cuts: bool = True

    def count(self, *, width: int, height: int) -> int:
        """Return how many tiles an image of this size in pixels becomes, including its overview if it has several
        tiles."""
        if not self.cuts or self.max_tiles <= 1:
            return 1
        columns, rows = closest_grid(self, width, height)
        return columns * rows + (columns * rows > 1)


class _TileSize(msgspec.Struct, frozen=True):
    height: int = 384
    width: int = 384


class _Settings(msgspec.Struct, frozen=True):
    size: _TileSize = _TileSize()
    crop_to_patches: bool | None = None
    min_patches: int = 1
    max_patches: int = 12


def tile_rules(facts: ModelFacts, *, cuts: bool | None = None) -> TileRules:
    """Return how the image processor in `facts`, the files of a model, cuts images. `cuts` says whether it cuts them at
    all, as the processor of the whole model sets it; None: its own setting counts."""
    known = msgspec.convert(facts.images, _Settings)
    return TileRules(
        height=known.size.height,
        width=known.size.width,
        min_tiles=known.min_patches,
        max_tiles=known.max_patches,
        cuts=cuts if cuts is not None else bool(known.crop_to_patches),
    )


@lru_cache(maxsize=1024)
def closest_grid(rules: TileRules, width: int, height: int) -> tuple[int, int]:
    """Return the columns and rows of tiles into which an image of this size in pixels is cut: the arrangement whose
    ratio of sides is closest to the image's.

    Among equally close ones, the one with more tiles is taken if its tiles have less than twice as many pixels as the
    image. Same as transformers' `get_optimal_tiled_canvas`.
    """
    best, best_difference = (1, 1), float("inf")
    for grid in _grids(rules.min_tiles, rules.max_tiles):
        columns, rows = grid
        difference = abs(width / height - columns / rows)
        # The floats are compared exactly, as transformers does: a tolerance would choose other arrangements.
        is_as_close = difference == best_difference
        if difference < best_difference or (
            is_as_close and width * height > 0.5 * rules.height * rules.width * columns * rows
        ):
            best, best_difference = grid, difference
    return best


@lru_cache(maxsize=64)
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return all arrangements of `least` to `most` tiles, each as its number of columns and of rows; arrangements with
    fewer tiles come first."""
    sizes = range(1, most + 1)
    found = [(columns, rows) for columns in sizes for rows in sizes if least <= columns * rows <= most]
    # Sorting is stable: of equally many tiles, fewer columns come first. The choice between equally close arrangements
    # depends on this order.
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))
