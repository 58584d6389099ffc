"""Defines the messages between a router and an instance, in both directions; each is one MessagePack frame.

The connections are those of `services.common.rpc`. A router sends messages of `ToInstance`; an instance answers each
request with any number of `ToRouter`. Times are durations in seconds (`_s`), since the clocks of two hosts differ. An
instance drops the requests of a router that has disconnected.
"""

from typing import Annotated, Literal

import msgspec

from baton_serve.contracts.block_hash import prompt_root
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.events import Tier
from baton_serve.contracts.flag_choices import LoadFormat
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId, TicketId
from baton_serve.contracts.instance import AdapterRecord, InstanceRecord, LinkStatus, Load
from baton_serve.contracts.media import MAX_IMAGES, Digests, Images, Spans
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.contracts.sampling import SamplingSpec

FinishReason = Literal["stop", "length", "abort"]


# Fields are encoded by name, so a new field with a default is compatible with older processes during an update.
class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Permission for the KV transfer of one request, from the instance `source` to the instance `sink`. Each of them
    refuses a peer whose generation differs from the ticket's.

    If the source's KV layout differs from the sink's, `source_layout` and `source_root` define how the source hashes
    the blocks of the same tokens.
    """

    ticket: TicketId
    source: InstanceId
    source_generation: Generation
    source_address: str
    sink: InstanceId
    sink_generation: Generation
    timeout_s: float
    request_id: RequestId = RequestId("")
    """Request whose prompt is transferred; used in log messages only."""
    source_layout: KVLayout | None = None
    source_root: BlockHash = BlockHash(b"")
    source_ranks: list[str] = []
    """Addresses of the source's ranks, if each can send its part of the blocks to the same rank of the sink."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Describes what an instance computes for a request. The first `num_prompt_tokens` of `token_ids` are the prompt;
    the others were generated before a replay.

    `sequences` are the indexes of the sequences to generate, 0 and 1 for `n=2`. Several indexes are only allowed if
    nothing was generated yet.
    """

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingSpec
    root: BlockHash
    """Parent of the first block's hash."""
    sequences: list[int] = msgspec.field(default_factory=lambda: [0])
    priority: int = 0
    """Priority as in vLLM: requests with a smaller value run first."""
    lora: str = ""
    """Fingerprint of the LoRA adapter to use; empty for none. `root` includes it."""
    media: Spans = []
    """Positions and digests of the prompt's images, in order. Block hashes include them. The files are sent only to the
    instance that computes the prompt."""
    timeout_s: float = 600.0
    itl_s: float | None = None
    """ITL SLO in seconds: the longest time between two tokens. The engine limits what it computes in the same steps."""
    trace_headers: dict[str, str] = {}
    """W3C trace context (`traceparent`, `tracestate`), the parent of the instance's spans; may be empty."""
    branches: Annotated[list[int], msgspec.Meta(max_length=8)] = []
    """Numbers of tokens after which the prompt parts from others that the router knows. An instance whose model has
    recurrent states takes a checkpoint there."""
    tenant_root: BlockHash = BlockHash(b"")
    """The root that all prompts of a tenant have, if `root` is that of one prompt (`block_hash.prompt_root`). Instances
    keep images under it. Empty: `root`."""
    num_unsent_tokens: int = 0
    """The files of images that lie within this many leading tokens are not sent, since the router knows that the KV of
    these tokens is cached. If it is not any more, the request fails, and the router sends it with all files."""
    num_bidirectional_tokens: int = 0
    """Number of leading tokens that attend to each other in both directions, for models whose prompts do; 0: all of the
    prompt. It is less than `num_prompt_tokens` in a beam search, in which generated tokens count as prompt."""

    @property
    def tenant(self) -> BlockHash:
        """Return the root hash that separates the images of tenants."""
        return self.tenant_root or self.root

    @property
    def bidirectional_tokens(self) -> int:
        """Return how many leading tokens attend to each other in both directions, if the model's prompts do."""
        return self.num_bidirectional_tokens or self.num_prompt_tokens


