"""What rank 0 tells the other ranks, and what they answer: one MessagePack frame each. Arrays travel as their bytes."""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_serve.engine.config import EngineConfig
from baton_serve.engine.execution.decode_graphs import CONTEXTS, DecodeArrays
from baton_serve.engine.model.batch_inputs import StepArrays


class LoadRank(msgspec.Struct, frozen=True, tag=True):
    """The first: who this rank is and which model it holds. Answered."""

    config: EngineConfig
    rank: int
    threads: int
    """Of the CPU."""


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Join the group that forms around this file. Answered."""

    store: str


class BuildCache(msgspec.Struct, frozen=True, tag=True):
    """Make the KV cache, in place of an earlier one. The descriptor of rank 0's host memory follows. Answered."""

    num_blocks: int


class MeasureMemory(msgspec.Struct, frozen=True, tag=True):
    """How much memory could the KV cache take, after what was computed since `BuildCache`? Answered; that cache is
    gone."""

    work_factor: int
    """The most memory that work took counts so many times."""
    extra_bytes: int


class CaptureGraphs(msgspec.Struct, frozen=True, tag=True):
    """Capture graphs. Answered with 1 if there are any now."""


class Compute(msgspec.Struct, frozen=True, tag=True):
    tokens: memoryview
    positions: memoryview
    slots: memoryview
    query_starts: memoryview
    context_lens: memoryview
    block_tables: memoryview
    logit_rows: memoryview | None
    pending: memoryview | None


class Replay(msgspec.Struct, frozen=True, tag=True):
    inputs: memoryview
    changes: memoryview | None


class GatherLogits(msgspec.Struct, frozen=True, tag=True):
    """The logits of the step that was replayed last are put together, so many rows of them."""

    count: int


class SetSampledTokens(msgspec.Struct, frozen=True, tag=True):
    """So many tokens are broadcast by rank 0: what was chosen after the step that was replayed last."""

    count: int


class StoreLastTokens(msgspec.Struct, frozen=True, tag=True):
    """A token for each of these slots is broadcast by rank 0: its last."""

    slots: memoryview


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    sources: list[int]
    targets: list[int]


class ToHost(msgspec.Struct, frozen=True, tag=True):
    """Answered when the shared memory holds this rank's part of these blocks."""

    blocks: list[int]


class FromHost(msgspec.Struct, frozen=True, tag=True):
    """Answered when this rank's part of these blocks has been taken from the shared memory."""

    blocks: list[int]


Command = (
    LoadRank
    | JoinGroup
    | BuildCache
    | MeasureMemory
    | CaptureGraphs
    | Compute
    | Replay
    | GatherLogits
    | SetSampledTokens
    | StoreLastTokens
    | CopyBlocks
    | ToHost
    | FromHost
)


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    value: int = 0


class CommandFailed(msgspec.Struct, frozen=True, tag=True):
    kind: Literal["config", "model", "unsupported", "capacity", "other"]
    message: str


CommandAnswer = CommandDone | CommandFailed


def compute_command(arrays: StepArrays) -> Compute:
    return Compute(
        tokens=_bytes(arrays.tokens),
        positions=_bytes(arrays.positions),
        slots=_bytes(arrays.slots),
        query_starts=_bytes(arrays.query_starts),
        context_lens=_bytes(arrays.context_lens),
        block_tables=_bytes(arrays.block_tables),
        logit_rows=None if arrays.logit_rows is None else _bytes(arrays.logit_rows),
        pending=None if arrays.pending is None else _bytes(arrays.pending),
    )


def step_arrays(command: Compute) -> StepArrays:
    context_lens = _int32(command.context_lens)
    return StepArrays(
        tokens=_int64(command.tokens),
        positions=_int64(command.positions),
        slots=_int64(command.slots),
        query_starts=_int32(command.query_starts),
        context_lens=context_lens,
        block_tables=_int32(command.block_tables).reshape(len(context_lens), -1),
        logit_rows=None if command.logit_rows is None else _int64(command.logit_rows),
        pending=None if command.pending is None else _int64(command.pending).reshape(2, -1),
    )


def replay_command(arrays: DecodeArrays) -> Replay:
    changes = None if arrays.changes is None else _bytes(arrays.changes)
    return Replay(inputs=_bytes(arrays.inputs), changes=changes)


def decode_arrays(command: Replay) -> DecodeArrays:
    changes = None if command.changes is None else _int64(command.changes).reshape(2, -1)
    return DecodeArrays(_int64(command.inputs).reshape(CONTEXTS, -1), changes)


def store_last_tokens_command(slots: NDArray[np.int64]) -> StoreLastTokens:
    return StoreLastTokens(_bytes(slots))


def kept_slots(command: StoreLastTokens) -> NDArray[np.int64]:
    return _int64(command.slots)


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _int64(data: memoryview) -> NDArray[np.int64]:
    return np.frombuffer(data, dtype=np.int64).copy()  # torch wants memory that it may write to


def _int32(data: memoryview) -> NDArray[np.int32]:
    return np.frombuffer(data, dtype=np.int32).copy()
