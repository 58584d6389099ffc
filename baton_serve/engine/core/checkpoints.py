"""Decides after which tokens checkpoints of recurrent states (Mamba, linear attention) are taken, and finds them in the
prefix cache. Pure: no tensor.

The layers of linear attention and state spaces keep one state of fixed size for each sequence, in its batch slot. It
cannot be cut back to an earlier token. So a cached prefix is of use only up to a *checkpoint*: a copy of the states
after the last token of a full block. It lies in blocks of the KV cache, whose hashes follow from that block's hash; for
the block pool, the host tier and transports they are blocks like any other.

Checkpoints are taken at the end of each prompt (after its last full block), where prompts part that share KV, here or
on another instance (`Work.branches`), and every `interval_tokens`. A step leaves the states after its last token of a
sequence in the batch slot. It can also store them after an earlier token, in a *spare row*, from which they are saved
before the next step: an *inner checkpoint*. A chunk has one at most, and ends at a checkpoint that cannot be an inner
one. Models without recurrent states have no checkpoints, and every method returns at once.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton_serve.contracts.block_hash import checkpoint_hashes
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.block_pool import BlockPool, CachedPrefix
from baton_serve.engine.core.outputs import NamedBlock
from baton_serve.engine.core.sequence import Sequence

MIN_PROMPT_BLOCKS = 2
"""Fewest blocks of a prompt that gets a checkpoint at its end. It may cost a step of its own, which does not pay for a
shorter one."""
MIN_ROUNDED_STEPS = 8
"""A chunk of fewer multiples of `InnerRules.step_tokens` is not made shorter for the alignment of the next one."""


@dataclass(frozen=True, slots=True)
class InnerRules:
    """Which inner checkpoints a step can store."""

    step_tokens: int
    """After a multiple of so many tokens of a chunk; 0: none."""
    first_row: int
    """Number of the first spare row, behind those of all batch slots."""
    num_rows: int
    """Number of spare rows, and so the most inner checkpoints of a step."""


NO_INNER = InnerRules(0, 0, 0)


class ChunkPlan(NamedTuple):
    """The length of a sequence's next chunk, after how many of its tokens an inner checkpoint is stored (0: none), and
    in which row."""

    length: int
    inner: int = 0
    inner_row: int = -1


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A planned operation on the recurrent states in row `slot`, that of a batch slot or a spare one: set them to zero,
    save them to `blocks`, restore them from `blocks`, or copy them from row `source`."""

    kind: Literal["clear", "save", "restore", "copy"]
    slot: int
    blocks: tuple[int, ...] = ()
    source: int = -1