def with_prompt_root(work: Work, layout: KVLayout) -> Work:
    """Return `work`, whose root is that of its tenant, with the root that its prompt has in a KV layout. The two differ
    only for models whose prompts are seen in both directions."""
    if layout.has_bidirectional_prompts is not True:
        return work
    root = prompt_root(work.root, work.token_ids[: work.bidirectional_tokens], work.media)
    return msgspec.structs.replace(work, root=root, tenant_root=work.root)


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """Asks an instance to fetch cached blocks of the prompt from another instance, `ticket.source`, before it computes:
    the ones of the first `num_blocks` full blocks that it does not have.

    The source may have evicted some or all of them; blocks that do not arrive are computed.
    """

    ticket: Ticket
    num_blocks: int


class FetchEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """Before computing, fetch the embeddings of the images `digests` from the encode instance `ticket.source`.

    The ticket has the layout and the root of its blocks. Embeddings that do not arrive in `ticket.timeout_s` are
    computed from the image files.
    """

    ticket: Ticket
    digests: Digests


Fetches = Annotated[list[FetchEmbeddings], msgspec.Meta(max_length=64)]


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """Asks a prefill worker to compute the prompt, sample the first token of each sequence, and hand the KV blocks off
    to the decode worker `ticket.sink`.

    Without a ticket nothing is handed off: the request ends with its first token. `images` has each image file of
    `work.media` once, in any order, except those of `work.num_unsent_tokens`; `embeddings` says from where some of them
    can be fetched already encoded.
    """

    work: Work
    ticket: Ticket | None = None
    pull: Pull | None = None
    images: Images = []
    embeddings: Fetches = []


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Asks a decode worker to fetch the prompt's KV blocks from the prefill worker in `ticket`, then to generate the
    answer from the second token on."""

    work: Work
    ticket: Ticket


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Asks an instance to compute the prompt and generate the whole answer. `images` and `embeddings` are as in
    `Prefill`."""

    work: Work
    pull: Pull | None = None
    images: Images = []
    embeddings: Fetches = []


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Encode files of images, videos and audio, or take their embeddings from the cache, and hand them to
    `ticket.sink`, in blocks with the hashes of `contracts.block_hash.embedding_hashes`. It has no answer: the sink
    reports what does not arrive. `spans` has, for each file, the digests of its spans in the prompt. A file is empty if
    the router knows its embeddings to be cached; if they are not any more, the sink encodes it.
    """

    ticket: Ticket
    images: Images
    spans: Annotated[list[Digests], msgspec.Meta(max_length=MAX_IMAGES)]


class Pool(msgspec.Struct, frozen=True, tag="pool", kw_only=True):
    """Asks an instance with a pooling model to compute the result (embedding, score or class probabilities) of each
    input. Sent only to instances whose `InstanceRecord` has a `pooling` profile."""

    request_id: RequestId
    inputs: list[PoolingInput]
    params: PoolingSpec
    priority: int = 0
    timeout_s: float = 600.0
    images: Images = []
    """The files of the images of all inputs, each once."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Asks an instance to end a request, or only its sequence with index `sequence`, and to free its resources. Unknown
    or finished ones are ignored."""

    request_id: RequestId
    sequence: int | None = None


class SnapshotRequest(msgspec.Struct, frozen=True, tag="snapshot_request"):
    """Asks an instance for the hashes of all its cached blocks. It answers with `Snapshot`."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent by a router to each instance each second. An instance that receives none for 10 s drops the router's
    requests.

    The instance answers with `LoadReport`.
    """


class MigrateIn(msgspec.Struct, frozen=True, tag="adopt", kw_only=True):
    """Asks an instance to fetch the most used cached blocks of `ticket.source`, an instance that drains. `names` are
    the hashes of these blocks.

    The receiver fetches the blocks that it does not have. It sends the `Fetch` even if it has all of them, because the
    source waits for it.
    """

    ticket: Ticket
    names: list[BlockHash]


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", kw_only=True):
    """Asks an instance to load a LoRA adapter from a folder on its host. Without `in_place`, nothing is done if it is
    loaded under this name from this folder already."""

    request_id: RequestId
    name: str
    path: str
    in_place: bool = False
    """Read the folder in any case, and replace an adapter of the same name."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", kw_only=True):
    """Asks an instance to refuse new requests for a LoRA adapter. Running requests continue to use it."""

    request_id: RequestId
    name: str


