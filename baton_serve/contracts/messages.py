"""Messages between a router (ZeroMQ DEALER) and an instance (ZeroMQ ROUTER): one MessagePack frame each.

A router sends one of `ToInstance`, an instance answers with `ToRouter`, many per request. Times are relative
(`_s`), since clocks of two hosts differ. An instance forgets a router's requests when the router is gone.
"""

from typing import Literal

import msgspec

from baton_serve.contracts.events import Tier
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId, TicketId
from baton_serve.contracts.instance import AdapterRecord, InstanceRecord, LinkStatus, Load
from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.media import Images, Spans
from baton_serve.contracts.pooling import PoolingInput, PoolingParams
from baton_serve.contracts.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Names one handoff. The consumer refuses a producer of another generation, and the other way round.

    Where the source's layout is not the sink's, `source_layout` and `source_root` say how the source names the blocks
    of the same tokens.
    """

    ticket: TicketId
    source: InstanceId
    source_generation: Generation
    source_address: str
    sink: InstanceId
    sink_generation: Generation
    timeout_s: float
    request_id: RequestId = RequestId("")
    """Whose prompt it is: for log lines alone."""
    source_layout: KVLayout | None = None
    source_root: BlockHash = BlockHash(b"")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute. The first `num_prompt_tokens` of `token_ids` are the prompt; the rest was generated before.

    (A replay or a preempted sequence has such a rest.) `sequences` are the indexes of the sequences to write: `n=2`
    is `[0, 1]`. More than one index requires that nothing was generated yet.
    """

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    root: BlockHash
    """Parent of the first block's name."""
    sequences: list[int] = msgspec.field(default_factory=lambda: [0])
    priority: int = 0
    """As in vLLM: smaller runs first."""
    lora: str = ""
    """Fingerprint of the adapter that is added to the model; empty: none. `root` mixes it."""
    media: Spans = []
    """Images of the prompt, in order: names of blocks mix them. Their bytes go to who reads the prompt alone."""
    timeout_s: float = 600.0
    itl_s: float | None = None
    """The longest time between its tokens that was promised: what is computed beside it keeps it."""
    trace_headers: dict[str, str] = {}
    """The W3C trace context (`traceparent`, `tracestate`) under which an instance's spans belong; may be empty."""


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """Before computing, fetch the first `num_blocks` full blocks of the prompt, as far as they are missing here, from
    `ticket.source`. It may have fewer by now, or none: what does not come is computed."""

    ticket: Ticket
    num_blocks: int


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the prompt, sample the first token of each sequence and hand the blocks to `ticket.sink`.

    Without a ticket nothing is handed on: the request ends with its first token. `images`: each image of `work.media`
    once, in any order.
    """

    work: Work
    ticket: Ticket | None = None
    pull: Pull | None = None
    images: Images = []


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Fetch the prompt's blocks by `ticket`, then write the answer from the second token on."""

    work: Work
    ticket: Ticket


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Do all of it on this instance. `images` as in `Prefill`."""

    work: Work
    pull: Pull | None = None
    images: Images = []


class Pool(msgspec.Struct, frozen=True, tag="pool", kw_only=True):
    """Compute a vector for each input, by an instance whose record has a `pooling` profile."""

    request_id: RequestId
    inputs: list[PoolingInput]
    params: PoolingParams
    priority: int = 0
    timeout_s: float = 600.0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop and free. Unknown or finished requests are ignored. `sequence` None means all of them."""

    request_id: RequestId
    sequence: int | None = None


class SnapshotRequest(msgspec.Struct, frozen=True, tag="snapshot_request"):
    """Ask which blocks are cached now."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent each second by a router; an instance that hears none for 10 s drops that router's requests.

    The instance answers with `LoadReport`.
    """


class Adopt(msgspec.Struct, frozen=True, tag="adopt", kw_only=True):
    """`ticket.source` leaves: fetch its hottest blocks, as far as they are missing here. Fetch even if none is: the
    source waits for it."""

    ticket: Ticket
    names: list[BlockHash]


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", kw_only=True):
    """Load a low-rank adapter from a folder that the instance sees. One of this name and folder stays as it is."""

    request_id: RequestId
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", kw_only=True):
    """Take it from those that requests may name. Requests that have it go on with it."""

    request_id: RequestId
    name: str


