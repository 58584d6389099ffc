"""Checkpoints of recurrent states: where they are taken, and which copies they need. Pure: no tensor.

The layers of linear attention and state spaces keep one state of fixed size for each sequence, in its batch slot. It
cannot be cut back to an earlier token. So a cached prefix is of use only up to a *checkpoint*: a copy of the states
after the last token of a full block. It lies in blocks of the KV cache, whose hashes follow from that block's hash; for
the block pool, the host tier and transports they are blocks like any other.

Checkpoints are taken at the end of each prompt (after its last full block), where prompts part that share KV, here or
on another instance (`Work.branches`), and every `interval_tokens`. Models without recurrent states have none, and every
method returns at once.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from baton_serve.contracts.block_hash import checkpoint_hashes
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.block_pool import BlockPool, CachedPrefix
from baton_serve.engine.core.outputs import NamedBlock
from baton_serve.engine.core.sequence import Sequence

MIN_PROMPT_BLOCKS = 2
"""Fewest blocks of a prompt that gets a checkpoint at its end. It costs a step of its own, which does not pay for a
shorter one."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A planned operation on the recurrent states of the sequence in batch slot `slot`: set them to zero, save them to
    `blocks`, restore them from `blocks`, or copy them from slot `source`."""

    kind: Literal["clear", "save", "restore", "copy"]
    slot: int
    blocks: tuple[int, ...] = ()
    source: int = -1


class StateCheckpoints:
    """Plans when checkpoints of recurrent states are taken, and finds them in the prefix cache. A checkpoint is a copy
    of a sequence's recurrent states after the last token of a block, in blocks of its own. Only the engine's thread may
    call it."""

    def __init__(self, pool: BlockPool, block_tokens: int, num_blocks: int, interval_tokens: int) -> None:
        """`num_blocks` is the number of blocks that one checkpoint fills, 0 for models without recurrent states. Each
        sequence gets a checkpoint every `interval_tokens` tokens, a multiple of `block_tokens`."""
        assert interval_tokens % block_tokens == 0, "checkpoints lie at the ends of full blocks"
        self._pool = pool
        self._block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._interval = interval_tokens
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

    def cut(self, sequence: Sequence, length: int) -> int:
        """Return the length of the sequence's next chunk: `length`, or less if the sequence gets a checkpoint before
        that many tokens, so that the chunk ends there."""
        if not self._can_keep:
            return length
        start = sequence.num_computed_tokens
        stops = [(start // self._interval + 1) * self._interval, *self._stops(sequence)]
        return min([length, *(stop - start for stop in stops if stop > start)])

    def save(self, sequence: Sequence) -> None:
        """Plan a checkpoint of a running sequence in the prefix cache, if it gets one after its computed tokens.

        No sequence owns the checkpoint's blocks, so it can be evicted at once; it is not taken if few blocks are free.
        """
        at = sequence.num_computed_tokens
        # Blocks whose tokens are not known yet have no hash.
        if not self._can_keep or sequence.slot < 0 or at % self._block_tokens or at > len(sequence.token_ids):
            return
        if at % self._interval and at not in self._stops(sequence):
            return
        block_hash = sequence.block_hashes[at // self._block_tokens - 1]
        if len(self.find(block_hash)) or self._pool.num_free - self._num_blocks < self._pool.num_total // 100:
            return
        blocks = self._pool.allocate(self._num_blocks)
        if blocks is None:
            return
        self._planned.append(StateCopy("save", sequence.slot, tuple(blocks)))
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
