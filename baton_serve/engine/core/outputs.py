"""What the engine tells its owner: the results of a step, of a reservation, and its state in numbers.

Plain values; nothing here is shared with the engine's own state.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from baton_serve.contracts.events import BlockEvent
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import ErrorCode, FinishReason, TokenLogprobs


class SequenceOutput(Struct, frozen=True):
    """New tokens of one sequence; `position` is the index of the first among the generated tokens."""

    request_id: RequestId
    sequence: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class FirstTokenInfo:
    """Where the time to the first token went; once per request that computed its prompt here."""

    request_id: RequestId
    queue_s: float
    prefill_s: float
    cached_tokens: int
    host_tokens: int = 0
    """Cached tokens that came from the host tier."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class NamedBlock(NamedTuple):
    """A block's name and its index in the KV cache."""

    name: BlockHash
    block: int


@dataclass(frozen=True, slots=True)
class CompletedBlocks:
    """Blocks of a `prefill` request whose KV is now computed, in prompt order. They stay where they are
    until the request is released or cancelled."""

    request_id: RequestId
    blocks: list[NamedBlock]


@dataclass(frozen=True, slots=True)
class CompletedLayerGroups:
    """These parts of these blocks, groups of their layers, are computed, before the whole step is."""

    parts: range
    blocks: list[CompletedBlocks]


class PooledOutput(Struct, frozen=True):
    """The vector of one input of a request, or the matrix of its tokens' vectors: float32, in this machine's order."""

    request_id: RequestId
    index: int
    shape: list[int]
    data: bytes


class FailedRequest(NamedTuple):
    request_id: RequestId
    message: str
    code: ErrorCode = "internal"


@dataclass(slots=True)
class StepResult:
    tokens: list[SequenceOutput] = field(default_factory=list)
    first: list[FirstTokenInfo] = field(default_factory=list)
    completed: list[CompletedBlocks] = field(default_factory=list)
    held: list[RequestId] = field(default_factory=list)
    events: list[BlockEvent] = field(default_factory=list)
    failed: list[FailedRequest] = field(default_factory=list)
    pooled: list[PooledOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory for a prompt that another instance computes. `missing` are the blocks to fetch."""

    request_id: RequestId
    names: list[BlockHash]
    reused: int
    missing: list[NamedBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Rates are measured inside; before any work they come from the warm-up."""

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
    """In the device tier."""
    steps: int
    host_used_blocks: int = 0
    host_total_blocks: int = 0
    host_hit_tokens: int = 0
    host_stored_blocks: int = 0
    host_loaded_blocks: int = 0
    prefill_is_measured: bool = True
    """Since the warm-up."""
    spare_tokens_per_s: float = 0.0
    """Of prompts, beside those who write and within what each of them was promised; 0: not at all."""
