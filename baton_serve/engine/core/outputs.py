"""Defines the values that the engine returns: new tokens with finish reasons, completed blocks, reservations and
statistics.

They are plain values that share nothing with the engine's own state.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from baton_serve.contracts.events import BlockEvent
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import ErrorCode, FinishReason, TokenLogprobs
from baton_serve.contracts.vision.media_text import EmbeddingShape


class SequenceOutput(Struct, frozen=True):
    """The new tokens of one sequence in one step. `position` is the index of the first of them among the sequence's
    generated tokens."""

    request_id: RequestId
    sequence: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class FirstTokenInfo:
    """How the time to the first token of a request was spent, in seconds, and how much of its prompt was cached.
    Reported once for each request whose prompt was computed on this instance."""

    request_id: RequestId
    queue_s: float
    prefill_s: float
    cached_tokens: int
    host_tokens: int = 0
    """Prompt tokens among `cached_tokens` that came from the host tier."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class BatchSize(NamedTuple):
    """How many sequences and tokens one step computes. A decoding sequence has one token."""

    num_sequences: int = 0
    num_tokens: int = 0


class NamedBlock(NamedTuple):
    """A block hash and the index of its block in the KV cache."""

    name: BlockHash
    block: int


@dataclass(frozen=True, slots=True)
class CompletedBlocks:
    """KV blocks of a `prefill` request that are computed and can be sent to the decode worker, in the prompt's order.

    They stay in the KV cache until the request is released or cancelled.
    """

    request_id: RequestId
    blocks: list[NamedBlock]


@dataclass(frozen=True, slots=True)
class CompletedLayerGroups:
    """Reports that the layer groups with numbers `parts` of these blocks are computed, while the step still computes
    later layers."""

    parts: range
    blocks: list[CompletedBlocks]


class PooledOutput(Struct, frozen=True):
    """The result of one input of a pooling request: one vector, or one per token, as float32 in native byte order."""

    request_id: RequestId
    index: int
    shape: list[int]
    data: bytes


class EncodedFile(NamedTuple):
    """The embeddings of one image (or audio) of a request to an encoder: their shape, and the blocks that hold their
    rows. They stay until the request is released."""

    request_id: RequestId
    shape: EmbeddingShape
    blocks: list[NamedBlock]


class FailedRequest(NamedTuple):
    """A request that the engine has ended because of an error, with the error's message and code."""

    request_id: RequestId
    message: str
    code: ErrorCode = "internal"


@dataclass(slots=True)
class StepResult:
    """Everything that one step has produced, for all requests. `held` lists the requests that have ended in this step
    and keep their blocks for another worker: those of `prefill`, and those whose files are all encoded."""

    tokens: list[SequenceOutput] = field(default_factory=list)
    first: list[FirstTokenInfo] = field(default_factory=list)
    completed: list[CompletedBlocks] = field(default_factory=list)
    held: list[RequestId] = field(default_factory=list)
    events: list[BlockEvent] = field(default_factory=list)
    failed: list[FailedRequest] = field(default_factory=list)
    pooled: list[PooledOutput] = field(default_factory=list)
    encoded: list[EncodedFile] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reservation:
    """KV blocks that a decode worker has reserved for a prompt which a prefill worker computes. `names` are the hashes
    of all blocks, `missing` are the blocks to fetch, and `reused` is the number of blocks that were cached here."""

    request_id: RequestId
    names: list[BlockHash]
    reused: int
    missing: list[NamedBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The load and the counters of an engine at one moment. Rates are measured; before the first requests they are
    estimates of the warm-up."""

    free_blocks: int
    total_blocks: int
    cached_blocks: int
    held_blocks: int
    running: int
    waiting: int
    held: int
    reserved: int
    queued_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    """Prompt tokens found in the device tier since start."""
    steps: int
    host_used_blocks: int = 0
    host_total_blocks: int = 0
    host_hit_tokens: int = 0
    host_stored_blocks: int = 0
    host_loaded_blocks: int = 0
    host_damaged_blocks: int = 0
    prefill_is_measured: bool = True
    """False while `prefill_tokens_per_s` is only the warm-up's estimate."""
    longest_blocks: int = 1
    """Number of blocks of all cache groups that the longest sequence has."""
    longest_own_blocks: int = 1
    """Number of blocks among them that have full attention; equal to `longest_blocks` without cache groups."""
    spare_tokens_per_s: float = 0.0
    """Prompt tokens per second that can be computed beside the decoding sequences without violating their ITL SLOs; 0
    if none."""

    def for_tokens(self, num_blocks: int) -> int:
        """Return how many blocks' tokens the longest sequences can have in `num_blocks` blocks of all cache groups."""
        return num_blocks * self.longest_own_blocks // self.longest_blocks
