"""Chooses the device, the dtype of weights, default block size and batch, and the memory for the KV cache
(`--gpu-memory-utilization`). This is the only file that names cuda, xpu or cpu.

Features are detected by looking for the function that is needed, never by comparing versions. Native `torch.xpu` comes
first. On older Arc installs, importing intel-extension-for-pytorch adds the same names to torch.
"""

import ctypes
import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_serve.contracts.flag_choices import DeviceName
from baton_serve.engine.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_KV_FRACTION = 0.25
"""Fraction of the free host memory that a KV cache in it takes by default."""
CPU_KV_MAX_BYTES = 4 << 30
"""Largest KV cache in host memory by default, in bytes. The host has other users, unlike a GPU."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total memory of a device, in bytes. For the CPU: those of this container, or else of the machine."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Default values of the engine settings for which each kind of device (CPU, cuda, xpu) has its own."""

    block_tokens: int
    max_num_batched_tokens: int
    max_num_pooled_tokens: int
    """Largest number of tokens in one pass of a pooling model, with padding."""
    tail_parts: int
    """Number of layer groups in which the last blocks of a prompt are reported. 1 on hosts: copies there take the time
    of the cores that compute.
    """


class DeviceGraph(Protocol):
    """The methods that captured graphs of torch.cuda and of torch.xpu have in common."""

    def replay(self) -> None: ...

    def pool(self) -> object: ...


class DeviceEvent(Protocol):
    """The methods that events of torch.cuda and of torch.xpu have in common. Streams of any thread can wait for an
    event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


def select_device(name: DeviceName, rank: int = 0) -> torch.device:
    """Return the device for the setting `name` and make it current in this thread. `rank` is its index among the
    devices that this process sees.

    `auto` takes xpu, then cuda, then the CPU. Raises `ConfigError` if the device does not exist.
    """
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
    """Make `device` current in this thread: events and streams that the thread creates belong to it."""
    if device.type != "cpu":
        _module(device).set_device(device)


def defaults(device: torch.device) -> DeviceDefaults:
    """Return the default values of engine settings for this kind of device."""
    if device.type == "cpu":
        return DeviceDefaults(block_tokens=16, max_num_batched_tokens=512, max_num_pooled_tokens=2048, tail_parts=1)
    return DeviceDefaults(
        block_tokens=64,
        max_num_batched_tokens=2048,
        max_num_pooled_tokens=16384,
        tail_parts=8 if has_side_streams(device) else 1,
    )


def select_dtype(device: torch.device, asked: str, model_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of weights and activations. `asked` is the setting `dtype`; "auto" keeps `model_dtype`, which
    config.json states (None: bfloat16, on CPUs float32).

    On CPUs "auto" turns float16 into bfloat16, which they multiply natively.
    """
    if asked != "auto":
        return DTYPES[asked]
    if model_dtype in (torch.float16, torch.bfloat16):
        return torch.bfloat16 if device.type == "cpu" else model_dtype
    if model_dtype == torch.float32 or device.type == "cpu":
        return torch.float32
    return torch.bfloat16


def is_host(device: torch.device) -> bool:
    """Return whether the device is the CPU. Its memory is then the host's, which other processes can map."""
    return device.type == "cpu"


def weights_device(device: torch.device, offload_gib: float) -> torch.device:
    """Return where the weights of a model for `device` are loaded to: the CPU if `offload_gib` GiB of them shall stay
    in host memory, since they may not fit on the device together."""
    return torch.device("cpu") if offload_gib else device


def device_name(device: torch.device) -> str:
    """Return the name of the device's model, such as `Intel(R) Arc(TM) B580 Graphics`; empty for the CPU."""
    return "" if device.type == "cpu" else str(_module(device).get_device_name(device))


def driver_version(device: torch.device) -> str:
    """Return the versions of the device's driver and of the libraries that torch was built for; for the CPU, its
    instruction sets."""
    if device.type == "cpu":
        return str(torch.backends.cpu.get_cpu_capability())
    properties = _module(device).get_device_properties(device)
    stated = str(getattr(properties, "driver_version", ""))
    # torch does not show the version of NVIDIA's driver, but the kernel module does.
    module = Path("/proc/driver/nvidia/version")
    if not stated and module.is_file():
        stated = module.read_text().split("\n", 1)[0]
    return f"{stated} {torch.version.cuda}"


