"""Decides the order of sequences (priority, then arrival) and when one ends (stop token, `ignore_eos`, length); holds
its tokens and blocks.

Pure state. A request starts with one *parent sequence* that computes the prompt; with n > 1 the other sequences fork
from it when their first tokens are known.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import end_of, position_shift
from baton_serve.contracts.messages import FinishReason, TokenLogprobs, Work

Mode = Literal["generate", "prefill"]
LogitsProcessor = Callable[[list[int], list[int], Any], Any]
"""A function of the caller that changes the scores of a sequence's next token, in the offline API.

It gets the token ids of the prompt, the generated ones, and the scores, a float32 tensor [vocab_size] on the device,
and returns the scores to use.
"""


class SequenceState(Enum):
    """The states that a sequence can have, such as waiting, running or finished, each with the blocks and batch slot
    that it owns then."""

    WAITING = auto()  # owns no block
    LOADING = auto()  # owns blocks, some of which are on their way from the host tier
    READY = auto()  # owns blocks, computed up to its last token; waits for a slot
    RUNNING = auto()  # owns blocks and a slot of the batch
    AWAITING_FETCH = auto()  # prompt computed for another instance; owns blocks until released
    AWAITING_KV = auto()  # owns blocks that another instance fills
    FINISHED = auto()


class StopDecision(NamedTuple):
    """Why a token ends its sequence. `stop_token_id` is that token if it is a stop token, and None if a limit of the
    length is reached."""

    reason: FinishReason
    stop_token_id: int | None


class SortKey(NamedTuple):
    """The place of a sequence in the scheduling order; the smallest key runs first. Compared are the priority, then the
    due time, then the order of arrival, then the sequence's index in its request."""

    priority: int
    due: int
    order: int
    sequence: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One request of the engine with its sequences, from `RequestTable.add` until its last sequence has ended."""

    work: Work
    mode: Mode
    due: int
    """Due time of a `prefill` request, in scheduled prompt tokens since start (`DUE_TOKENS_PER_PROMPT_TOKEN`)."""
    order: int
    arrived_at: float
    stop_token_ids: frozenset[int]
    """Tokens that end a sequence."""
    end_token_ids: frozenset[int]
    """Tokens that `min_tokens` forbids: stop tokens and, even with `ignore_eos`, the model's end tokens, as in vLLM."""
    max_model_len: int
    unstarted: list[int] = field(default_factory=list)
    """Indexes of sequences that have no token of their own yet."""
    sequences: list["Sequence"] = field(default_factory=list)
    missing: dict[BlockHash, int] = field(default_factory=dict)
    """Reserved blocks that have not been received yet, by block hash."""
    started_at: float | None = None
    """When the prompt was first scheduled; None before."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache, in any tier."""
    host_tokens: int = 0
    """Prompt tokens among `cached_tokens` whose blocks were in the host tier."""
    num_published: int = 0
    """Number of leading blocks that were already reported as completed."""
    is_first_reported: bool = False
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    logits_processors: tuple[LogitsProcessor, ...] = ()
    is_source_published: bool = False
    """True once the blocks of the source were reported as completed."""
    has_images: bool = False
    """Whether the pixels of the prompt's images are on this instance, so that all of the prompt can be computed behind
    the first `num_unsent_tokens`."""
    num_ready_tokens: int = sys.maxsize
    """Number of leading tokens that can be computed now: those before the first image that is still awaited."""
    num_unsent_tokens: int = 0
    """Number of leading tokens with images that were not sent, because their KV was cached."""
    answer_shift: int = field(init=False)
    """The position of a generated token minus its index."""

    def __post_init__(self) -> None:
        self.answer_shift = position_shift(self.work.media, self.work.num_prompt_tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether the client has asked for logprobs of the prompt's tokens and they have not been reported
        yet."""
        return self.work.sampling.prompt_logprobs is not None and not self.is_first_reported

    @property
    def num_image_prefix_tokens(self) -> int:
        """Return how many leading tokens of the prompt cannot be computed here because images among them are on another
        instance or were not sent; 0 if all images are here."""
        return self.num_unsent_tokens if self.has_images else end_of(self.work.media)

    @property
    def must_await_first_tokens(self) -> bool:
        """Return whether no step after the prompt can be scheduled until the request's first tokens are known.

        With several sequences the first tokens decide which of them continue; a `prefill` request ends with its first
        tokens.
        """
        unstarted = self.unstarted
        return len(unstarted) > 1 or (bool(unstarted) and (self.mode == "prefill" or self.wants_prompt_logprobs))

    def check_stop(self, num_generated: int, token_id: int) -> StopDecision | None:
        """Return why a sequence of this request ends with `token_id` as its generated token number `num_generated`
        (from 1), or None if it continues."""
        sampling = self.work.sampling
        # Before `min_tokens` a stop token does not end the sequence, as in vLLM.
        if token_id in self.stop_token_ids and num_generated >= sampling.min_tokens:
            return StopDecision("stop", token_id)
        return StopDecision("length", None) if self.reaches_max_length(num_generated) else None

    def reaches_max_length(self, num_generated: int) -> bool:
        """Return whether a sequence ends with its generated token number `num_generated` (from 1) because of
        `max_tokens` or the longest context, whatever token it is."""
        length = self.work.num_prompt_tokens + num_generated
        return num_generated >= self.work.sampling.max_tokens or length >= self.max_model_len


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One generated token stream of a request, with its tokens and the KV blocks and batch slot that it owns."""

    request: Request
    index: int
    token_ids: list[int]
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    """Number of leading tokens whose KV is in `blocks`."""
    blocks: list[int] = field(default_factory=list)
    """Blocks with the KV of its tokens: of all layers, or of those with full attention if there are cache groups."""
    window_blocks: list[list[int]] = field(default_factory=list)
    """By index of a block: the blocks of each group of layers with a sliding window. The first `num_window_freed` ones
    are empty. Prompts get the last ones when they are computed."""
    num_window_freed: int = 0
    """Number of leading blocks that are freed in groups with a window, because no token sees them any more."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the leading full blocks."""
    num_registered_blocks: int = 0
    """Number of leading full blocks whose hashes are registered in the block pool."""
    checkpoint_blocks: list[int] = field(default_factory=list)
    """Blocks with the recurrent states after `num_computed_tokens`; they are copied to the slot, and then released."""
    handoff_blocks: list[int] = field(default_factory=list)
    """Blocks for the recurrent states after the prompt of a `prefill` request."""
    source_blocks: list[int] = field(default_factory=list)
    """Blocks with the cross-attention KV of the request's source, shared by all sequences that have that source."""
    must_encode: bool = False
    """Whether `source_blocks` are still empty: the first step of the sequence runs the encoder."""
    shared_tokens: int = 0
    """Number of leading tokens whose KV was cached. Prompts part after them, so they get a checkpoint there."""
    slot: int = -1
    """Slot in the batch; -1 if the sequence is not running."""
    block_table_version: int = -1
    """Changes whenever `blocks` is not an extension of its previous value."""
    num_steps_in_flight: int = 0
    """Number of steps that the device is computing and that write to `blocks`."""
    num_output_placeholders: int = 0
    """Number of tokens that follow `token_ids` and are being computed, so that their values are not known yet."""

    @property
    def sort_key(self) -> SortKey:
        """Return the key by which sequences are scheduled; the smallest one comes first."""
        return SortKey(self.request.work.priority, self.request.due, self.request.order, self.index)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Return the number of this sequence's tokens whose KV is not computed yet: 1 while it decodes, more while its
        prompt is computed."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed_tokens

    @property
    def must_await_tokens(self) -> bool:
        """Return whether no further step of this sequence can be scheduled until tokens that the device is computing
        now are known, because they may end it."""
        if not self.num_output_placeholders:
            return False
        return self.request.must_await_first_tokens or self.request.reaches_max_length(
            self.num_generated + self.num_output_placeholders
        )

    @property
    def num_ready_tokens(self) -> int:
        """Return how many tokens can be computed now: those not computed yet, up to the first image that has not come
        yet."""
        return max(0, min(self.num_uncomputed_tokens, self.request.num_ready_tokens - self.num_computed_tokens))

    @property
    def must_await_image(self) -> bool:
        """Return whether the next token to compute needs an image that has not come yet."""
        return self.num_computed_tokens >= self.request.num_ready_tokens

    @property
    def num_generated(self) -> int:
        """Return the number of tokens after the prompt whose values are known."""
        return len(self.token_ids) - self.request.work.num_prompt_tokens

    @property
    def kv_blocks(self) -> list[int]:
        """Return the blocks of all cache groups, in the order of their tokens."""
        return self.first_kv_blocks(len(self.blocks))

    def first_kv_blocks(self, count: int) -> list[int]:
        """Return the blocks of all cache groups with the indexes below `count`."""
        if not self.window_blocks:
            return self.blocks[:count]
        others = chain(self.window_blocks[:count], repeat([]))
        return [block for own, row in zip(self.blocks[:count], others, strict=False) for block in (own, *row)]

    def extend_block_hashes(self, num_full: int, block_tokens: int) -> None:
        """Compute the hashes of this sequence's first `num_full` blocks, as far as they are missing in `block_hashes`.
        All these blocks must be full; `block_tokens` is their size in tokens."""
        start = len(self.block_hashes)
        if start < num_full:
            tokens = self.token_ids[start * block_tokens : num_full * block_tokens]
            # Hashes are chained: continue from the last known block instead of hashing the whole prompt again.
            parent = self.block_hashes[-1] if self.block_hashes else None
            work, at = self.request.work, start * block_tokens
            self.block_hashes += hash_blocks(work.root, tokens, block_tokens, parent=parent, media=work.media, start=at)
