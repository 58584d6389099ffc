"""Chooses the kernels for a device and dtype, by name; the plain-torch twin where nothing faster works."""

import importlib
import importlib.util
import logging

import torch

from engine.kernels.metadata import AttentionBackend
from engine.kernels.reference import ReferenceAttention

logger = logging.getLogger(__name__)


def attention_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Call once per engine: it may compile, and it warns when it has to fall back on the twin."""
    if device.type == "cpu":
        return ReferenceAttention()
    if importlib.util.find_spec("triton") is None:
        logger.warning("Triton is not installed: attention on %s runs in plain torch, slowly", device.type)
        return ReferenceAttention()
    backend: AttentionBackend = importlib.import_module("engine.kernels.triton_attention").TritonAttention()
    return backend