def has_side_streams(device: torch.device) -> bool:
    """Return whether the device can have several streams, and events to order their work; False for the CPU."""
    return device.type != "cpu" and all(hasattr(_module(device), name) for name in ("Stream", "Event", "stream"))


def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped products of this dtype read nothing back from a device, as captured graphs need.
    Elsewhere torch computes them group by group, with their sizes on the host.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def has_graphs(device: torch.device) -> bool:
    """Return whether the device can capture work in a graph and replay it, as CUDA graphs do."""
    return device.type != "cpu" and _graph_type(device) is not None and hasattr(_module(device), "graph")


class Capturing:
    """Captures work of one device in graphs. All its graphs share their scratch memory, so only one of them may run at
    a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: object = None
        # By default, calls of any other thread to the device make a capture fail, for example those of the watchdog of
        # a collective library. In the mode "thread_local", only this thread's calls count.
        can_choose = "capture_error_mode" in inspect.signature(_module(device).graph).parameters
        self._mode = {"capture_error_mode": "thread_local"} if can_choose else {}

    def __call__(self, call: Callable[[], None]) -> DeviceGraph:
        """Run `call` and capture in a graph the work that it queues on the device. `call` must have run once before.

        The graph's `replay` repeats this work on the same memory. Raises `RuntimeError` if something in `call` cannot
        be captured.
        """
        module, graph_type = _module(self._device), _graph_type(self._device)
        assert graph_type is not None
        graph = graph_type()
        module.synchronize()
        try:
            # Such a graph replays nothing (https://github.com/vllm-project/vllm/issues/48946).
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*Graph is empty")
                with module.graph(graph, pool=self._pool, **self._mode):
                    call()
        except Warning as exc:
            raise RuntimeError(str(exc)) from exc
        module.synchronize()
        # The next graph may use the same scratch memory, since graphs run one after the other.
        self._pool = graph.pool()
        return graph


class HostCopyBuffers:
    """Pinned host memory to which small results are copied while the device continues to compute. Two copies may run at
    the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int64)] * 2

    def start(self, values: Tensor) -> "HostCopy":
        """Start to copy `values`, int64 [count], to the host, after all work that is queued on the device so far. The
        returned copy is waited for with `HostCopy.wait`."""
        if self._device.type == "cpu":
            return HostCopy(values.clone(), None)  # the caller may overwrite `values` before it reads the copy
        # A step may start its copy before the previous one is read, so two buffers are used alternately.
        self._buffers.reverse()
        if self._buffers[0].numel() < values.numel():
            self._buffers[0] = staging(self._device, (2 * values.numel(),), torch.int64)
        target = self._buffers[0][: values.numel()]
        target.copy_(values, non_blocking=True)
        done: DeviceEvent = _module(self._device).Event()
        done.record()
        return HostCopy(target, done)


def record(device: torch.device) -> DeviceEvent:
    """Return a new event that is reached when the device has finished all work that this thread has queued so far. Do
    not call it for the CPU."""
    event: DeviceEvent = _module(device).Event()
    event.record()
    return event


class SideStream:
    """A second stream of a device, for copies that run beside the computation. Work that a thread queues inside `with`
    goes to this stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _module(device).Stream(device=device)
        self._entered: AbstractContextManager[object] | None = None

    def wait(self, event: DeviceEvent) -> None:
        """Make all work that is queued on this stream from now on wait for `event`."""
        self._stream.wait_event(event)

    def record(self) -> DeviceEvent:
        """Return a new event that is reached when the device has finished all work that is queued on this stream so
        far."""
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
    """Make all work that this thread queues on the device from now on wait for `event`. The host does not wait."""
    _module(device).current_stream(device).wait_event(event)


def distinct(events: Iterable[DeviceEvent | None]) -> list[DeviceEvent]:
    """Return each event once, in order, and leave out None."""
    return list({id(event): event for event in events if event is not None}.values())


RunBeside = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs work beside what is queued next, and returns a function that makes the main queue wait for it."""