EngineAction = Literal["reset_prefix_cache", "start_profile", "stop_profile"]
"""Actions of the engine, between two steps."""
ModelAction = Literal["pause", "resume", "check_weights", "sleep", "wake_up", "update_weights", "restore_weights"]
"""Actions that free or replace the model. `pause` refuses new requests and waits for the running ones; the next action,
or a deadline, ends it. `restore_weights` undoes the last `update_weights`."""


class WeightsSource(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that an instance loads while it runs. `version` identifies one update of the weights; it is empty for
    the weights of the start. KV of different versions has different block hashes."""

    model: str
    """Folder on the instance's host."""
    load_format: LoadFormat
    version: str = ""


class EngineCommand(msgspec.Struct, frozen=True, tag="engine_command", kw_only=True):
    """An operator's command to an instance, such as to sleep or to load other weights. The instance answers with
    `EngineCommandDone`.

    `timeout_s` is the time in which a `pause` waits for running requests. `weights` belong to `check_weights` and
    `update_weights`.
    """

    request_id: RequestId
    action: EngineAction | ModelAction
    timeout_s: float = 0.0
    weights: WeightsSource | None = None


class MigrationTickets(msgspec.Struct, frozen=True, tag="heirs"):
    """The router's answer to `HotBlocks`, for an instance that drains: the ids of the tickets by which other instances
    will fetch its blocks; empty if no instance can take them."""

    tickets: list[TicketId]


ToInstance = (
    Prefill
    | Decode
    | Generate
    | Encode
    | Pool
    | Cancel
    | SnapshotRequest
    | Heartbeat
    | MigrateIn
    | MigrationTickets
    | LoadAdapter
    | UnloadAdapter
    | EngineCommand
)


# Half a million of them may be decoded at once. They can be in no cycle, so the garbage collector need not visit them.
class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log-probability of a token, and its rank among all tokens (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The logprobs at one position of a sequence: of the chosen token, and of the most likely tokens."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    """The most likely tokens, in descending order."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens", kw_only=True):
    """New tokens of one sequence, from an instance to the router. `position` is the index of the first of them among
    all generated tokens, so that the router detects repeated or lost tokens.

    `finish_reason` is set on the last message of a sequence. If a token ended the sequence (end of sequence or a stop
    token), it is included, and `stop_token_id` is its id.
    """

    request_id: RequestId
    sequence: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Pooled(msgspec.Struct, frozen=True, tag="pooled", kw_only=True):
    """The result of one input of a `Pool` message: little-endian float32 numbers, row by row. `index` is the input's
    number in the message."""

    request_id: RequestId
    index: int
    shape: list[int]
    data: bytes


class EncodedLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The logprobs of all tokens of a prompt, encoded for a message. `contracts.prompt_logprobs` encodes and decodes
    them."""

    num_logprobs: int
    pieces: list[bytes]
    """Each is the MessagePack of a `list[TokenLogprobs | None]`; together they have one entry for each token."""


class PrefillReport(msgspec.Struct, frozen=True, tag="prefill_report", kw_only=True):
    """How the time to the first token was spent, in seconds, how much of the prompt was cached, and the prompt
    logprobs. Sent once for each request, before the first token."""

    request_id: RequestId
    queue_s: float
    prefill_s: float
    cached_tokens: dict[Tier, int] = {}
    """Cached prompt tokens by tier; pulled ones count as `device`."""
    pulled_tokens: int = 0
    pulled_from: InstanceId | None = None
    pull_s: float = 0.0
    failed_encoders: list[InstanceId] = []
    """Encode instances whose embeddings did not arrive, so that this instance has encoded the images."""
    prompt_logprobs: EncodedLogprobs | None = None


class HandoffReport(msgspec.Struct, frozen=True, tag="handoff_report", kw_only=True):
    """Sent once by the decode worker when all KV blocks have arrived and its engine has taken up the request.

    `handoff_s` is the duration of the fetch. `exposed_s` is the time from the end of the prompt's computation to the
    end of the fetch: the part that did not overlap with computation. `to_step_s` is the time from the end of the
    prompt's computation to the decode worker's first step of this request; 0 if there is none. `reused_blocks` were
    cached by the decode worker and not transferred.
    """

    request_id: RequestId
    transport: str
    handoff_s: float
    exposed_s: float
    transferred_blocks: int
    reused_blocks: int
    transferred_bytes: int
    to_step_s: float = 0.0


# The router decides by this code whether a request is replayed, and with which HTTP status it ends.
ErrorCode = Literal["invalid", "too_long", "overloaded", "handoff_failed", "timeout", "draining", "internal"]


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """Reports that a request has ended with an error, and that its resources on this instance are free. `lost` names
    another instance whose loss caused it."""

    request_id: RequestId
    code: ErrorCode
    message: str
    lost: InstanceId | None = None


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", kw_only=True):
    """The hashes of all cached blocks of an instance, on its device and in its host memory, after its event batch
    number `sequence`."""

    instance: InstanceId
    generation: Generation
    sequence: int
    device: list[BlockHash]
    host: list[BlockHash] = []


class LoadReport(msgspec.Struct, frozen=True, tag="load", kw_only=True):
    """The current load and state of an instance. It is the answer to `Heartbeat`, and is also sent when the state
    changes (drain, adapters)."""

    instance: InstanceId
    generation: Generation
    load: Load
    links: list[LinkStatus] = []
    draining: bool = False
    adapters: list[AdapterRecord] = []


# Tagged unions: msgspec decodes a frame to the right type by its `tag`.
Answer = Tokens | Pooled | PrefillReport | HandoffReport | Failed
"""Messages that belong to one request."""


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Several messages in one frame: everything that one engine step has produced for the requests of one router."""

    messages: list[Answer]


class HotBlocks(msgspec.Struct, frozen=True, tag="hot_blocks", kw_only=True):
    """Reports that this instance drains, and offers its most used cached blocks to other instances for `timeout_s`.

    `names` are the hashes of these blocks, the most used first, and each after the block that precedes it in its
    prompt.
    """

    instance: InstanceId
    generation: Generation
    names: list[BlockHash]
    timeout_s: float


AdapterRefusal = Literal["invalid", "not_found"]


class AdapterChanged(msgspec.Struct, frozen=True, tag="adapter_changed", kw_only=True):
    """The answer to `LoadAdapter` and `UnloadAdapter`, sent after the `LoadReport` that shows the change. `refusal` is
    None on success."""

    request_id: RequestId
    refusal: AdapterRefusal | None = None
    message: str = ""


class EngineCommandDone(msgspec.Struct, frozen=True, tag="engine_command_done", kw_only=True):
    """The answer to `EngineCommand`. `error` is None on success; then `result` is a text for the operator.

    `is_conflict` says that the command failed because of what the instance does now, such as running requests, and may
    succeed later.
    """

    request_id: RequestId
    error: str | None = None
    is_conflict: bool = False
    result: str = ""


ToRouter = Batch | Answer | Snapshot | LoadReport | HotBlocks | AdapterChanged | EngineCommandDone


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Asks a registry in a router's memory to add or renew the record of an instance, which expires after `ttl_s`."""

    record: InstanceRecord
    ttl_s: float


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Asks a registry in a router's memory to remove the record of an instance."""

    instance: InstanceId
    generation: Generation


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The registry's answer to `Register` and `Leave`. After `Register`, `generation` is the one whose record is valid
    now: another one than the sender's if a newer process of the instance has registered."""

    generation: Generation


ToRegistry = Register | Leave
