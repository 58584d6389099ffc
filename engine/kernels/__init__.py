"""Attention over the block-major KV cache: one port, one backend per device, a plain-torch twin."""

from engine.kernels.metadata import AttentionBackend, AttentionMetadata, AttentionSpec
from engine.kernels.selection import attention_backend

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionSpec", "attention_backend"]
