"""Copies tensors from safetensors files into parameters on any device.

Files are mapped, so only the slices that are used are read. Several threads copy pieces: directly into host parameters,
or to a device through a few pinned buffers, which are all the host memory that loading needs. The format is described
at https://github.com/huggingface/safetensors#format (the library checks a file's header before it is read here).
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from baton_serve.contracts.flag_choices import LoadFormat
from baton_serve.contracts.loader_options import SHARD_PATTERN
from baton_serve.engine import device as devices
from baton_serve.engine.loading.sharded_state import joined_tensors
from baton_serve.engine.model.vision.text_part import decoder_tensors
from baton_serve.engine.model_folder import is_pickled, weight_files

INDEX = "model.safetensors.index.json"
"""Lists the files of a checkpoint that is divided into several."""
PIECE_BYTES = 16 << 20
"""Size of one copy in bytes; threads share large tensors."""
MAX_THREADS = 8
"""Largest number of threads that copy by default."""
BUFFERS_PER_THREAD = 2
"""Pinned buffers of each thread: one is filled while the device copies from the other."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """One copy of a weight: from `source`, a view of a mapped file, to `target`, which has the same shape."""

    target: Tensor
    source: Tensor


def map_tensors(folder: Path, load_format: LoadFormat = "auto", pattern: str = SHARD_PATTERN) -> dict[str, Tensor]:
    """Return all weights in a folder, by name, as views of the mapped files; of a model with a vision tower, only those
    of its decoder.

    `pattern` is how the files of the format sharded_state are named. The files stay mapped as long as one of the views
    exists. Raises one of `LOAD_ERRORS` if a file or the index cannot be read.
    """
    if load_format == "sharded_state":
        return joined_tensors(folder, pattern, _map_file)
    paths = weight_files(folder, load_format)
    if is_pickled(paths):
        return decoder_tensors({name: tensor for path in paths for name, tensor in _map_pickle(path).items()})
    # The index names the files that belong to the model; the folder may have others, such as an adapter.
    index = folder / INDEX
    if index.is_file():
        paths = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    found: dict[str, Tensor] = {}
    for path in paths:
        found |= _map_file(path)
    return decoder_tensors(found)


def tensor_copies(module: nn.Module, stored: dict[str, Tensor]) -> dict[str, TensorCopy] | None:
    """Return the copies from the stored weights that fill all parameters and persistent buffers of `module`, by name.

    Return None if the names or shapes of the stored weights are not those of the module: then transformers has to
    convert them.
    """
    if getattr(module, "_keep_in_fp32_modules", None) or getattr(module, "_keep_in_fp32_modules_strict", None):
        return None  # parts of the model need another dtype, which transformers knows
    wanted: dict[str, Tensor] = module.state_dict()
    # Tied parameters share memory and are stored once, under any of their names.
    first_at: dict[int, str] = {}
    for name, tensor in wanted.items():
        first_at.setdefault(tensor.data_ptr(), name)
    tied = {name for name, tensor in wanted.items() if first_at[tensor.data_ptr()] != name}
    # Old checkpoints contain rotary frequencies, which are computed here.
    unknown = {name for name in set(stored) - set(wanted) if not name.endswith("rotary_emb.inv_freq")}
    if set(wanted) - tied - set(stored) or unknown:
        return None
    if any(wanted[name].shape != stored[name].shape for name in set(wanted) - tied):
        return None
    # transformers does not tie what the file has twice with other values, whatever the config says (Qwen2.5-Omni).
    if any(not _are_equal(stored[name], stored[first_at[wanted[name].data_ptr()]]) for name in tied & set(stored)):
        return None
    return {name: TensorCopy(wanted[name], stored[name]) for name in stored if name in wanted and name not in tied}


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def fill(
    pieces: list[TensorCopy],
    device: torch.device,
    progress: Callable[[float], None],
    num_threads: int | None = None,
) -> None:
    """Execute the copies `pieces` with several threads, and wait until the device has finished them. Target and source
    may differ in dtype. `progress` is called with the finished fraction, from 0 to 1; `num_threads` None: by the number
    of CPUs.

    If a copy fails, for example because torch gets no memory, its error is raised after the running copies have ended.
    """
    small = [cut for piece in pieces for cut in _cut(piece)]
    total = sum(piece.source.nbytes for piece in small)
    if not total:
        return
    done, buffers = 0, _Buffers(device)
    # The device must be made current in each thread.
    count = num_threads or min(MAX_THREADS, _num_processors())
    with ThreadPoolExecutor(count, initializer=devices.enter, initargs=(device,)) as pool:
        running = {pool.submit(buffers.copy, piece): piece.source.nbytes for piece in small}
        try:
            for future in as_completed(running):
                future.result()
                done += running[future]
                progress(done / total)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, drop the copies that have not begun
    devices.synchronize(device)


class _Buffers:
    """Copies weights from mapped files to the device through pinned memory, of which each thread has its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = local()

    @torch.inference_mode()
    def copy(self, piece: TensorCopy) -> None:
        """Copy one piece of a weight. Raises the errors of torch, for example if no memory can be allocated."""
        target, source = piece.target, piece.source
        if devices.is_host(self._device):
            # numpy copies without Python's lock; torch converts dtypes.
            if target.dtype == source.dtype:
                np.copyto(_array(target), _array(source))
            else:
                target.copy_(source)
            return
        buffer = self._next(source.nbytes)
        staged = buffer.memory[: source.nbytes].view(source.dtype).view(source.shape)
        # The source is a mapped file: this is where the bytes are read from disk.
        np.copyto(_array(staged), _array(source))
        target.copy_(staged, non_blocking=True)
        # The copy may still be reading the buffer when this function returns.
        buffer.busy = devices.record(self._device)

    def _next(self, size: int) -> "_Buffer":
        """Return a piece of pinned memory of this thread with at least `size` bytes: the one that was used longest ago,
        after the device has finished with it."""
        if not hasattr(self._own, "ring"):
            self._own.ring = [_Buffer(torch.empty(0, dtype=torch.uint8)) for _ in range(BUFFERS_PER_THREAD)]
        ring: list[_Buffer] = self._own.ring
        ring.reverse()
        buffer = ring[0]
        if buffer.busy is not None:
            buffer.busy.synchronize()
        # Allocated at first use: pinning memory is slow, and small models need few buffers.
        if buffer.memory.numel() < size:
            buffer.memory = devices.staging(self._device, (max(size, PIECE_BYTES),), torch.uint8)
        return buffer


