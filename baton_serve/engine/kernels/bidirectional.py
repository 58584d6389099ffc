"""Computes attention in sliding-window layers for prompts whose tokens all see each other (PaliGemma 2).

transformers lets the tokens of such a prompt see each other beyond the window, and those of the answer do not.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_serve.engine.kernels.interfaces import AttentionBackend, AttentionMetadata, AttentionSpec, NewHeads


@dataclass(frozen=True, slots=True)
class BidirectionalPrompts:
    """Implements `AttentionBackend` by another one that ignores `AttentionMetadata.unwindowed`. Steps with such rows
    attend twice in layers with a window: such prompts are longer than a window of thousands of tokens, which few are.
    """

    backend: AttentionBackend

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        self.backend.store(key, value, cache, meta)

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        if meta.unwindowed is None or spec.sliding_window is None:
            return self.backend.attend(query, cache, meta, spec)
        whole = self.backend.attend(query, cache, meta, replace(spec, sliding_window=None))
        windowed = self.backend.attend(query, cache, meta, spec)
        return torch.where(meta.unwindowed[:, None, None], whole, windowed)

    def attend_new(self, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor | None:
        return None if meta.unwindowed is not None else self.backend.attend_new(new, cache, meta, spec)
