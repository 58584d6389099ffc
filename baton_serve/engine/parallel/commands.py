"""The commands of rank 0 to the other ranks and their answers, each one MessagePack frame. Arrays are sent as bytes.

A rank that fails answers with `CommandFailed`. Otherwise it answers only the commands whose docstrings say so.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.contracts.layout import KVShape
from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.execution.decode_graphs import CONTEXTS, DecodeArrays
from baton_serve.engine.model.batch_inputs import ImageRows, StepArrays


class LoadRank(msgspec.Struct, frozen=True, tag=True):
    """Load this rank's part of the model. The rank answers with `RankLoaded` when it is done."""

    config: EngineConfig
    rank: int
    threads: int
    """Number of CPU threads."""
    num_layers: tuple[int, ...]
    """Number of layers of each stage; () for one stage."""


class ReportMemory(msgspec.Struct, frozen=True, tag=True):
    """Only before `LoadRank`: answer with the free memory in bytes of the device that this rank will use."""

    config: EngineConfig
    rank: int


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Join the other ranks, which find each other by this store (see `World`). The rank answers when it has joined."""

    store: str
    stage_shapes: tuple[tuple[KVShape, ...], ...]
    """By stage: the shape of the KV of each of its layers; () for one stage."""


class BuildCache(msgspec.Struct, frozen=True, tag=True):
    """Create the KV cache, in place of an earlier one. After this message rank 0 sends the file descriptor of the host
    memory that all ranks share. The rank answers.
    """

    num_blocks: int


class MeasureMemory(msgspec.Struct, frozen=True, tag=True):
    """Free the cache of `BuildCache`. The rank answers with the bytes that its KV cache may take, by the peak memory of
    the steps since then.
    """

    work_factor: int
    """Factor for the measured peak memory, to leave room for graphs."""
    extra_bytes: int
    """Memory in bytes that is needed in addition, for sampling."""


class CaptureGraphs(msgspec.Struct, frozen=True, tag=True):
    """Capture graphs. The rank answers with 1 if that succeeded, otherwise with 0."""


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Compute a step; the fields are those of `StepArrays`."""

    tokens: memoryview
    positions: memoryview
    slots: memoryview
    query_starts: memoryview
    context_lens: memoryview
    block_tables: memoryview
    logit_rows: memoryview | None
    pending: memoryview | None
    adapters: list[tuple[str, memoryview | None]] = []
    images: list["ImagePlace"] = []
    """Places of embeddings, which rank 0 broadcasts afterwards, one image after another."""
    seen_ends: memoryview | None = None


class ImagePlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of an image's embeddings in a step, as in `ImageRows`, and their shape."""

    first: int
    count: int
    width: int
    dtype: str
    rows: memoryview | None


class FinishStep(msgspec.Struct, frozen=True, tag=True):
    """Only for the first stage: compute the logits of the oldest step that is not finished, which has `count` rows."""

    count: int


class Replay(msgspec.Struct, frozen=True, tag=True):
    """Compute a decode step from a captured graph; the fields are those of `DecodeArrays`."""

    inputs: memoryview
    changes: memoryview | None
    adapters: list[str] = []


class GatherLogits(msgspec.Struct, frozen=True, tag=True):
    """Gather `count` rows of logits of the step that was replayed last."""

    count: int


class SetSampledTokens(msgspec.Struct, frozen=True, tag=True):
    """Receive `count` sampled tokens of the step that was replayed last; rank 0 broadcasts them."""

    count: int


class StoreLastTokens(msgspec.Struct, frozen=True, tag=True):
    """Receive the last token of each of these slots; rank 0 broadcasts them."""

    slots: memoryview


class KeepAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read the weights of a LoRA adapter and keep this rank's part of them, until `DropAdapter`."""

    name: str
    folder: str
    fingerprint: str


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free the weights of a LoRA adapter."""

    fingerprint: str


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks within this rank's KV cache."""

    sources: list[int]
    targets: list[int]


