"""Measure loading of a checkpoint onto the device, against a plain read of its files with as many threads, both from
the page cache.

`baton-bench load [MODEL] [--shape llama-3.1-8b --layers 8 --folder DIR] [--device auto] [--json]`

Without MODEL, a random checkpoint of `--shape` is written to `--folder` first, in files of a few GB. Both are measured
alternately, `--repeats` times; the best counts. `--ranks N` also measures what each of N ranks reads, one after
another. Host memory is the most that loading adds to this process beside the mapped files (anonymous and pinned
pages). `--peer` measures transformers' `from_pretrained`, with the model moved to the device.
"""

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton_serve.bench.micro.engine_shapes import SHAPES, write_shape
from baton_serve.bench.report import Row, show
from baton_serve.engine import EngineConfig, device
from baton_serve.engine.collectives.shard import UNSHARDED, Shard
from baton_serve.engine.loading.loader_choice import load as load_model
from baton_serve.engine.loading.weight_files import INDEX, MAX_THREADS, PIECE_BYTES

FILE_BYTES = 4 << 30
"""Size at which a new file of the checkpoint is begun."""
PEER = "transformers from_pretrained"


def write_checkpoint(shape: str, layers: int | None, folder: Path, target: torch.device) -> Path:
    """Write a checkpoint with random bfloat16 weights, with fewer layers if `layers` is given. Return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM  # slow import, only needed here

    write_shape(shape, folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if layers is not None:
        config.num_hidden_layers = layers
        config.save_pretrained(folder)
    with torch.device(target):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = dict(model.state_dict())
    if config.tie_word_embeddings:
        # Tied weights are one tensor; safetensors refuses to store shared memory twice.
        found.pop("lm_head.weight", None)
    part: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    number = 1
    for name, tensor in found.items():
        part[name] = tensor.cpu()
        index[name] = f"model-{number:05d}.safetensors"
        if sum(t.nbytes for t in part.values()) >= FILE_BYTES or name == list(found)[-1]:
            save_file(part, folder / index[name], metadata={"format": "pt"})
            part = {}
            number += 1
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def plain_read(folder: Path) -> int:
    """Read all weight files once, into buffers that are reused. Return the number of bytes."""
    paths = sorted(folder.glob("*.safetensors"))
    places = [(path, start) for path in paths for start in range(0, path.stat().st_size, PIECE_BYTES)]
    own = threading.local()

    def read(place: tuple[Path, int]) -> int:
        if not hasattr(own, "buffer"):
            own.buffer = bytearray(PIECE_BYTES)
        path, start = place
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            return file.readinto(own.buffer) or 0

    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return sum(pool.map(read, places))


class PeakMemory:
    """Context manager: the largest growth of this process's anonymous and shared pages, in bytes. Mapped files are not
    counted."""

    def __enter__(self) -> "PeakMemory":
        self._end = threading.Event()
        self._before = _own_bytes()
        self.peak = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.01):
            self.peak = max(self.peak, _own_bytes() - self._before)


def _own_bytes() -> int:
    kinds = ("RssAnon:", "RssShmem:")
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))


def timed(call: Callable[[], object], target: torch.device) -> float:
    """Return the seconds of a call, until the device has finished."""
    gc.collect()
    started = time.perf_counter()
    made = call()
    device.synchronize(target)
    elapsed = time.perf_counter() - started
    del made
    return elapsed


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the rows of all cases."""
    target = device.select_device(options.device)
    config = EngineConfig(model=str(folder), device=options.device, dtype="bfloat16")
    size = plain_read(folder)

    def load(shard: Shard = UNSHARDED) -> object:
        sharded = EngineConfig(
            model=str(folder), device=options.device, dtype="bfloat16", tensor_parallel_size=shard.size
        )
        return load_model(sharded if not shard.is_whole else config, target, lambda what, fraction: None, shard)

    load()  # warm up: libraries are loaded and initialized
    reads, loads = [], []
    with PeakMemory() as memory:
        for _ in range(options.repeats):
            reads.append(timed(lambda: plain_read(folder), target))
            loads.append(timed(load, target))
    limit = size / min(reads) / 1e9
    value = size / min(loads) / 1e9
    yield Row("load", "plain read of the files", limit, "GB/s")
    yield Row("load", f"weights of {size / 1e9:.2f} GB onto {target.type}", value, "GB/s", limit, value / limit)
    yield Row("load", "time", min(loads), "s", min(reads), min(reads) / min(loads))
    yield Row("load", "host memory at most", memory.peak / 1e6, "MB")
    for rank in range(options.ranks if options.ranks > 1 else 0):
        shard = Shard(rank, options.ranks)
        seconds = min(timed(lambda shard=shard: load(shard), target) for _ in range(options.repeats))  # type: ignore[misc]
        yield Row("load", f"rank {rank} of {options.ranks}: time", seconds, "s", min(loads), min(loads) / seconds)
    if options.peer:
        from transformers import AutoModelForCausalLM

        def peer() -> object:
            made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
            return made.to(target)

        seconds = min(timed(peer, target) for _ in range(options.repeats))
        yield Row("load", PEER, size / seconds / 1e9, "GB/s", limit, size / seconds / 1e9 / limit)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench load", description=__doc__)
    made.add_argument("model", nargs="?", type=Path, help="folder of a model (default: random weights of --shape)")
    made.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="shape of the random checkpoint")
    made.add_argument("--layers", type=int, help="number of layers (default: those of the shape)")
    made.add_argument(
        "--folder", type=Path, help="folder for the random checkpoint (default: a temporary one, removed at the end)"
    )
    made.add_argument("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto", help="device to load onto")
    made.add_argument("--repeats", type=int, default=3, help="repetitions of each case")
    made.add_argument(
        "--ranks", type=int, default=1, help="also load as each rank of a model split over this number of devices"
    )
    made.add_argument("--peer", action="store_true", help="also measure transformers' from_pretrained")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    folder, is_ours = options.model, False
    if folder is None:
        is_ours = options.folder is None
        folder = Path(tempfile.mkdtemp(prefix="baton-load-")) if is_ours else options.folder
        started = time.perf_counter()
        write_checkpoint(options.shape, options.layers, folder, device.select_device(options.device))
        sys.stderr.write(f"a checkpoint was written in {time.perf_counter() - started:.1f} s\n")
    try:
        show(measure(options, folder), as_json=options.json)
    finally:
        if is_ours:
            shutil.rmtree(folder, ignore_errors=True)
