"""Values that the engine returns to its owner: results of a step or a reservation, and statistics.

They are plain values that share nothing with the engine's own state.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from baton_serve.contracts.events import BlockEvent
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import ErrorCode, FinishReason, TokenLogprobs


class SequenceOutput(Struct, frozen=True):
    """New tokens of one sequence. `position` is the index of the first of them among the generated tokens."""

    request_id: RequestId
    sequence: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class FirstTokenInfo:
    """How the time to the first token was spent. Reported once per request whose prompt was computed here."""

    request_id: RequestId
    queue_s: float
    prefill_s: float
    cached_tokens: int
    host_tokens: int = 0
    """Prompt tokens among `cached_tokens` that came from the host tier."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class BatchSize(NamedTuple):
    """How much a step computes. `num_tokens` counts one token for each decoding sequence."""

    num_sequences: int = 0
    num_tokens: int = 0


class NamedBlock(NamedTuple):
    """A block hash and the index of its block in the KV cache."""

    name: BlockHash
    block: int


@dataclass(frozen=True, slots=True)
class CompletedBlocks:
    """Blocks of a `prefill` request whose KV is now computed, in prompt order.

    They stay in the KV cache until the request is released or cancelled.
    """

    request_id: RequestId
    blocks: list[NamedBlock]


@dataclass(frozen=True, slots=True)
class CompletedLayerGroups:
    """Reports that the layer groups `parts` of these blocks are computed, while the step still computes
    later layers.
    """

    parts: range
    blocks: list[CompletedBlocks]


class PooledOutput(Struct, frozen=True):
    """The result of one input of a pooling request: one vector, or one per token, as float32 in native byte order."""

    request_id: RequestId
    index: int
    shape: list[int]
    data: bytes


class FailedRequest(NamedTuple):
    """A request that the engine has ended with an error, and the reason."""

    request_id: RequestId
    message: str
    code: ErrorCode = "internal"


@dataclass(slots=True)
class StepResult:
    """Everything that one step has produced. `held` are finished `prefill` requests, which keep their blocks."""

    tokens: list[SequenceOutput] = field(default_factory=list)
    first: list[FirstTokenInfo] = field(default_factory=list)
    completed: list[CompletedBlocks] = field(default_factory=list)
    held: list[RequestId] = field(default_factory=list)
    events: list[BlockEvent] = field(default_factory=list)
    failed: list[FailedRequest] = field(default_factory=list)
    pooled: list[PooledOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks reserved for a prompt that another instance computes. `missing` are those to fetch; `reused` counts cached
    ones."""

    request_id: RequestId
    names: list[BlockHash]
    reused: int
    missing: list[NamedBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine. Rates are measured; before any work they are estimates of the warm-up."""

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
    spare_tokens_per_s: float = 0.0
    """Prompt tokens per second that can be computed beside the decoding sequences without violating their ITL SLOs; 0
    if none."""
