"""A request and its sequences as the scheduler sees them: token ids, owned blocks, and where each one stands.

Pure state. A request starts with one sequence, the *trunk*, that computes the prompt; sequences of n > 1 fork from
it when their first tokens are known.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import end_of
from baton_serve.contracts.messages import FinishReason, TokenLogprobs, Work

Mode = Literal["generate", "prefill"]


class SequenceState(Enum):
    WAITING = auto()  # owns no block
    LOADING = auto()  # owns blocks, some of which are on their way from the host tier
    READY = auto()  # owns blocks, computed up to its last token; waits for a slot
    RUNNING = auto()  # owns blocks and a slot of the batch
    AWAITING_FETCH = auto()  # prompt computed for another instance; owns blocks until released
    AWAITING_KV = auto()  # owns blocks that another instance fills
    FINISHED = auto()


class StopDecision(NamedTuple):
    """Why a token ended its sequence; `stop_token_id` only if the token itself did."""

    reason: FinishReason
    stop_token_id: int | None


class SortKey(NamedTuple):
    """What runs first: smaller priority, then what is due earlier, then earlier arrival, then sequence index."""

    priority: int
    due: int
    order: int
    sequence: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    work: Work
    mode: Mode
    due: int
    order: int
    arrived_at: float
    stop_token_ids: frozenset[int]
    max_model_len: int
    unstarted: list[int] = field(default_factory=list)  # sequence indexes that have no token of their own yet
    sequences: list["Sequence"] = field(default_factory=list)
    missing: dict[BlockHash, int] = field(default_factory=dict)  # reserved, not received
    started_at: float | None = None
    cached_tokens: int = 0
    host_tokens: int = 0  # cached ones that lay in the host tier
    num_published: int = 0  # leading blocks already reported as completed
    is_first_reported: bool = False
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    has_images: bool = False  # those of the prompt are here: all of it can be computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.work.sampling.prompt_logprobs is not None and not self.is_first_reported

    @property
    def num_image_prefix_tokens(self) -> int:
        """Leading tokens that cannot be computed here: their images are elsewhere."""
        return 0 if self.has_images else end_of(self.work.media)

    @property
    def must_await_first_tokens(self) -> bool:
        """Nothing follows the prompt before its first tokens are known: they decide who goes on, or end it."""
        unstarted = self.unstarted
        return len(unstarted) > 1 or (bool(unstarted) and (self.mode == "prefill" or self.wants_prompt_logprobs))

    def verdict(self, num_generated: int, token_id: int) -> StopDecision | None:
        """Judges the `num_generated`-th generated token of a sequence; None: it goes on."""
        sampling = self.work.sampling
        if token_id in self.stop_token_ids and num_generated >= sampling.min_tokens:
            return StopDecision("stop", token_id)
        return StopDecision("length", None) if self.reaches_max_length(num_generated) else None

    def reaches_max_length(self, num_generated: int) -> bool:
        """The `num_generated`-th generated token is a sequence's last, whatever it is."""
        length = self.work.num_prompt_tokens + num_generated
        return num_generated >= self.work.sampling.max_tokens or length >= self.max_model_len


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    request: Request
    index: int
    token_ids: list[int]
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0  # leading tokens whose KV is in `blocks`
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)  # of leading full blocks
    num_registered_blocks: int = 0  # leading full blocks the pool knows the names of
    slot: int = -1
    block_table_version: int = -1  # changes whenever `blocks` is not an extension of what it was
    num_steps_in_flight: int = 0  # steps that are being computed and write to `blocks`
    num_output_placeholders: int = (
        0  # tokens that are being computed: known to follow `token_ids`, not yet what they are
    )

    @property
    def key(self) -> SortKey:
        return SortKey(self.request.work.priority, self.request.due, self.request.order, self.index)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is to be computed; 1 in the steady state of decoding."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed_tokens

    @property
    def must_await_tokens(self) -> bool:
        """What this sequence computes next depends on which tokens the steps being computed give."""
        if not self.num_output_placeholders:
            return False
        return self.request.must_await_first_tokens or self.request.reaches_max_length(
            self.num_generated + self.num_output_placeholders
        )

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.request.work.num_prompt_tokens

    def extend_block_hashes(self, num_full: int, block_tokens: int) -> None:
        """Makes `block_hashes` cover the first `num_full` blocks."""
        start = len(self.block_hashes)
        if start < num_full:
            tokens = self.token_ids[start * block_tokens : num_full * block_tokens]
            parent = self.block_hashes[-1] if self.block_hashes else None
            work, at = self.request.work, start * block_tokens
            self.block_hashes += hash_blocks(work.root, tokens, block_tokens, parent=parent, media=work.media, start=at)
