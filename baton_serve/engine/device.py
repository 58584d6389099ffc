"""The only file that names cuda, xpu or cpu: which device there is, and what it can do.

Decided by feature detection, never by version. Native `torch.xpu` comes first; the legacy stack of older Arc installs
(intel-extension-for-pytorch) adds the same names to torch when it is imported.
"""

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_serve.contracts.device import DeviceName
from baton_serve.engine.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_KV_FRACTION = 0.25
CPU_KV_MAX_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    block_tokens: int
    max_num_batched_tokens: int
    max_num_pooled_tokens: int
    """Of a pass without KV cache, padding included."""
    tail_parts: int
    """Groups of layers in which a prompt's last blocks leave: 1 where copies take the time of the computation."""


class DeviceGraph(Protocol):
    def replay(self) -> None: ...

    def pool(self) -> object: ...


class DeviceEvent(Protocol):
    """Of torch; other threads' streams can wait for it."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


def select_device(name: DeviceName, rank: int = 0) -> torch.device:
    """Raises `ConfigError` if the device asked for is not there. `rank`: which of those that the process sees."""
    if name in ("auto", "xpu"):
        _import_legacy_xpu()
    available = [kind for kind in ("xpu", "cuda") if _is_available(kind)] + ["cpu"]
    kind = available[0] if name == "auto" else name
    if kind not in available:
        raise ConfigError(f"device {name!r} is not available here; torch sees: {', '.join(available)}")
    if kind == "cpu":
        return torch.device("cpu")
    count = getattr(torch, kind).device_count()
    if rank >= count:
        raise ConfigError(
            f"rank {rank} has no device: this instance sees {count} of kind {kind}; lower --tensor-parallel-size, or"
            " let it see more"
        )
    device = torch.device(kind, rank)
    _module(device).set_device(device)
    return device


def enter(device: torch.device) -> None:
    """This thread's events and streams are the device's from now on."""
    if device.type != "cpu":
        _module(device).set_device(device)


def defaults(device: torch.device) -> DeviceDefaults:
    if device.type == "cpu":
        return DeviceDefaults(block_tokens=16, max_num_batched_tokens=512, max_num_pooled_tokens=2048, tail_parts=1)
    return DeviceDefaults(
        block_tokens=64,
        max_num_batched_tokens=2048,
        max_num_pooled_tokens=16384,
        tail_parts=8 if has_side_streams(device) else 1,
    )


def select_dtype(device: torch.device, asked: str, model_dtype: torch.dtype | None) -> torch.dtype:
    """`auto` keeps the model's own, save that half precision on CPUs becomes bfloat16, which they multiply natively."""
    if asked != "auto":
        return DTYPES[asked]
    if model_dtype in (torch.float16, torch.bfloat16):
        return torch.bfloat16 if device.type == "cpu" else model_dtype
    if model_dtype == torch.float32 or device.type == "cpu":
        return torch.float32
    return torch.bfloat16


def is_host(device: torch.device) -> bool:
    """The device's memory is the host's: any process can map it."""
    return device.type == "cpu"


def has_side_streams(device: torch.device) -> bool:
    """The device has streams of its own, and events that tell how far one has come."""
    return device.type != "cpu" and all(hasattr(_module(device), name) for name in ("Stream", "Event", "stream"))


def has_graphs(device: torch.device) -> bool:
    return device.type != "cpu" and _graph_type(device) is not None and hasattr(_module(device), "graph")


class Capturing:
    """Records graphs that share their scratch memory: only one of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: object = None
        # Other threads, such as a collective library's watchdog, may ask the device meanwhile.
        can_choose = "capture_error_mode" in inspect.signature(_module(device).graph).parameters
        self._mode = {"capture_error_mode": "thread_local"} if can_choose else {}

    def __call__(self, call: Callable[[], None]) -> DeviceGraph:
        """Records the device's work of `call`, which must have run once; `replay()` does it again on the same
        memory. Raises RuntimeError if something in it cannot be recorded."""
        module, graph_type = _module(self._device), _graph_type(self._device)
        assert graph_type is not None
        graph = graph_type()
        module.synchronize()
        with module.graph(graph, pool=self._pool, **self._mode):
            call()
        module.synchronize()
        self._pool = graph.pool()
        return graph


class HostCopyBuffers:
    """Brings small results to the host while the device goes on. Two may be on their way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int64)] * 2

    def start(self, values: Tensor) -> "HostCopy":
        """int64 [count], as it is once the work given to the device so far is done."""
        if self._device.type == "cpu":
            return HostCopy(values.clone(), None)
        self._buffers.reverse()
        if self._buffers[0].numel() < values.numel():
            self._buffers[0] = staging(self._device, (2 * values.numel(),), torch.int64)
        target = self._buffers[0][: values.numel()]
        target.copy_(values, non_blocking=True)
        done: DeviceEvent = _module(self._device).Event()
        done.record()
        return HostCopy(target, done)


