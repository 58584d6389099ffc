"""Rank 0's executor for several ranks: it sends each call (forward, copies, graphs) to the other ranks before it does
its own part.

If a step fails here, the other ranks wait in it for this one, and would take the sums of the next step for those of
this one. So the instance must end; with a single rank only the requests of the step fail.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.contracts.instance import KernelVerdict
from baton_serve.engine.errors import EngineError
from baton_serve.engine.execution.decode_graphs import CaptureGraph, DecodeArrays, DecodeResult
from baton_serve.engine.execution.executor import AfterLayer, Executor, LocalExecutor
from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.engine.model.batch_inputs import StepArrays
from baton_serve.engine.model.forward import Forward
from baton_serve.engine.model.pipeline_stage import StagedForward
from baton_serve.engine.parallel.commands import (
    AwaitTierCopies,
    BuildHostTier,
    CheckSlots,
    CopyBlocks,
    CopyTierBlocks,
    FinishStep,
    FromHost,
    GatherLogits,
    SetSampledTokens,
    SlotsChecked,
    ToHost,
    compute_command,
    replay_command,
    store_last_tokens_command,
)
from baton_serve.engine.parallel.ranks import Ranks

MAX_GROUP_BYTES = 64 << 20
"""Size of the blocks that one command copies, in bytes: ranks on other hosts send their parts in one message."""


class TPExecutor:
    """Executes each step on all ranks of a tensor-parallel model: it sends the step to the other ranks and computes
    rank 0's part itself. Implements `Executor`.
    """

    def __init__(self, own: LocalExecutor, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    @property
    def has_graphs(self) -> bool:
        return self._own.has_graphs

    @property
    def has_adapter_graphs(self) -> bool:
        return self._own.has_adapter_graphs

    @property
    def wrong_graphs(self) -> Sequence[KernelVerdict]:
        return self._own.wrong_graphs

    def compute(self, arrays: StepArrays, after_layer: AfterLayer | None = None) -> Tensor:
        # The command goes out first, so that all ranks start the step at about the same time.
        self._ranks.send_command(compute_command(arrays))
        with run_on_all_ranks():
            for image in arrays.images:
                self._ranks.group.broadcast(image.features.contiguous())
            for source in arrays.sources:
                self._ranks.group.broadcast(source.slots)
                self._ranks.group.broadcast(source.states)
            return self._own.compute(arrays, after_layer)

    def collect(self, computed: Tensor, num_rows: int) -> Tensor:
        return computed

    def discard(self, num_rows: int) -> None:
        """Do nothing: `compute` has computed the logits already."""

    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        self._ranks.send_command(replay_command(arrays))
        with run_on_all_ranks():
            return self._own.replay(arrays)

    def logits(self, count: int) -> Tensor:
        self._ranks.send_command(GatherLogits(count))
        with run_on_all_ranks():
            return self._own.logits(count)

    @torch.inference_mode()
    def set_sampled_tokens(self, tokens: Tensor) -> None:
        self._ranks.send_command(SetSampledTokens(len(tokens)))
        with run_on_all_ranks():
            self._ranks.group.broadcast(tokens)
            self._own.set_sampled_tokens(tokens)

    @torch.inference_mode()
    def store_last_tokens(self, tokens: Tensor, slots: NDArray[np.int64]) -> None:
        self._ranks.send_command(store_last_tokens_command(slots))
        with run_on_all_ranks():
            self._ranks.group.broadcast(tokens)
            self._own.store_last_tokens(tokens, slots)

    def capture_graphs(self, capturing: Callable[[], CaptureGraph]) -> None:
        if len(set(self._ranks.capture(_capturing_here(self._own, capturing)))) > 1:
            raise EngineError("only some ranks could capture graphs; start with --enforce-eager")

    def close(self) -> None:
        """Free the captured graphs of rank 0. Those of the other ranks end with their processes."""
        self._own.close()


class PipelineExecutor:
    """Executes steps on all stages of a pipeline, from rank 0, which belongs to the first stage. Implements `Executor`.

    `compute` returns when the first stage has queued its layers; `collect` waits for the last stage. So several steps
    are in flight, each in another stage.
    """

    has_adapter_graphs = False

    def __init__(self, own: LocalExecutor, forward: StagedForward, ranks: Ranks, vocab_size: int) -> None:
        self._own, self._forward, self._ranks = own, forward, ranks
        self.has_graphs = False
        # Stands for logits that are computed later, which `compute` cannot return.
        self._not_yet = torch.empty((0, vocab_size))

    @property
    def wrong_graphs(self) -> Sequence[KernelVerdict]:
        return self._own.wrong_graphs

    def compute(self, arrays: StepArrays, after_layer: AfterLayer | None = None) -> Tensor:
        # The command goes out before this stage computes, so that the other stages prepare the step meanwhile.
        self._ranks.send_command(compute_command(arrays))
        with run_on_all_ranks():
            for source in arrays.sources:
                for values in source:
                    # Every stage computes its layers' keys and values of them.
                    self._ranks.group.broadcast(values)
                    self._forward.links.pass_on(values)
            self._own.compute(arrays)
        return self._not_yet

    @torch.inference_mode()
    def collect(self, computed: Tensor, num_rows: int) -> Tensor:
        self._ranks.send_command(FinishStep(num_rows), to_first_stage=True)
        with run_on_all_ranks():
            return self._forward.finish(num_rows)

    @torch.inference_mode()
    def discard(self, num_rows: int) -> None:
        self._ranks.send_command(FinishStep(num_rows, has_logits=False), to_first_stage=True)
        with run_on_all_ranks():
            self._forward.discard(num_rows)

    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        self._ranks.send_command(replay_command(arrays))
        with run_on_all_ranks():
            result = self._own.replay(arrays)
        return replace(result, vocab_size=self._not_yet.shape[1], computed=self._not_yet)

    def logits(self, count: int) -> Tensor:
        raise AssertionError("`collect` returns the logits")

    def set_sampled_tokens(self, tokens: Tensor) -> None:
        """Do nothing: with a pipeline, a sequence's next step starts only after the host knows its tokens."""

    def store_last_tokens(self, tokens: Tensor, slots: NDArray[np.int64]) -> None:
        """Do nothing: with a pipeline, a sequence's next step starts only after the host knows its tokens."""

    def capture_graphs(self, capturing: Callable[[], CaptureGraph]) -> None:
        """Capture graphs for decode steps in all stages. If a stage cannot, all compute without graphs."""
        self.has_graphs = all(self._ranks.capture(_capturing_here(self._own, capturing)))

    def close(self) -> None:
        self._own.close()