class Heirs(msgspec.Struct, frozen=True, tag="heirs"):
    """The answer to `HotBlocks`: what instances have been told to adopt. Empty: there is nobody."""

    tickets: list[TicketId]


ToInstance = (
    Prefill
    | Decode
    | Generate
    | Pool
    | Cancel
    | SnapshotRequest
    | Heartbeat
    | Adopt
    | Heirs
    | LoadAdapter
    | UnloadAdapter
)


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    chosen: Logprob
    top: list[Logprob]
    """Most likely first."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens", kw_only=True):
    """New tokens of one sequence. `position` is the index of the first of them among the generated tokens.

    So nothing can be repeated or lost unnoticed. `finish_reason` is set on the last message of a sequence; a token that
    ended it (end of sequence, stop token) is included, and named by `stop_token_id`.
    """

    request_id: RequestId
    sequence: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Pooled(msgspec.Struct, frozen=True, tag="pooled", kw_only=True):
    """The answer to one input of a `Pool`: little-endian float32 numbers, row by row."""

    request_id: RequestId
    index: int
    shape: list[int]
    data: bytes


class PrefillReport(msgspec.Struct, frozen=True, tag="prefill_report", kw_only=True):
    """Where the time to the first token went. Sent once, with the first token. Prompt logprobs ride here."""

    request_id: RequestId
    queue_s: float
    prefill_s: float
    cached_tokens: dict[Tier, int] = {}
    """Those that were pulled are among the device's."""
    pulled_tokens: int = 0
    pulled_from: InstanceId | None = None
    pull_s: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class HandoffReport(msgspec.Struct, frozen=True, tag="handoff_report", kw_only=True):
    """Sent once by the decode instance when all blocks have arrived and its engine has taken the request up.

    `handoff_s` runs from the fetch's start to its end; `exposed_s` from the moment prefill had finished computing to
    the fetch's end: what the overlap could not hide; `to_step_s` from that moment to the decode instance's first step
    of this request, 0 where there is none. `reused_blocks` were here already and never travelled.
    """

    request_id: RequestId
    transport: str
    handoff_s: float
    exposed_s: float
    transferred_blocks: int
    reused_blocks: int
    transferred_bytes: int
    to_step_s: float = 0.0


ErrorCode = Literal["invalid", "too_long", "overloaded", "handoff_failed", "timeout", "draining", "internal"]


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """The request ended here without an answer; its resources are free. `lost` names a peer that is to blame."""

    request_id: RequestId
    code: ErrorCode
    message: str
    lost: InstanceId | None = None


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", kw_only=True):
    """All cached blocks; valid after event batch `sequence`."""

    instance: InstanceId
    generation: Generation
    sequence: int
    device: list[BlockHash]
    host: list[BlockHash] = []


class LoadReport(msgspec.Struct, frozen=True, tag="load", kw_only=True):
    instance: InstanceId
    generation: Generation
    load: Load
    links: list[LinkStatus] = []
    draining: bool = False
    adapters: list[AdapterRecord] = []


Answer = Tokens | Pooled | PrefillReport | HandoffReport | Failed
"""What belongs to one request."""


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Several answers in one frame: all that one engine step brought for one router."""

    messages: list[Answer]


class HotBlocks(msgspec.Struct, frozen=True, tag="hot_blocks", kw_only=True):
    """This instance leaves, and would hand these on within `timeout_s`; the hottest first, parents before children."""

    instance: InstanceId
    generation: Generation
    names: list[BlockHash]
    timeout_s: float


AdapterRefusal = Literal["invalid", "not_found"]


class AdapterChanged(msgspec.Struct, frozen=True, tag="adapter_changed", kw_only=True):
    """The answer to `LoadAdapter` and `UnloadAdapter`, after the `LoadReport` that shows it. `refusal` None: done."""

    request_id: RequestId
    refusal: AdapterRefusal | None = None
    message: str = ""


ToRouter = Batch | Answer | Snapshot | LoadReport | HotBlocks | AdapterChanged


class Register(msgspec.Struct, frozen=True, tag="register"):
    """To a `memory` registry: a new or renewed record that lives for `ttl_s`."""

    record: InstanceRecord
    ttl_s: float


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    instance: InstanceId
    generation: Generation


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The registry's answer to both."""

    generation: Generation


ToRegistry = Register | Leave