def record(device: torch.device) -> DeviceEvent:
    """Done when the device has done what this thread has given it so far. Not for hosts."""
    event: DeviceEvent = _module(device).Event()
    event.record()
    return event


class SideStream:
    """Work that a device does beside its computation: `with` it, what this thread gives the device belongs here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _module(device).Stream(device=device)
        self._entered: AbstractContextManager[object] | None = None

    def wait(self, event: DeviceEvent) -> None:
        """What is given from now on comes after `event`."""
        self._stream.wait_event(event)

    def record(self) -> DeviceEvent:
        event: DeviceEvent = _module(self._device).Event()
        self._stream.record_event(event)
        return event

    def __enter__(self) -> None:
        self._entered = _module(self._device).stream(self._stream)
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        assert self._entered is not None
        self._entered.__exit__(*error)


def order_after(device: torch.device, event: DeviceEvent) -> None:
    """What this thread gives the device from now on comes after `event`."""
    _module(device).current_stream(device).wait_event(event)


@dataclass(frozen=True, slots=True)
class HostCopy:
    values: Tensor
    done: DeviceEvent | None

    def wait(self) -> list[int]:
        if self.done is not None:
            self.done.synchronize()
        found: list[int] = self.values.tolist()
        return found


def staging(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the host, from where the device copies without the host's help."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type != "cpu")


def pinned_memory(device: torch.device, num_bytes: int) -> Tensor:
    """Host memory, not filled, that the device copies without the host's help. Raises RuntimeError if there is none."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


def collective_backend(device: torch.device) -> str:
    """torch.distributed's, for tensors of this device."""
    return {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo")


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        _module(device).synchronize(device)


def memory(device: torch.device) -> MemoryInfo:
    if device.type != "cpu":
        free, total = _module(device).mem_get_info(device)
        return MemoryInfo(free, total)
    return _host_memory()


def reset_peak(device: torch.device) -> int:
    """Bytes allocated now; `peak_bytes` counts from here."""
    if device.type == "cpu":
        return 0
    _module(device).empty_cache()
    _module(device).reset_peak_memory_stats(device)
    return int(_module(device).memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(_module(device).max_memory_allocated(device))


def kv_cache_bytes(device: torch.device, *, memory_utilization: float, activation_bytes: int) -> int:
    """Return how many bytes the KV cache may take. Call it once the weights are loaded.

    `memory_utilization` is the part of the device's memory that this process may use in all, from 0 to 1.
    """
    if device.type == "cpu":
        return min(CPU_KV_MAX_BYTES, int(memory(device).free_bytes * CPU_KV_FRACTION))
    _module(device).empty_cache()
    now = memory(device)
    usable = int(now.total_bytes * memory_utilization)
    return usable - (now.total_bytes - now.free_bytes) - activation_bytes


def _module(device: torch.device) -> ModuleType:
    module: ModuleType = torch.get_device_module(device)
    return module


def _graph_type(device: torch.device) -> Callable[[], DeviceGraph] | None:
    found: Callable[[], DeviceGraph] | None = getattr(_module(device), f"{device.type.upper()}Graph", None)
    return found


def _is_available(kind: str) -> bool:
    return hasattr(torch, kind) and bool(getattr(torch, kind).is_available())


def _import_legacy_xpu() -> None:
    name = "intel_extension_for_pytorch"
    if not _is_available("xpu") and importlib.util.find_spec(name) is not None:
        importlib.import_module(name)


def _host_memory() -> MemoryInfo:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (value := limit.read_text().strip()) != "max":
        total = min(total, int(value))
        free = min(free, max(0, int(value) - int(used.read_text())))
    return MemoryInfo(free, total)
