"""Sums of small tensors in one kernel that reads the other ranks' memory, where torch's symmetric memory works.

A collective library takes two to three times as long for the few kilobytes of a decode step. Feature-detected: where
torch has no such operator for the device, or the ranks cannot map each other's memory, there is no `OneShotAllReduce`.
"""

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

BUFFER_BYTES = 4 << 20
"""Of the shared buffer. Larger sums are limited by the link, which a collective library uses better."""
ALIGNMENT_BYTES = 16
ALL_REDUCE_DTYPES = (torch.bfloat16, torch.float32)


class OneShotAllReduce:
    def __init__(self, group_name: str, device: torch.device) -> None:
        """Raises RuntimeError."""
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self._buffer: Tensor = memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        memory.rendezvous(self._buffer, group_name)
        self._name = group_name
        self._sum: Any = torch.ops.symm_mem.one_shot_all_reduce_copy

    @classmethod
    def make(cls, group: Any, device: torch.device) -> "OneShotAllReduce | None":
        """All ranks get one, or none does."""
        made: OneShotAllReduce | None = None
        try:
            made = cls(group.group_name, device)
            made.all_reduce(torch.ones(1024, dtype=torch.bfloat16, device=device))
        except (ImportError, AttributeError, RuntimeError, NotImplementedError, ValueError) as error:
            logger.warning("small sums over ranks go through the collective library: %s", str(error).splitlines()[0])
            made = None
        agreed = torch.tensor([1.0 if made is not None else 0.0], device=device)
        distributed: Any = importlib.import_module("torch.distributed")
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN)
        return made if agreed.item() else None

    def fits(self, values: Tensor) -> bool:
        size = values.numel() * values.element_size()
        return (
            size <= BUFFER_BYTES
            and size % ALIGNMENT_BYTES == 0
            and values.dtype in ALL_REDUCE_DTYPES
            and values.is_contiguous()
        )

    def all_reduce(self, values: Tensor) -> Tensor:
        buffer = self._buffer[: values.numel() * values.element_size()].view(values.dtype).view_as(values)
        summed: Tensor = self._sum(buffer, values, "sum", self._name)
        return summed
