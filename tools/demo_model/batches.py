"""Build batches of tokens. Each is a function of (seed, index) alone, independent of model and device.

A batch is one flat run of tokens cut into rows of a few lengths. Each row is one conversation, padded at its end.
"""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tools.demo_model.corpus import conversation, encode
from tools.demo_model.tokenization import PAD, Encoder

PADDING = 0  # beside corpus.CONTEXT and corpus.ANSWER


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a batch into rows: (row length, number of rows), in order."""

    segments: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(length * rows for length, rows in self.segments)


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # int16 [num_tokens]
    kinds: Tensor  # uint8 [num_tokens]: PADDING, CONTEXT or ANSWER


def layout_at(progress: float, num_tokens: int) -> Layout:
    """Return the layout at this fraction of the training. Rows are short at first, because the model learns to copy
    from them quickly; later they have up to 2,048 tokens. `num_tokens` must be a power of two."""
    if progress < 0.10:
        shares = {128: 16, 256: 16}
    elif progress < 0.30:
        shares = {128: 8, 256: 8, 512: 8, 1024: 8}
    else:
        shares = {128: 6, 256: 6, 512: 4, 1024: 8, 2048: 8}
    cut = ((length, num_tokens * share // 32 // length) for length, share in shares.items())
    return Layout(tuple((length, rows) for length, rows in cut if rows))


def make_batch(encoder: Encoder, layout: Layout, *, seed: int, index: int) -> Batch:
    """Build the batch with this index."""
    rng = Random(f"{seed}/train/{index}")
    tokens = torch.full((layout.num_tokens,), encoder.ids[PAD], dtype=torch.int16)
    kinds = torch.zeros(layout.num_tokens, dtype=torch.uint8)
    start = 0
    for length, rows in layout.segments:
        for _ in range(rows):
            ids, marks = encode(encoder, conversation(rng, encoder, num_tokens=length))
            tokens[start : start + len(ids)] = torch.tensor(ids, dtype=torch.int16)
            kinds[start : start + len(ids)] = torch.tensor(marks, dtype=torch.uint8)
            start += length
    return Batch(tokens, kinds)