@dataclass(slots=True)
class _Buffer:
    """A piece of pinned memory; `busy` is the event at the end of the last copy from it to the device."""

    memory: Tensor
    busy: devices.DeviceEvent | None = None


def _cut(piece: TensorCopy) -> Iterator[TensorCopy]:
    """Cut the copy of a weight into several copies of about `PIECE_BYTES` bytes each, so that threads can share the
    work."""
    target, source = piece.target, piece.source
    if target.shape != source.shape:
        raise ValueError(f"a weight of shape {list(source.shape)} is stored for one of {list(target.shape)}")
    # Contiguous tensors are cut anywhere, others between rows.
    if source.is_contiguous() and target.is_contiguous():
        target, source = target.view(-1), source.reshape(-1)
    row_bytes = max(1, source[:1].nbytes)
    count = max(1, PIECE_BYTES // row_bytes)
    # Small pieces divide the work evenly between threads.
    for start in range(0, len(source), count):
        yield TensorCopy(target[start : start + count], source[start : start + count])


def _map_pickle(path: Path) -> dict[str, Tensor]:
    """Map a file in PyTorch's own format, and return views of its tensors by name. No code in the file is run.

    Raises `pickle.UnpicklingError` for a file with objects other than tensors, and `ValueError` if it has no tensors.
    """
    # The format before PyTorch 1.6 cannot be mapped.
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} has no tensors by name")
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _map_file(path: Path) -> dict[str, Tensor]:
    """Map a safetensors file, and return views of its tensors by name."""
    with ExitStack() as stack:
        stack.enter_context(safe_open(path, framework="pt"))  # raises an error for a broken file
        file = stack.enter_context(path.open("rb"))
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        # copy-on-write, since torch warns about read-only memory
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(mapping, dtype=torch.uint8)[8 + length :]
    found: dict[str, Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        dtype, raw = DTYPES[entry["dtype"]], data[start:end]
        aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()  # torch needs aligned memory
        found[name] = aligned.view(dtype).view(entry["shape"])
    return found


def _array(tensor: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """Return a view of a tensor in host memory as a numpy array of integers of the same size.

    numpy has no bfloat16. Its copies release Python's lock, so that other threads run.
    """
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = tensor.detach().view(_SAME_SIZE[tensor.itemsize]).numpy()
    return array


def _num_processors() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
