"""Decides whether a waiting sequence may start: prefix cache hits (device, host tier), free blocks for the whole
prompt, watermark, batch slot. Pure.

A prompt is admitted only when all its blocks can be allocated, so it never stops halfway. Sequences are admitted
strictly in order: one that does not fit makes all later ones wait.
"""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple

from baton_serve.engine.core.block_pool import CachedPrefix
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.sequence import Request, Sequence


class _Blocked(NamedTuple):
    """Remembers why the first waiting sequence `head` could not start: only `num_free` blocks were free, too few for
    it. `was_running` says whether other sequences were running, for which some blocks are reserved."""

    head: Sequence
    num_free: int
    was_running: bool


class _FreshBlocks(NamedTuple):
    """How many free blocks a sequence needs, by their use."""

    attention: int
    handoff: int
    window: int
    source: int


class PromptAdmission:
    """Starts waiting sequences: finds their cached prefix and allocates their KV blocks. Also counts prefix cache hits.
    Only the engine's thread may call it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._blocked: _Blocked | None = None
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        """Prompt tokens found in the device tier since start."""
        self.num_host_hit_tokens = 0
        self.requests_missing_images: list[Request] = []
        """Requests that were removed from the queue because blocks of their images are not cached and the images are on
        another instance. The engine fails them."""

    @property
    def is_short_of_blocks(self) -> bool:
        """Return whether the first waiting sequence cannot start because too few blocks are free. Then `Engine.reserve`
        must not take blocks either."""
        return self._blocked is not None and self._blocked.head is self._table.peek_waiting()

    def is_still_blocked(self, head: Sequence) -> bool:
        """Return whether `head`, the first waiting sequence, was refused for lack of free blocks and nothing has
        changed since, so that `admit` would refuse it again."""
        blocked = self._blocked
        if blocked is None or blocked.head is not head or self._table.pool.num_free > blocked.num_free:
            return False
        return blocked.was_running == bool(self._table.running)

    def admit(self, sequence: Sequence, now: float) -> bool:
        """Start `sequence`, the first waiting one: allocate its blocks and add it to the batch. Return False if no
        batch slot is free, or too few blocks, or if the request's images are missing here; then it is added to
        `requests_missing_images`.

        If part of its cached prefix is in the host tier, it joins the batch only after these blocks have been copied to
        the device.
        """
        table = self._table
        pool, block_tokens = table.pool, table.limits.block_tokens
        if not table.has_free_slot or self.is_still_blocked(sequence):
            return False
        request = sequence.request
        # A preempted request starts its prompt again, and with it the prompt logprobs.
        request.prompt_logprobs = []
        num_tokens = len(sequence.token_ids)
        sequence.extend_block_hashes(num_tokens // block_tokens, block_tokens)
        prefix, num_reused = self._find_prefix(sequence)
        source = table.sources.find(request.work)
        if self._lacks_media(request, num_reused, len(source)):
            table.pop_waiting()
            self.requests_missing_images.append(request)
            return False
        num_blocks = table.num_blocks_for(num_tokens)
        fresh = _FreshBlocks(
            num_blocks - num_reused,
            table.limits.state_blocks if request.mode == "prefill" else 0,
            table.windows.num_at_start(num_reused, num_blocks),
            table.sources.num_needed(request) - len(source),
        )
        prefix += source
        # Keep 1 % free for the growth of running sequences, or the new one would soon cause a preemption.
        reserve = pool.num_total // 100 if table.running else 0
        if pool.num_free - pool.num_taken(prefix) - sum(fresh) < reserve:
            self._blocked = _Blocked(sequence, pool.num_free, bool(table.running))
            return False
        # Damaged blocks are dropped and not found again: the request computes their tokens.
        if not pool.verify(prefix):
            return self.admit(sequence, now)
        cached = _cut(pool.take(prefix), [num_reused, len(prefix) - num_reused - len(source), len(source)])
        self._give(sequence, cached, fresh)
        sequence.num_registered_blocks = num_reused
        sequence.num_computed_tokens = num_reused * block_tokens
        # Of each token, only the block of full attention is counted.
        counted = prefix.first(num_reused) if table.windows.are_needed else prefix
        self._count_hits(sequence, counted.num_host, now)
        self._blocked = None
        table.pop_waiting()
        if prefix.num_host:
            table.start_loading(sequence)
        else:
            table.add_to_batch(sequence)
        return True

    def _give(self, sequence: Sequence, cached: list[list[int]], fresh: "_FreshBlocks") -> None:
        """Allocate fresh blocks and give them to a sequence, with the cached ones: those of KV, those of a checkpoint
        or of layers with a sliding window, and those of its source.
        """
        allocated = self._table.pool.allocate(sum(fresh))
        assert allocated is not None
        own, sequence.handoff_blocks, window, encoded = _cut(allocated, fresh)
        sequence.blocks = cached[0] + own
        if self._table.windows.are_needed:
            self._table.windows.give(sequence, len(cached[0]), cached[1] + window)
        else:
            sequence.checkpoint_blocks = cached[1]
        self._table.sources.give(sequence, cached[2], encoded)

    def _lacks_media(self, request: Request, num_reused: int, num_source: int) -> bool:
        """Return whether a prompt has uncached tokens that depend on images or audio which only another instance has.
        `num_reused` blocks of its tokens are cached, and `num_source` blocks of its cross-attention KV. Decode
        instances have no image or audio encoders."""
        sources = self._table.sources
        if sources.num_needed(request):
            return not num_source and not request.has_images
        return num_reused * self._table.limits.block_tokens < request.num_image_prefix_tokens

    def _find_prefix(self, sequence: Sequence) -> tuple[CachedPrefix, int]:
        """Return the cached blocks with which a sequence can start, and how many of them hold KV of full attention. The
        blocks after these, if any, hold the checkpoint of the recurrent states at the end of that KV, or the KV of
        layers with a sliding window that the next token sees."""
        pool, block_tokens, states = self._table.pool, self._table.limits.block_tokens, self._table.checkpoints
        # Leave at least the last token to compute: its logits give the next token.
        num_tokens = len(sequence.token_ids)
        num_full = (num_tokens - 1) // block_tokens
        if self._table.limits.has_bidirectional_prompts and num_full * block_tokens == num_tokens - 1:
            # A single token would be computed like one of an answer, which does not see the prompt beyond its window.
            num_full = max(0, num_full - 1)
        prefix = pool.find([] if sequence.request.wants_prompt_logprobs else sequence.block_hashes[:num_full])
        windows = self._table.windows
        if windows.are_needed:
            count = windows.find_deepest(prefix.names)
            count = count if windows.fits(count, self._table.num_blocks_for(len(sequence.token_ids))) else 0
            return prefix.first(count) + windows.find(prefix.names[:count]), count
        if not states.are_needed:
            return prefix, len(prefix)
        # Cached KV is of use only up to a checkpoint.
        count = states.find_deepest(prefix.names)
        sequence.shared_tokens = len(prefix) * block_tokens
        if not count:
            return prefix.first(0), 0
        return prefix.first(count) + states.find(prefix.names[count - 1]), count

    def _count_hits(self, sequence: Sequence, num_host: int, now: float) -> None:
        """Count the prefix cache hits of a request when its first sequence gets its blocks. `num_host` of the cached
        blocks are in the host tier; `now` is the start of the request's computation."""
        request, block_tokens = sequence.request, self._table.limits.block_tokens
        if request.started_at is None:
            request.started_at = now
            request.cached_tokens = sequence.num_computed_tokens
            request.host_tokens = min(num_host * block_tokens, request.cached_tokens)
            self.num_prefix_query_tokens += len(sequence.token_ids)
            self.num_prefix_hit_tokens += request.cached_tokens - request.host_tokens
            self.num_host_hit_tokens += request.host_tokens


def _cut(blocks: list[int], sizes: Iterable[int]) -> list[list[int]]:
    """Divide blocks into parts of these sizes."""
    return [blocks[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