class StateCheckpoints:
    """Plans when checkpoints of recurrent states are taken, and finds them in the prefix cache. A checkpoint is a copy
    of a sequence's recurrent states after the last token of a block, in blocks of its own. Only the engine's thread may
    call it."""

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        num_blocks: int,
        interval_tokens: int,
        inner: InnerRules = NO_INNER,
    ) -> None:
        """`num_blocks` is the number of blocks that one checkpoint fills, 0 for models without recurrent states. Each
        sequence gets a checkpoint every `interval_tokens` tokens, a multiple of `block_tokens`."""
        assert interval_tokens % block_tokens == 0, "checkpoints lie at the ends of full blocks"
        self._pool = pool
        self._block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._interval = interval_tokens
        self._inner = inner
        self._planned: list[StateCopy] = []

    @property
    def are_needed(self) -> bool:
        """Return whether the model has recurrent states, so that a cached prefix can be used only up to a
        checkpoint."""
        return self._num_blocks > 0

    def hashes(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the hashes of the blocks that hold the checkpoint after the block with hash `block_hash`; empty for
        models without recurrent states."""
        return checkpoint_hashes(block_hash, self._num_blocks)

    def find(self, block_hash: BlockHash) -> CachedPrefix:
        """Return the cached blocks of the checkpoint after the block with hash `block_hash`. Each of them may lie on
        the device or in the host tier; the result is empty if any of them is in neither."""
        names = self.hashes(block_hash)
        found = self._pool.find(names)
        return found if len(found) == len(names) else found.first(0)

    def find_deepest(self, block_hashes: Items[BlockHash]) -> int:
        """Return after how many of the blocks with these hashes, the leading ones of a prompt, the last cached
        checkpoint lies; 0 if no checkpoint is cached."""
        for count in range(len(block_hashes), 0, -1):
            # Most blocks have no checkpoint: one hash decides, before all of them are looked up.
            first = checkpoint_hashes(block_hashes[count - 1], 1)
            if len(self._pool.find(first)) and len(self.find(block_hashes[count - 1])):
                return count
        return 0

    def cut(self, sequence: Sequence, length: int, num_inner: int) -> ChunkPlan:
        """Return the sequence's next chunk of at most `length` tokens. It ends where the sequence gets a checkpoint,
        behind an inner one if the step can store it. `num_inner` inner checkpoints are in the step already."""
        if not self._can_keep:
            return ChunkPlan(length)
        start, rules = sequence.num_computed_tokens, self._inner
        # The step's budget ends most chunks. The next one should begin where its checkpoint can be an inner one.
        if 0 < rules.step_tokens * MIN_ROUNDED_STEPS <= length < sequence.num_uncomputed_tokens:
            length -= (start + length) % rules.step_tokens
        every = range((start // self._interval + 1) * self._interval, start + length, self._interval)
        stops = sorted({stop - start for stop in (*every, *self._stops(sequence)) if 0 < stop - start < length})
        if not stops:
            return ChunkPlan(length)
        first = stops[0]
        if not rules.step_tokens or first % rules.step_tokens or num_inner >= rules.num_rows:
            return ChunkPlan(first)
        return ChunkPlan(stops[1] if len(stops) > 1 else length, first, rules.first_row + num_inner)

    def save(self, sequence: Sequence, inner_at: int = 0, inner_row: int = -1) -> None:
        """Plan the checkpoints of a running sequence in the prefix cache: one after its computed tokens, if it gets one
        there, and the inner one that its step has stored after the first `inner_at` tokens (0: none) in `inner_row`.

        No sequence owns the checkpoints' blocks, so they can be evicted at once; none is taken if few blocks are free.
        """
        if inner_at:
            self._save(sequence, inner_at, inner_row)
        at = sequence.num_computed_tokens
        if self._can_keep and (at % self._interval == 0 or at in self._stops(sequence)):
            self._save(sequence, at, sequence.slot)

    def _save(self, sequence: Sequence, at: int, row: int) -> None:
        # Blocks whose tokens are not known yet have no hash.
        if sequence.slot < 0 or at % self._block_tokens or at > len(sequence.token_ids):
            return
        block_hash = sequence.block_hashes[at // self._block_tokens - 1]
        if len(self.find(block_hash)) or self._pool.num_free - self._num_blocks < self._pool.num_total // 100:
            return
        blocks = self._pool.allocate(self._num_blocks)
        if blocks is None:
            return
        self._planned.append(StateCopy("save", row, tuple(blocks)))
        self._pool.register(self.hashes(block_hash), blocks)
        self._pool.release(blocks)

    def save_handoff(self, sequence: Sequence, block_hash: BlockHash) -> list[NamedBlock]:
        """Plan the checkpoint of a `prefill` request's recurrent states at the end of its prompt, and return its blocks
        for the decode worker to fetch.

        `block_hash` is the hash of the prompt's last block. The sequence owns the blocks.
        """
        self._planned.append(StateCopy("save", sequence.slot, tuple(sequence.handoff_blocks)))
        return [NamedBlock(*named) for named in zip(self.hashes(block_hash), sequence.handoff_blocks, strict=True)]

    def fill_slot(self, sequence: Sequence) -> None:
        """Plan the recurrent states of a sequence that has just got a batch slot: zeros if it starts at its first
        token, otherwise those of its checkpoint, whose blocks it then releases."""
        if not self.are_needed:
            return
        if sequence.checkpoint_blocks:
            self._planned.append(StateCopy("restore", sequence.slot, tuple(sequence.checkpoint_blocks)))
            self._pool.release(sequence.checkpoint_blocks)
            sequence.checkpoint_blocks = []
        elif not sequence.num_computed_tokens:
            self._planned.append(StateCopy("clear", sequence.slot))

    def can_fork(self, parent: Sequence, *, has_free_slot: bool) -> bool:
        """Return whether another sequence of the same request can get the recurrent states of `parent` now: by a copy
        to a free batch slot (`has_free_slot`), or from the checkpoint that the parent owns. Always True for models
        without recurrent states."""
        return not self.are_needed or has_free_slot or bool(parent.checkpoint_blocks)

    def share(self, parent: Sequence, fork: Sequence) -> None:
        """Let `fork`, another sequence of the same request, own the checkpoint blocks of `parent` too, because the
        parent has no batch slot from which its recurrent states could be copied."""
        self._pool.share(parent.checkpoint_blocks)
        fork.checkpoint_blocks = list(parent.checkpoint_blocks)

    def copy_slot(self, parent: Sequence, fork: Sequence) -> None:
        """Plan a copy of the recurrent states from the batch slot of `parent` to that of `fork`, another sequence of
        the same request. Do nothing if the parent has no slot."""
        if self.are_needed and parent.slot >= 0:
            self._planned.append(StateCopy("copy", fork.slot, source=parent.slot))

    def take_copies(self) -> list[StateCopy]:
        """Return the operations that were planned since the last call, in order. The caller executes them before any
        other work uses their blocks or slots."""
        copies, self._planned = self._planned, []
        return copies

    @property
    def _can_keep(self) -> bool:
        """Return whether checkpoints are kept in the prefix cache for later prompts: the model has recurrent states and
        prefix caching is on."""
        return self._num_blocks > 0 and self._pool.is_caching

    def _stops(self, sequence: Sequence) -> list[int]:
        """Return after how many tokens this sequence gets checkpoints, in addition to those at regular intervals."""
        size, length = self._block_tokens, len(sequence.token_ids)
        full = (length - 1) // size
        # The router counts in blocks of this size, but a message may contain anything.
        stops = [at for at in sequence.request.work.branches if at % size == 0 and 0 < at < length]
        return [*stops, sequence.shared_tokens, full * size if full >= MIN_PROMPT_BLOCKS else 0]
