"""Compares each captured graph with the same work done eagerly, so that graphs which differ are not used.

On some devices replays gave wrong numbers without an error (https://github.com/vllm-project/vllm/issues/48327, 54785).
Graphs belong to one process, so they are proved at each start, before any request owns a block of the KV cache.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.contracts.instance import KernelVerdict
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.kernels.operations import FLOAT32_TOLERANCE, TOLERANCE
from baton_serve.engine.kernels.prover import RUNS, difference
from baton_serve.engine.kv.state_memory import StateViews

logger = logging.getLogger(__name__)

GRAPH = "captured graph"
PROOF_TOKENS = 100
"""Longest context of a proof's sequences, in tokens."""

SHARED_BLOCKS = 16
"""Number of blocks that the sequences of a proof only read."""
PROVED_SLOTS = 4
"""Sequences of a proof whose recurrent states are compared."""


@dataclass(frozen=True, slots=True)
class GraphCase:
    """One captured graph whose inputs have been filled, for a comparison: `compute` does the graph's work without the
    graph, `replay` launches the graph, and `output` returns the logits that either has computed last. Both start from
    the same recurrent states, of which `states` are compared afterwards.
    """

    operation: str
    shape: str
    compute: Callable[[], None]
    replay: Callable[[], None]
    output: Callable[[], Tensor]
    states: Sequence[Tensor] = ()


@torch.inference_mode()
def prove_graphs(cases: Iterable[GraphCase]) -> list[KernelVerdict]:
    """Run each captured graph and the same work without it. Return the verdicts of the graphs whose logits differ, and
    log a warning for each.
    """
    wrong = [verdict for case in cases if not (verdict := _prove(case)).is_right]
    for verdict in wrong:
        logger.warning(
            "the %s for a %s is wrong on this device: %s. Such graphs are not used, and steps start slower; please"
            " report it: baton doctor --report",
            verdict.operation,
            verdict.shape,
            verdict.describe(),
        )
    return wrong


def _prove(case: GraphCase) -> KernelVerdict:
    case.compute()
    expected, left = case.output().clone(), [state.clone() for state in case.states]
    largest = 0.0
    for _ in range(RUNS):
        # A replay that writes nothing must not find the eager result.
        case.output().fill_(math.nan)
        case.replay()
        largest = max(largest, difference(case.output(), expected), *map(difference, case.states, left))
    tolerance = FLOAT32_TOLERANCE if expected.dtype == torch.float32 else TOLERANCE
    return KernelVerdict(
        case.operation,
        case.shape,
        GRAPH,
        is_right=largest <= tolerance,
        difference=largest if math.isfinite(largest) else None,
    )


@dataclass(frozen=True, slots=True)
class ProofStates:
    """The recurrent states in all rows while captured graphs are compared with eager work."""

    views: StateViews

    def reset_before(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that sets all states to the same fixed numbers and calls `work`, which changes them. So two
        calls get equal states.
        """

        def run() -> None:
            for view in self._all():
                numbers = torch.linspace(-0.5, 0.5, view[0].numel(), device=view.device)
                view.copy_(numbers.view(view.shape[1:]))
            work()

        return run

    def compared(self, limits: SchedulerConfig) -> list[Tensor]:
        """Return the states that are compared: those of some batch slots and, if there are spare rows, of the first."""
        num_slots = limits.max_num_seqs
        rows = [slice(0, min(PROVED_SLOTS, num_slots))]
        if limits.num_spare_rows:
            rows.append(slice(num_slots, num_slots + 1))
        return [view[chosen] for view in self._all() for chosen in rows]

    def clear(self) -> None:
        """Set all states to zero, as those of new sequences are."""
        for view in self._all():
            view.zero_()

    def _all(self) -> Iterator[Tensor]:
        return (view for layer in self.views.values() for view in layer.values())


@dataclass(frozen=True, slots=True)
class ProofBlocks:
    """The KV blocks that sequences use while captured graphs are compared with eager work. Each sequence writes into a
    block of its own, and reads others that no sequence writes. Block 0 is padding.
    """

    num_blocks: int
    block_tokens: int

    def context(self, number: int, num_seqs: int, longest: int) -> int:
        """Return the context length in tokens, at most `longest`, of sequence `number` of `num_seqs`. Neighbouring
        sequences get different ones.
        """
        room = 1 + min(self._num_shared(num_seqs), PROOF_TOKENS // self.block_tokens)
        return 1 + (number * 37 + 29) % max(1, min(longest, PROOF_TOKENS, room * self.block_tokens))

    def table(self, number: int, num_seqs: int, context: int) -> list[int] | None:
        """Return the block table of sequence `number` of `num_seqs` with `context` tokens; it writes only the last
        block. Return None if the cache has too few blocks.
        """
        own = 1 + number
        if own >= self.num_blocks:
            return None
        shared = self._num_shared(num_seqs)
        length = -(-context // self.block_tokens)
        first = 1 + num_seqs
        return [*(first + (number + at) % shared for at in range(length - 1)), own] if length > 1 else [own]

    def _num_shared(self, num_seqs: int) -> int:
        return max(0, min(SHARED_BLOCKS, self.num_blocks - 1 - num_seqs))


@contextmanager
def random_blocks(layers: Sequence[Tensor], num_seqs: int) -> Iterator[None]:
    """Fill the KV blocks that `num_seqs` sequences of `ProofBlocks` use with random numbers, in all `layers` of the
    cache, and with zeros again at the end. One-byte (quantized) caches stay as they are: torch cannot draw such
    numbers.
    """
    # Zeros alone would hide a graph that reads other blocks than those of its inputs.
    last = 1 + num_seqs + SHARED_BLOCKS
    planes = [layer[:last, plane] for layer in layers if layer.element_size() > 1 for plane in (0, 1)]
    for plane in planes:
        plane.normal_()
    try:
        yield
    finally:
        for plane in planes:
            plane.zero_()