def beside(device: torch.device) -> RunBeside | None:
    """Return a function `run(work)` that queues `work` on a second stream. It returns a function `join()`, which makes
    the main stream wait for that work. None if the device has only one stream. Graphs can capture both."""
    if not has_side_streams(device):
        return None
    side = SideStream(device)

    def run(work: Callable[[], None]) -> Callable[[], None]:
        side.wait(record(device))
        with side:
            work()
        done, kept = side.record(), [work]

        def join() -> None:
            order_after(device, done)
            # Until now `work` was kept with its memory: the allocator gives memory away in the main stream's order.
            kept.clear()

        return join

    return run


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy from the device to the host that may still be running. `done` is the event at its end; None: it is
    complete."""

    values: Tensor
    done: DeviceEvent | None

    def wait(self) -> list[int]:
        """Wait until the copy is complete, and return the copied numbers."""
        if self.done is not None:
            self.done.synchronize()
        found: list[int] = self.values.tolist()
        return found


def staging(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return new pinned host memory, filled with zeros, from which the device can copy while the host continues. The
    CPU gets ordinary memory."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type != "cpu")


def pinned_memory(device: torch.device, num_bytes: int) -> Tensor:
    """Return new pinned host memory of this size, with undefined content. Raises `RuntimeError` if the system does not
    grant it."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from host memory to the device, without waiting for work that is queued on it. The caller may
    change or free `values` at once."""
    if is_host(device):
        return values.to(device)
    # From ordinary memory the copy would wait. torch keeps the pinned copy until the device has read it.
    return values.pin_memory().to(device, non_blocking=True)


def collective_backend(device: torch.device) -> str:
    """Return the name of torch.distributed's backend for tensors of this device, such as "nccl"."""
    return {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was queued on it."""
    if device.type != "cpu":
        _module(device).synchronize(device)


def memory(device: torch.device) -> MemoryInfo:
    """Return the device's free and total memory in bytes."""
    if device.type != "cpu":
        free, total = _module(device).mem_get_info(device)
        return MemoryInfo(free, total)
    return _host_memory()


def reset_peak(device: torch.device) -> int:
    """Return the bytes that torch has allocated on the device now. Later calls of `peak_bytes` measure from now on."""
    if device.type == "cpu":
        return 0
    _module(device).empty_cache()
    _module(device).reset_peak_memory_stats(device)
    return int(_module(device).memory_allocated(device))


def release_unused(device: torch.device) -> None:
    """Give memory that torch or the C library has freed but keeps for reuse back to the device and to the system."""
    if device.type != "cpu":
        _module(device).empty_cache()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def peak_bytes(device: torch.device) -> int:
    """Return the largest number of bytes that torch has had allocated on the device since `reset_peak`; 0 on the CPU,
    where torch does not count them."""
    return 0 if device.type == "cpu" else int(_module(device).max_memory_allocated(device))


def kv_cache_bytes(device: torch.device, *, memory_utilization: float, activation_bytes: int) -> int:
    """Return how many bytes the KV cache may take. Call it when the weights are in memory.

    `memory_utilization` is the part of the device's memory that this process may use in all, from 0 to 1.
    `activation_bytes` is what the largest step needs in addition to the weights.
    """
    if device.type == "cpu":
        return min(CPU_KV_MAX_BYTES, int(memory(device).free_bytes * CPU_KV_FRACTION))
    # Memory that torch keeps for reuse would count as used.
    _module(device).empty_cache()
    now = memory(device)
    usable = int(now.total_bytes * memory_utilization)
    # Subtract all used memory, not only this process's: other processes on the device may not shrink.
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
    # MemAvailable also counts the page cache, which the kernel frees on demand; SC_AVPHYS_PAGES does not.
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    # In a container the limit of its cgroup (v2) counts, not the machine's memory.
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (value := limit.read_text().strip()) != "max":
        total = min(total, int(value))
        free = min(free, max(0, int(value) - int(used.read_text())))
    return MemoryInfo(free, total)


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch's operations on the CPU use one thread inside `with`.

    Loading runs thousands of short operations. On a busy machine each of them would wait for the slowest of its
    threads, which turns one second into half a minute.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