class BlockCopier(Protocol):
    """The part of `KVCache` that copies KV blocks between device and host, and within the device; on one rank or on
    all.
    """

    @property
    def is_mirrored(self) -> bool: ...
    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...
    def to_host(self, blocks: Iterable[int], steps_after: int | None = None) -> None: ...
    def from_host(self, blocks: Iterable[int]) -> None: ...
    def forget_host(self, blocks: Iterable[int]) -> None: ...


class TPBlockCopier:
    """Copies KV blocks on all ranks, from rank 0, since each rank holds a part of every block. Implements
    `BlockCopier`.
    """

    def __init__(self, own: KVCache, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self.is_mirrored = own.is_mirrored

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._ranks.send_command(CopyBlocks(list(sources), list(targets)))
        self._own.copy_blocks(sources, targets)

    def to_host(self, blocks: Iterable[int], steps_after: int | None = None) -> None:
        """Copy these blocks from the device to their copies in host memory, which all ranks share. Return when every
        rank has copied its part. `steps_after` is as in `KVCache.to_host`.
        """
        for chosen in self._groups(blocks):
            self._ranks.expect_answer(ToHost(chosen, steps_after))
            self._own.to_host(chosen, steps_after)
            self._ranks.wait()

    def from_host(self, blocks: Iterable[int]) -> None:
        """Copy these blocks from host memory, which all ranks share, to the device. Return when no rank reads the host
        memory any more.
        """
        for chosen in self._groups(blocks):
            self._ranks.expect_answer(FromHost(chosen))
            self._own.from_host(chosen)
            self._ranks.wait()

    def _groups(self, blocks: Iterable[int]) -> Iterator[list[int]]:
        """Divide blocks into groups whose parts fit into one message; none without a mirror."""
        chosen = list(blocks) if self.is_mirrored else []
        size = max(1, MAX_GROUP_BYTES // self._own.block_bytes)
        for start in range(0, len(chosen), size):
            yield chosen[start : start + size]

    def forget_host(self, blocks: Iterable[int]) -> None:
        # The ranks map the same memory, so rank 0 alone frees it for all.
        self._own.forget_host(blocks)


class TPHostSlots:
    """Copies the other ranks' parts of KV blocks to and from their slots of host memory, from rank 0. Implements
    `OtherHostSlots`.
    """

    def __init__(self, ranks: Ranks, num_slots: int) -> None:
        """Make the other ranks allocate `num_slots` slots. Raises `EngineError` if one cannot."""
        self._ranks = ranks
        ranks.query_ranks(BuildHostTier(num_slots))

    def copy(self, blocks: Sequence[int], slots: Sequence[int], *, is_to_host: bool, steps_after: int) -> None:
        self._ranks.send_command(CopyTierBlocks(list(blocks), list(slots), is_to_host, steps_after))

    def before(self, blocks: Sequence[int]) -> None:
        # In order with steps: a rank executes this command before the next step is sent.
        self._ranks.send_command(AwaitTierCopies(list(blocks)))

    def find_damaged(self, slots: Sequence[int], find_here: Callable[[], set[int]]) -> set[int]:
        """Return the slots of which a rank's part is damaged, after rank 0 has searched by `find_here` meanwhile.
        Raises `EngineError` if a rank fails or does not answer.
        """
        damaged, answers = self._ranks.execute(CheckSlots(list(slots)), find_here)
        return damaged.union(*(answer.damaged for answer in answers if isinstance(answer, SlotsChecked)))


def _capturing_here(own: LocalExecutor, capturing: Callable[[], CaptureGraph]) -> Callable[[], bool]:
    """Return a function that captures rank 0's graphs and returns whether it has succeeded."""

    def capture_here() -> bool:
        own.capture_graphs(capturing)
        return own.has_graphs

    return capture_here


@contextmanager
def run_on_all_ranks() -> Iterator[None]:
    """Wrap rank 0's part of a step that the other ranks compute too. Raises `EngineError` if rank 0 runs out of device
    memory in it, since the ranks cannot go on together then.
    """
    try:
        yield
    except torch.OutOfMemoryError as exc:
        raise EngineError(
            "rank 0 ran out of device memory in a step that the other ranks compute too, so they cannot go on together;"
            f" lower gpu_memory_utilization or max_num_batched_tokens ({str(exc).splitlines()[0]})"
        ) from exc


def make_executor(own: LocalExecutor, forward: Forward, ranks: Ranks, vocab_size: int) -> Executor:
    """Return the executor of an engine: `own` with a single rank, otherwise one that also sends each step to `ranks`.
    With a pipeline, `forward` is a `StagedForward`.
    """
    if isinstance(forward, StagedForward):
        return PipelineExecutor(own, forward, ranks, vocab_size)
    return own if ranks.num_ranks == 1 else TPExecutor(own, ranks)


def make_block_copier(own: KVCache, ranks: Ranks) -> BlockCopier:
    """Return the object that copies KV blocks: `own` with a single rank, otherwise one that copies on all `ranks`."""
    return own if ranks.num_ranks == 1 else TPBlockCopier(own, ranks)
