"""Defines the commands of rank 0 to the other ranks and their answers, each one MessagePack frame. Arrays are sent as
bytes.

A rank that fails answers with `CommandFailed`. Otherwise it answers only the commands whose docstrings say so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.execution.decode_graphs import CONTEXTS, DecodeArrays
from baton_serve.engine.kv.state_memory import StatePiece
from baton_serve.engine.model.batch_inputs import ImageRows, SourceRows, StepArrays, WindowArrays
from baton_serve.engine.model.loaded_model import StageCache


class LoadRank(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: load your part of the model. The rank answers with `RankLoaded` when it has loaded it."""

    config: EngineConfig
    rank: int
    threads: int
    """Number of CPU threads."""
    num_layers: tuple[int, ...]
    """Number of layers of each stage; () for one stage."""
    kind: Literal["generate", "embed", "classify"] = "generate"
    """The kind of the model: it generates text, or computes vectors."""


class ReportMemory(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank, before `LoadRank` only: answer with the free bytes of the device that this rank will use."""

    config: EngineConfig
    rank: int


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: connect with the other ranks, which find each other at `store` (see `World`). The rank answers
    when it is connected.
    """

    store: str
    stages: tuple[StageCache, ...]
    """The cache of each stage; () for one stage."""


class BuildCache(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: create a KV cache of `num_blocks` blocks, in place of an earlier one, and the recurrent states
    of `num_slots` batch slots, with `num_spare_rows` spare rows. Rank 0 then sends the file descriptor of the host
    memory that all ranks of its host share for KV blocks. The rank answers when the cache exists; one on another host
    answers with `PartBuilt`.
    """

    num_blocks: int
    num_slots: int
    """The number of rank 0, since ranks with other amounts of free memory would choose other ones."""
    num_spare_rows: int


class MeasureMemory(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: free the KV cache of `BuildCache`. The rank answers with the bytes that its final KV cache may
    take, which follow from the peak memory of the steps since `BuildCache`.
    """

    work_factor: int
    """Factor for the measured peak memory, to leave room for graphs."""
    extra_bytes: int
    """Memory in bytes that is needed in addition, for sampling."""


class CaptureGraphs(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: capture CUDA graphs of steps. The rank answers with 1 if that succeeded, otherwise with 0."""


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: compute a step. The fields are those of `StepArrays`, as raw bytes."""

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
    unwindowed: memoryview | None = None
    batch_slots: memoryview = memoryview(b"")
    inner: memoryview | None = None
    windows: "WindowPlaces | None" = None
    source_tables: memoryview | None = None
    source_tokens: int = 0
    sources: list["SourcePlace"] = []
    """Shapes of encoder outputs, which rank 0 broadcasts behind the images, each after its positions in the cache."""


class WindowPlaces(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of cache groups with a sliding window; the fields are those of `WindowArrays`."""

    tables: memoryview
    slots: memoryview
    layer_groups: list[int]


class ImagePlace(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens of a step get an image's embeddings (`first`, `rows` as in `ImageRows`), and the shape [count,
    width] and dtype of these embeddings, which are sent separately.
    """

    first: int
    count: int
    width: int
    dtype: str
    rows: memoryview | None


class SourcePlace(msgspec.Struct, frozen=True, array_like=True):
    """The shape [count, width] and dtype of encoder outputs (`SourceRows.states`), which are sent separately."""

    count: int
    width: int
    dtype: str


class FinishStep(msgspec.Struct, frozen=True, tag=True):
    """Command to ranks of the first pipeline stage: compute the logits of the oldest step that is not finished yet.
    `count` is their number of rows. Without `has_logits` they are not needed, and the rows are only received.
    """

    count: int
    has_logits: bool = True


class Replay(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: compute a decode step by replaying a captured graph. The fields are those of `DecodeArrays`,
    as raw bytes.
    """

    inputs: memoryview
    changes: memoryview | None
    adapters: list[str] = []
    sources: memoryview | None = None


class GatherLogits(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: take part in gathering the first `count` rows of logits of the last replayed decode step."""

    count: int


class SetSampledTokens(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: receive the `count` sampled tokens of the last replayed decode step, which rank 0 broadcasts,
    as the input of the next step.
    """

    count: int


class StoreLastTokens(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: receive the last token of each of these batch slots (rows of running sequences), which rank 0
    broadcasts, and keep it on the device as the input of a later step. `slots` is int64 as raw bytes.
    """

    slots: memoryview


class KeepAdapter(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: read the weights of a LoRA adapter from `folder`, and keep this rank's part of them until
    `DropAdapter`. `fingerprint` is the hash that the files must have.
    """

    name: str
    folder: str
    fingerprint: str


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: free the weights of the LoRA adapter with this fingerprint."""

    fingerprint: str


class ImageTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the images of a pooling model's inputs, which is sent separately: the model's argument that it is,
    its shape and dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class ComputeVectors(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank of a pooling model: compute a batch of inputs. The first fields are int64 as raw bytes: the
    padded inputs, one row for each, the inputs' numbers of tokens, and the token types, padded as the inputs.
    """

    token_ids: memoryview
    lengths: memoryview
    token_types: memoryview | None
    images: tuple[ImageTensor, ...] = ()
    """The tensors of images, which rank 0 broadcasts afterwards, one after another."""


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: copy block `sources[i]` of its KV cache to block `targets[i]`, for each i."""

    sources: list[int]
    targets: list[int]


class ChangeStates(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: execute an operation on recurrent states; the fields are those of `StateCopy`. The rank
    answers when it has saved or restored its part of a checkpoint. A rank on another host restores it from `data`, and
    answers with `StateBytes` when it saves.
    """

    kind: Literal["clear", "save", "restore", "copy"]
    slot: int
    blocks: tuple[int, ...]
    source: int
    data: memoryview | None = None


class ToHost(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: copy its part of these KV blocks from the device to the host memory that all ranks share. The
    rank answers when the copy is complete; one on another host answers with `PartBytes` instead.
    """

    blocks: list[int]
    steps_after: int | None = None
    """Number of steps that were sent after the one that has computed the blocks, for which the copy does not wait.
    None: it waits for all work before it."""


class FromHost(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: copy its part of these KV blocks from the host memory that all ranks share to the device, or
    from `data` if the rank is on another host. The rank answers when it does not read the host memory any more.
    """

    blocks: list[int]
    data: memoryview | None = None


class BuildHostTier(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: allocate `num_slots` slots of host memory, each for its part of a KV block. The rank answers
    when they exist.
    """

    num_slots: int


class CopyTierBlocks(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: start copies of its part of each block `blocks[i]` to slot `slots[i]` of the host tier, or
    back.
    """

    blocks: list[int]
    slots: list[int]
    is_to_host: bool
    steps_after: int
    """Number of steps that were sent after the last one that uses the blocks, for which the copies do not wait."""


class AwaitTierCopies(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: let later commands wait on the device until the running copies of these blocks between device
    and host tier have ended.
    """

    blocks: list[int]


class CheckSlots(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: compare these slots of the host tier with their checksums. The rank answers with
    `SlotsChecked`.
    """

    slots: list[int]


class ConnectPart(msgspec.Struct, frozen=True, tag=True):
    """Command to a rank: take the socket that follows as a file descriptor, through which rank 0 will order transfers
    of this rank's part of the KV cache. The rank answers with 1, or with 0 if it has no such transfers.
    """


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
    | ComputeVectors
    | CopyBlocks
    | ChangeStates
    | ToHost
    | FromHost
    | BuildHostTier
    | CopyTierBlocks
    | AwaitTierCopies
    | CheckSlots
    | ConnectPart
)


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank: a command has been executed. `value` is its result, 0 for a command without one."""

    value: int = 0


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank to `LoadRank`: what the layers of its stage keep, and the fingerprint of the weights that it has
    read.
    """

    cached: StageCache
    fingerprint: str


class PartBuilt(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank on another host to `BuildCache`: the layers of each block that the rank holds, and its heads of
    each of them, as first and end; None: all.
    """

    layers: tuple[int, int] | None
    heads: tuple[tuple[int, int], ...] | None
    states: list[StatePiece]
    """Its part of checkpoints of recurrent states."""


class PartBytes(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank on another host to `ToHost`: its part of these blocks, one after another."""

    blocks: list[int]
    data: memoryview


class StateBytes(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank on another host to `ChangeStates` that saves a checkpoint to these blocks: its row of states."""

    blocks: tuple[int, ...]
    data: memoryview


class SlotsChecked(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank to `CheckSlots`: the slots whose bytes do not match their checksums."""

    damaged: list[int]


class CommandFailed(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank: a command raised an error. Rank 0 raises an error of the same kind with this message."""

    kind: Literal["config", "model", "unsupported", "capacity", "other"]
    message: str


CommandAnswer = CommandDone | RankLoaded | PartBuilt | PartBytes | StateBytes | SlotsChecked | CommandFailed


def compute_command(arrays: StepArrays) -> Compute:
    """Return the command by which the other ranks compute the step with these input arrays."""
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
        unwindowed=None if arrays.unwindowed is None else _bytes(arrays.unwindowed),
        batch_slots=_bytes(arrays.batch_slots),
        inner=None if arrays.inner is None else _bytes(arrays.inner),
        windows=None if arrays.windows is None else _window_places(arrays.windows),
        source_tables=None if arrays.source_tables is None else _bytes(arrays.source_tables),
        source_tokens=arrays.source_tokens,
        sources=[_source_place(source) for source in arrays.sources],
    )


def step_arrays(command: Compute, images: Sequence[ImageRows] = (), sources: Sequence[SourceRows] = ()) -> StepArrays:
    """Return the input arrays of the step that a `Compute` command describes. `images` and `sources` are the embeddings
    of its images and the encoder outputs, which are received separately.
    """
    context_lens, tokens, positions = _int32(command.context_lens), _int64(command.tokens), _int64(command.positions)
    tables = command.source_tables
    return StepArrays(
        tokens=tokens,
        # Tokens of images may have positions of three parts.
        positions=positions if len(positions) == len(tokens) else positions.reshape(-1, len(tokens)),
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
        unwindowed=None if command.unwindowed is None else _bool(command.unwindowed),
        batch_slots=_int64(command.batch_slots),
        inner=None if command.inner is None else _int64(command.inner).reshape(2, -1),
        windows=None if command.windows is None else _window_arrays(command.windows, len(context_lens)),
        source_tables=None if tables is None else _int32(tables).reshape(len(tokens), -1),
        source_tokens=command.source_tokens,
        sources=sources,
    )


def _window_places(arrays: WindowArrays) -> WindowPlaces:
    return WindowPlaces(_bytes(arrays.tables), _bytes(arrays.slots), list(arrays.layer_groups))


def _window_arrays(places: WindowPlaces, num_seqs: int) -> WindowArrays:
    count = max(places.layer_groups)
    tables = _int32(places.tables).reshape(count, num_seqs, -1)
    return WindowArrays(tables, _int64(places.slots).reshape(count, -1), places.layer_groups)


def _image_place(image: ImageRows) -> ImagePlace:
    """Return what other ranks must know to receive an image's embeddings: rows in the step, shape and dtype."""
    count, width = image.features.shape
    rows = None if image.rows is None else _bytes(image.rows.cpu().numpy())
    return ImagePlace(image.first, count, width, _name(image.features.dtype), rows)


def _source_place(source: SourceRows) -> SourcePlace:
    """Return what other ranks must know to receive encoder outputs."""
    count, width = source.states.shape
    return SourcePlace(count, width, _name(source.states.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def image_rows(place: ImagePlace, device: torch.device, receive: Callable[[Tensor], None]) -> ImageRows:
    """Receive the embeddings of the image that `place` describes, and return them with the rows of the step that they
    replace. `receive` is called with an empty tensor on `device` and must fill it with rank 0's embeddings.
    """
    features = torch.empty((place.count, place.width), dtype=devices.DTYPES[place.dtype], device=device)
    receive(features)
    rows = None if place.rows is None else torch.from_numpy(_int64(place.rows)).to(device)
    return ImageRows(place.first, features, rows)


def source_rows(place: SourcePlace, device: torch.device, receive: Callable[[Tensor], None]) -> SourceRows:
    """Receive the encoder outputs that `place` describes, with their positions in the KV cache. `receive` is called
    with empty tensors on `device` and must fill them with those of rank 0.
    """
    slots = torch.empty(place.count, dtype=torch.int64, device=device)
    states = torch.empty((place.count, place.width), dtype=devices.DTYPES[place.dtype], device=device)
    receive(slots)
    receive(states)
    return SourceRows(slots, states)


def replay_command(arrays: DecodeArrays) -> Replay:
    """Return the command by which the other ranks replay the decode step with these input arrays."""
    changes = None if arrays.changes is None else _bytes(arrays.changes)
    sources = None if arrays.sources is None else _bytes(arrays.sources)
    return Replay(inputs=_bytes(arrays.inputs), changes=changes, adapters=list(arrays.adapters), sources=sources)


def decode_arrays(command: Replay) -> DecodeArrays:
    """Return the input arrays of the decode step that a `Replay` command describes."""
    changes = None if command.changes is None else _int64(command.changes).reshape(2, -1)
    inputs = _int64(command.inputs).reshape(CONTEXTS, -1)
    sources = None if command.sources is None else _int32(command.sources).reshape(inputs.shape[1], -1)
    return DecodeArrays(inputs, changes, command.adapters, sources)


def vectors_command(
    token_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    token_types: NDArray[np.int64] | None,
    images: Mapping[str, Tensor],
) -> ComputeVectors:
    """Return the command by which the other ranks compute a batch of inputs of a pooling model. `token_ids` and
    `token_types` are [num_inputs, longest], padded on the right. `images` are the tensors of images by the names of the
    model's arguments, which the caller broadcasts afterwards.
    """
    tensors = (
        ImageTensor(name, tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in images.items()
    )
    types = None if token_types is None else _bytes(token_types)
    return ComputeVectors(_bytes(token_ids), _bytes(lengths), types, tuple(tensors))


def vectors_arrays(
    command: ComputeVectors,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the padded inputs, their numbers of tokens and their token types that a `ComputeVectors` command has."""
    lengths = _int64(command.lengths)
    types = None if command.token_types is None else _int64(command.token_types).reshape(len(lengths), -1)
    return _int64(command.token_ids).reshape(len(lengths), -1), lengths, types


def image_tensors(
    command: ComputeVectors, device: torch.device, receive: Callable[[Tensor], None]
) -> dict[str, Tensor]:
    """Receive the tensors of images that a `ComputeVectors` command describes, and return them by the names of the
    model's arguments. `receive` is called with an empty tensor on `device` and must fill it with that of rank 0.
    """
    found = {}
    for image in command.images:
        found[image.name] = torch.empty(image.shape, dtype=getattr(torch, image.dtype), device=device)
        receive(found[image.name])
    return found


def store_last_tokens_command(slots: NDArray[np.int64]) -> StoreLastTokens:
    """Return the command by which the other ranks keep the last token of each of the batch slots (rows of running
    sequences) `slots`.
    """
    return StoreLastTokens(_bytes(slots))


def kept_slots(command: StoreLastTokens) -> NDArray[np.int64]:
    """Return the batch slots (rows of running sequences) whose last tokens a `StoreLastTokens` command announces."""
    return _int64(command.slots)


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _int64(data: memoryview) -> NDArray[np.int64]:
    return np.frombuffer(data, dtype=np.int64).copy()  # a copy, because torch wants writable memory


def _bool(data: memoryview) -> NDArray[np.bool_]:
    return np.frombuffer(data, dtype=np.bool_).copy()


def _int32(data: memoryview) -> NDArray[np.int32]:
    return np.frombuffer(data, dtype=np.int32).copy()
