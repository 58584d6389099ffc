"""Decides which KV blocks of sliding-window layers a sequence needs, when they are freed, and how long a prefix hit is
there. Pure: no tensor.

The layers of some models are divided into cache groups, each with blocks of its own: one group of the layers with full
attention, whose blocks are `Sequence.blocks`, and groups of layers with a window. A block of the latter is needed only
as long as a token may still see it. Then it is released, but stays cached until its memory is needed. Its hash follows
from that of the block of full attention with the same tokens; for the block pool, the host tier and transports it is a
block like any other.

A prefix is found up to a place before which all groups with a window have the blocks that the next token sees. While a
prompt is computed, it always has the blocks for a chunk more than that, so that it never stops halfway. Models without
such groups have none of this, and every method returns at once.
"""

from collections.abc import Sequence as Items

from baton_serve.contracts.block_hash import window_hashes
from baton_serve.contracts.block_layout import first_seen_block
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.block_pool import BlockPool, CachedPrefix
from baton_serve.engine.core.outputs import NamedBlock
from baton_serve.engine.core.sequence import Sequence


class WindowBlocks:
    """Allocates, finds, registers and frees the blocks of layers with a window in one engine. Engine thread only."""

    def __init__(
        self, pool: BlockPool, block_tokens: int, num_groups: int, window_tokens: int, kept_blocks: int
    ) -> None:
        """`num_groups` is the number of groups with a window, 0 if there are none; `kept_blocks` is the number of
        blocks of each group that a sequence has at least while its prompt is computed.
        """
        self._pool = pool
        self._block_tokens = block_tokens
        self.num_groups = num_groups
        self._window_tokens = window_tokens
        self._kept_blocks = kept_blocks

    @property
    def are_needed(self) -> bool:
        """Return whether the model has groups with a window."""
        return self.num_groups > 0

    def first_seen(self, num_tokens: int) -> int:
        """Return the index of the first block that the token after `num_tokens` tokens sees."""
        return first_seen_block(num_tokens, self._window_tokens, self._block_tokens)

    def names_of(self, block_hashes: Items[BlockHash], num_tokens: int) -> list[BlockHash]:
        """Return the hashes of all blocks that another instance needs to continue after `num_tokens` tokens, whose
        blocks of full attention are `block_hashes`: each followed by those of the other groups, if they are seen.
        """
        if not self.are_needed:
            return list(block_hashes)
        first = self.first_seen(num_tokens)
        return [
            name
            for index, block_hash in enumerate(block_hashes)
            for name in [block_hash, *(window_hashes(block_hash, self.num_groups) if index >= first else ())]
        ]

    def find_deepest(self, block_hashes: Items[BlockHash]) -> int:
        """Return how many of these leading blocks can be reused: the most after which the next token finds all blocks
        that it sees, in either tier.
        """
        count = len(block_hashes)
        index = count - 1
        while index >= self.first_seen(count * self._block_tokens):
            names = window_hashes(block_hashes[index], self.num_groups)
            if len(self._pool.find(names)) < len(names):
                # A shorter prefix must not see this block either, or it ends before it.
                count = index
            index -= 1
        return count

    def fits(self, num_reused: int, num_blocks: int) -> bool:
        """Return whether a sequence of `num_blocks` blocks of full attention, `num_reused` of them cached, can run if
        it is alone: cached blocks that others may own do not make room for its next ones.
        """
        seen = num_reused - self.first_seen(num_reused * self._block_tokens)
        most = num_blocks + self.num_groups * seen + self.num_at_start(num_reused, num_blocks)
        return most <= self._pool.num_total

    def find(self, block_hashes: Items[BlockHash]) -> CachedPrefix:
        """Return the cached blocks that the token after these blocks sees. `find_deepest` has returned their number."""
        first = self.first_seen(len(block_hashes) * self._block_tokens)
        seen = block_hashes[first:]
        return self._pool.find([name for one in seen for name in window_hashes(one, self.num_groups)])

    def num_at_start(self, num_reused: int, num_blocks: int) -> int:
        """Return how many free blocks a sequence of `num_blocks` blocks needs, beside the cached ones and those of full
        attention, when `num_reused` of its blocks are reused.
        """
        return self.num_groups * min(num_blocks - num_reused, self._kept_blocks)

    def give(self, sequence: Sequence, num_reused: int, blocks: Items[int]) -> None:
        """Give a sequence the blocks that `find` and `num_at_start` have named, whose first `num_reused` blocks of full
        attention are reused.
        """
        if self.are_needed:
            first = self.first_seen(num_reused * self._block_tokens) if num_reused else 0
            self._give(sequence, first, blocks)

    def give_received(self, sequence: Sequence, num_tokens: int, blocks: Items[int]) -> None:
        """Give a sequence the blocks that it needs to continue after `num_tokens` tokens."""
        if self.are_needed:
            self._give(sequence, self.first_seen(num_tokens), blocks)

    def num_for_next_token(self, sequence: Sequence) -> int:
        """Return how many blocks of all groups a sequence still needs before its next token can be computed."""
        at = sequence.num_computed_tokens
        has_own = at < len(sequence.blocks) * self._block_tokens
        has_others = at < len(sequence.window_blocks) * self._block_tokens
        return (not has_own) + (0 if has_others else self.num_groups)

    def append(self, sequence: Sequence, fresh: Items[int]) -> None:
        """Give a sequence the blocks that `num_for_next_token` has counted."""
        # A block of full attention comes first, if it is missing: prompts get theirs before those of the other groups.
        num_own = len(fresh) - self.num_groups
        sequence.blocks += fresh[:num_own]
        if self.are_needed:
            sequence.window_blocks.append(list(fresh[num_own:]))

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Let a sequence have blocks for its first `num_tokens` tokens, as far as blocks are free. Return for how many
        tokens, at most `num_tokens`, it has them.
        """
        if not self.are_needed:
            return num_tokens
        missing = -(-num_tokens // self._block_tokens) - len(sequence.window_blocks)
        count = min(missing, self._pool.num_free // self.num_groups)
        if count > 0:
            fresh = self._pool.allocate(count * self.num_groups)
            assert fresh is not None
            sequence.window_blocks += _rows(fresh, self.num_groups)
        return min(num_tokens, len(sequence.window_blocks) * self._block_tokens)

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Free the blocks that no token after the first `num_tokens` sees. No step in flight may read or write them.

        A sequence whose prompt is not finished gets blocks for its next tokens instead.
        """
        if not self.are_needed:
            return
        first, end = sequence.num_window_freed, self.first_seen(num_tokens)
        # Blocks get their hashes late if a step was launched before its tokens were known.
        end = min(end, sequence.num_registered_blocks if self._pool.is_caching else end)
        if end > first:
            self._pool.release([block for row in sequence.window_blocks[first:end] for block in row])
            sequence.window_blocks[first:end] = [[] for _ in range(first, end)]
            sequence.num_window_freed = end
        wanted = min(len(sequence.blocks), sequence.num_window_freed + self._kept_blocks)
        if len(sequence.window_blocks) < wanted:
            self.grow(sequence, wanted * self._block_tokens)

    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Register the hashes of the blocks `start` to `end` of a sequence, which are full."""
        if self.are_needed and self._pool.is_caching:
            for index in range(max(start, sequence.num_window_freed), end):
                names = window_hashes(sequence.block_hashes[index], self.num_groups)
                self._pool.register(names, sequence.window_blocks[index])

    def share(self, parent: Sequence, fork: Sequence, num_full: int, own: Items[int]) -> list[tuple[int, int]]:
        """Let a fork own the parent's full blocks too, and `own` for the partly filled one. Return which blocks to
        copy, as pairs of source and target.
        """
        if not self.are_needed:
            return []
        full = parent.window_blocks[parent.num_window_freed : num_full]
        self._pool.share(block for row in full for block in row)
        rows = _rows(own, self.num_groups)
        fork.window_blocks = [list(row) for row in parent.window_blocks[:num_full]] + rows
        fork.num_window_freed = parent.num_window_freed
        return [pair for row in rows for pair in zip(parent.window_blocks[num_full], row, strict=True)]

    def with_seen(self, sequence: Sequence, named: Items[NamedBlock], start: int) -> list[NamedBlock]:
        """Return the blocks `named` of full attention from index `start` on, each followed by those of the other groups
        that the token after the prompt sees, in the order of `names_of`.
        """
        if not self.are_needed:
            return list(named)
        first = self.first_seen(len(sequence.token_ids))
        found: list[NamedBlock] = []
        for index, block in enumerate(named, start):
            found.append(block)
            if index >= first:
                names = window_hashes(block.name, self.num_groups)
                found += map(NamedBlock, names, sequence.window_blocks[index])
        return found

    def _give(self, sequence: Sequence, first: int, blocks: Items[int]) -> None:
        sequence.window_blocks = [*([] for _ in range(first)), *_rows(blocks, self.num_groups)]
        sequence.num_window_freed = first


def _rows(blocks: Items[int], width: int) -> list[list[int]]:
    """Divide blocks into rows, with one block of each group."""
    return [list(blocks[at : at + width]) for at in range(0, len(blocks), width)]