class ToHost(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's part of these blocks to the shared memory. The rank answers when it is there."""

    blocks: list[int]


class FromHost(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's part of these blocks from the shared memory. The rank answers when it has read it."""

    blocks: list[int]


Command = (
    LoadRank
    | ReportMemory
    | JoinGroup
    | BuildCache
    | MeasureMemory
    | CaptureGraphs
    | Compute
    | FinishStep
    | Replay
    | GatherLogits
    | SetSampledTokens
    | StoreLastTokens
    | KeepAdapter
    | DropAdapter
    | CopyBlocks
    | ToHost
    | FromHost
)


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """A command has been executed; `value` is its result."""

    value: int = 0


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to `LoadRank`: the shape of the KV of each of the rank's layers."""

    kv_shapes: tuple[KVShape, ...]


class CommandFailed(msgspec.Struct, frozen=True, tag=True):
    """Executing a command raised an error. Rank 0 raises an error of the same kind."""

    kind: Literal["config", "model", "unsupported", "capacity", "other"]
    message: str


CommandAnswer = CommandDone | RankLoaded | CommandFailed


def compute_command(arrays: StepArrays) -> Compute:
    """Convert the input arrays of a step to the command for the other ranks."""
    return Compute(
        tokens=_bytes(arrays.tokens),
        positions=_bytes(arrays.positions),
        slots=_bytes(arrays.slots),
        query_starts=_bytes(arrays.query_starts),
        context_lens=_bytes(arrays.context_lens),
        block_tables=_bytes(arrays.block_tables),
        logit_rows=None if arrays.logit_rows is None else _bytes(arrays.logit_rows),
        pending=None if arrays.pending is None else _bytes(arrays.pending),
        adapters=[(one, None if rows is None else _bytes(rows)) for one, rows in arrays.adapters],
        images=[_image_place(image) for image in arrays.images],
        seen_ends=None if arrays.seen_ends is None else _bytes(arrays.seen_ends),
    )


def step_arrays(command: Compute, images: Sequence[ImageRows] = ()) -> StepArrays:
    """Convert a command back to the input arrays of its step. `images` have the embeddings of its images."""
    context_lens = _int32(command.context_lens)
    return StepArrays(
        tokens=_int64(command.tokens),
        positions=_int64(command.positions),
        slots=_int64(command.slots),
        query_starts=_int32(command.query_starts),
        context_lens=context_lens,
        # One row per sequence, so the width follows from the length.
        block_tables=_int32(command.block_tables).reshape(len(context_lens), -1),
        logit_rows=None if command.logit_rows is None else _int64(command.logit_rows),
        pending=None if command.pending is None else _int64(command.pending).reshape(2, -1),
        adapters=[(one, None if rows is None else _int64(rows)) for one, rows in command.adapters],
        images=images,
        seen_ends=None if command.seen_ends is None else _int32(command.seen_ends),
    )


def _image_place(image: ImageRows) -> ImagePlace:
    """Return the place and the shape of an image's embeddings."""
    count, width = image.features.shape
    rows = None if image.rows is None else _bytes(image.rows.cpu().numpy())
    return ImagePlace(image.first, count, width, str(image.features.dtype).removeprefix("torch."), rows)


def image_rows(place: ImagePlace, device: torch.device, receive: Callable[[Tensor], None]) -> ImageRows:
    """Return the embeddings of an image with their place in the step. `receive` fills them with those of rank 0."""
    features = torch.empty((place.count, place.width), dtype=devices.DTYPES[place.dtype], device=device)
    receive(features)
    rows = None if place.rows is None else torch.from_numpy(_int64(place.rows)).to(device)
    return ImageRows(place.first, features, rows)


def replay_command(arrays: DecodeArrays) -> Replay:
    """Convert the input arrays of a decode step to the command for the other ranks."""
    changes = None if arrays.changes is None else _bytes(arrays.changes)
    return Replay(inputs=_bytes(arrays.inputs), changes=changes, adapters=list(arrays.adapters))


def decode_arrays(command: Replay) -> DecodeArrays:
    """Convert a command back to the input arrays of its decode step."""
    changes = None if command.changes is None else _int64(command.changes).reshape(2, -1)
    return DecodeArrays(_int64(command.inputs).reshape(CONTEXTS, -1), changes, command.adapters)


def store_last_tokens_command(slots: NDArray[np.int64]) -> StoreLastTokens:
    """Return the command by which the other ranks store the last tokens of `slots`."""
    return StoreLastTokens(_bytes(slots))


def kept_slots(command: StoreLastTokens) -> NDArray[np.int64]:
    """Return the slots that a `StoreLastTokens` command names."""
    return _int64(command.slots)


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _int64(data: memoryview) -> NDArray[np.int64]:
    return np.frombuffer(data, dtype=np.int64).copy()  # a copy, because torch wants writable memory


def _int32(data: memoryview) -> NDArray[np.int32]:
    return np.frombuffer(data, dtype=np.int32).copy()
