"""Allocates the few MB of blocks that a probe sends, on a host or a device."""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from baton_serve.kvtransfer.block_memory import BlockMemory, HostMemory
from baton_serve.kvtransfer.probing.plan import BLOCK_BYTES, NUM_BLOCKS

KNOWN_EXTENSIONS = ("intel_extension_for_pytorch",)
"""Modules that make a device known to torch when they are imported. A plan can name no other module."""


class ProbeMemory(BlockMemory, Protocol):
    """Memory for the few blocks of a probe, whose whole content can be written and read back."""

    def write(self, content: NDArray[np.uint8]) -> None:
        """Overwrite all blocks with `content`, uint8 [NUM_BLOCKS, BLOCK_BYTES]."""
        ...

    def content(self) -> NDArray[np.uint8]:
        """Return the bytes of all blocks, uint8 [NUM_BLOCKS, BLOCK_BYTES]."""
        ...


def memory_on(device: str, preload: Sequence[str]) -> ProbeMemory:
    """Return new memory for the blocks of a probe on `device`, or in host memory if `device` is empty. The modules
    `preload` are imported before, if they are known to add a device to torch.
    """
    if not device:
        return HostProbeMemory()
    for module in preload:
        if module in KNOWN_EXTENSIONS:
            importlib.import_module(module)
    return DeviceProbeMemory(device)


def content_of(seed: int) -> NDArray[np.uint8]:
    """Return the bytes that a probe sends, pseudo-random bytes made from `seed`: uint8 [NUM_BLOCKS, BLOCK_BYTES].
    Memory can hardly contain them by chance.
    """
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


class HostProbeMemory(HostMemory):
    """Memory for the blocks of a probe in host memory, which other processes of this host can map."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_BYTES)

    def write(self, content: NDArray[np.uint8]) -> None:
        np.copyto(self._array(), content)

    def content(self) -> NDArray[np.uint8]:
        return self._array()

    def _array(self) -> NDArray[np.uint8]:
        assert self.host_view is not None
        return np.frombuffer(self.host_view, dtype=np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)


class DeviceProbeMemory:
    """Memory for the blocks of a probe on a device. `write` waits until the device has finished, so the blocks may be
    read at any time.
    """

    num_blocks = NUM_BLOCKS
    block_bytes = BLOCK_BYTES
    shared_fd = None
    host_view = None

    def __init__(self, device: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = self._torch.device(device)
        self.device_tensor: Any = self._torch.zeros(
            (NUM_BLOCKS, BLOCK_BYTES), dtype=self._torch.uint8, device=self._device
        )
        self._wait()

    def ready_after(self, blocks: Iterable[int]) -> Sequence[Any]:
        return ()

    def write(self, content: NDArray[np.uint8]) -> None:
        self.device_tensor.copy_(self._torch.from_numpy(content))
        self._wait()

    def content(self) -> NDArray[np.uint8]:
        array: NDArray[np.uint8] = self.device_tensor.to("cpu").numpy()
        return array

    def _wait(self) -> None:
        if self._device.type != "cpu":
            self._torch.get_device_module(self._device).synchronize(self._device)
