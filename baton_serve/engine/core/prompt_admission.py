"""Gives waiting sequences their KV blocks: the cached prefix and free blocks for the rest. Pure.

A prompt is admitted only when all its blocks can be allocated, so it never stops halfway. Sequences are admitted
strictly in order: one that does not fit makes all later ones wait.
"""

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
        needed = table.num_blocks_for(num_tokens) - num_reused
        num_handoff = table.limits.state_blocks if request.mode == "prefill" else 0
        num_encoded = table.sources.num_needed(request) - len(source)
        num_fresh, prefix = needed + num_handoff + num_encoded, prefix + source
        # Keep 1 % free for the growth of running sequences, or the new one would soon cause a preemption.
        reserve = pool.num_total // 100 if table.running else 0
        if pool.num_free - pool.num_taken(prefix) - num_fresh < reserve:
            self._blocked = _Blocked(sequence, pool.num_free, bool(table.running))
            return False
        # Damaged blocks are dropped and not found again: the request computes their tokens.
        if not pool.verify(prefix):
            return self.admit(sequence, now)
        cached = pool.take(prefix)
        fresh = pool.allocate(num_fresh)
        assert fresh is not None
        num_owned = len(cached) - len(source)
        sequence.blocks = cached[:num_reused] + fresh[:needed]
        sequence.checkpoint_blocks = cached[num_reused:num_owned]
        sequence.handoff_blocks = fresh[needed : needed + num_handoff]
        table.sources.give(sequence, cached[num_owned:], fresh[needed + num_handoff :])
        sequence.num_registered_blocks = num_reused
        sequence.num_computed_tokens = num_reused * block_tokens
        self._count_hits(sequence, prefix.num_host, now)
        self._blocked = None
        table.pop_waiting()
        if prefix.num_host:
            table.start_loading(sequence)
        else:
            table.add_to_batch(sequence)
        return True

    def _lacks_media(self, request: Request, num_reused: int, num_source: int) -> bool:
        """Return whether a prompt has uncached tokens that depend on images or audio which only another instance has.
        `num_reused` blocks of its tokens are cached, and `num_source` blocks of its cross-attention KV. Decode
        instances have no image or audio encoders."""
        sources = self._table.sources
        if sources.num_needed(request):
            return not num_source and not request.has_images
        return num_reused * self._table.limits.block_tokens < request.num_image_prefix_tokens

    def _find_prefix(self, sequence: Sequence) -> tuple[CachedPrefix, int]:
        """Return the cached blocks with which a sequence can start, and how many of them hold KV. The blocks after
        these, if any, hold the checkpoint of the recurrent states at the end of that KV."""
        pool, block_tokens, states = self._table.pool, self._table.limits.block_tokens, self._table.checkpoints
        # Leave at least the last token to compute: its logits give the next token.
        num_full = (len(sequence.token_ids) - 1) // block_tokens
        prefix = pool.find([] if sequence.request.wants_prompt_logprobs else sequence.block_hashes[:num_full])
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
