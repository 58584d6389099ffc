"""Defines the registry record of an instance, and the load that it reports to routers."""

from typing import Annotated, Literal

import msgspec

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.pooling import PoolingProfile

Role = Literal["prefill", "decode", "unified", "encode"]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an instance is at one moment. It measures its speeds (tokens per second, seconds per step) itself;
    before its first requests, they are estimates from the warm-up."""

    free_blocks: int
    total_blocks: int
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens of accepted requests that are not computed yet."""
    prefill_tokens_per_s: float = 0.0
    prefill_is_measured: bool = True
    """False while `prefill_tokens_per_s` is only the warm-up's estimate, which other processes may have slowed down:
    (nearly) no prompt has been computed since."""
    decode_step_s: float = 0.0
    spare_tokens_per_s: float = 0.0
    """Prefill headroom: prompt tokens per second that can be computed beside the decoding sequences without violating
    their ITL SLOs. 0 if a decoding sequence has no ITL SLO or if no time remains."""
    held_blocks: int = 0
    """KV blocks kept under a lease for a handoff."""
    host_used_blocks: int = 0
    """KV blocks stored in the host tier; `host_total_blocks` is its capacity."""
    host_total_blocks: int = 0


class KernelVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The comparison of one kernel (`candidate`) with the plain-torch implementation of the same operation, as logs,
    `/health` and `baton doctor --kernels` show it."""

    operation: str
    shape: str
    candidate: str
    is_right: bool
    is_chosen: bool = False
    difference: float | None = None
    """Largest difference from the twin, as a fraction of the twin's largest number. None: NaN, infinity or no number
    at all, which JSON cannot hold."""
    error: str = ""
    """The exception that it raised, if any."""
    time_s: float | None = None
    """Shortest time of one run; None if it was not measured."""

    def describe(self) -> str:
        """Return in words what is wrong with the kernel. Call it only if `is_right` is False."""
        if self.error:
            return f"it raised {self.error}"
        if self.difference is None:
            return "it computes NaN or infinity"
        return f"its largest difference from plain torch is {self.difference:.2%}"


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The speed and transport of KV transfers from another instance (`peer`) to this one, as measured here, where the
    blocks arrive."""

    peer: InstanceId
    transport: str
    bytes_per_second: float
    probed_bytes_per_second: float = 0.0
    """Speed in the last probe; 0 if the transport was not probed."""
    choice: str = ""
    """How the transport was chosen: by `rule`, `proved` by a probe, `forced` by a setting, or as `fallback` after a
    better one failed."""
    reason: str = ""
    """Results of all transports that were tried, the best transport first."""


MAX_ADAPTERS = 256
"""Largest number of LoRA adapters of one instance. Each load report to the routers lists all of them."""


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that an instance has loaded. Clients request it as model `name`; adapters with equal fingerprints
    compute equal KV."""

    name: str
    fingerprint: str
    path: str
    at_run_time: bool = False
    """True if it was loaded over HTTP and not by `--lora-modules`: routers then load it on instances that join later.
    """
    base_model_name: str | None = None
    """The parent of the adapter in the list of models; None: the name of the model."""


class RankTransfers(msgspec.Struct, frozen=True):
    """How the ranks of an instance send their parts of KV blocks. Two instances can exchange parts if their `division`
    is equal: it is a hash of the layout and of every rank's part.
    """

    division: str
    addresses: list[str]
    """Address of the ZeroMQ ROUTER socket of each rank."""


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an instance in the registry, by which routers find it. It expires after a TTL unless it is renewed
    with the current `load`."""

    instance: InstanceId
    generation: Generation
    role: Role
    model: str
    """Name of the model in requests and answers."""
    layout: KVLayout
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]
    rpc_address: str
    """Address for the routers' connections, which carry `contracts.messages`: `tcp://HOST:PORT` or `ipc://@NAME`."""
    transfer_address: str
    """Address of the ZeroMQ ROUTER socket for KV transfers; empty for pooling models."""
    events_address: str
    """Address of the ZeroMQ PUB socket for `contracts.events`."""
    http_address: str
    """`HOST:PORT` of /health and /metrics."""
    host: str
    """Equal for instances that can share memory with each other."""
    load: Load
    draining: bool = False
    sleeping: bool = False
    """True while the instance has freed its weights and its KV cache. Such a record is `draining` too."""
    model_aliases: list[str] = []
    adapters: list[AdapterRecord] = []
    reads_images: bool = False
    """True if the instance has a vision tower. Only such instances compute prompts with images."""
    finds_unsent_images: bool = False
    """True if prompts may be sent without the images whose KV is cached here (`Work.num_unsent_tokens`)."""
    embedding_layout: KVLayout | None = None
    """The layout of image embeddings that the instance can fetch; None if it computes no prompts with images. An encode
    instance has it as `layout`."""
    can_generate: bool = False
    """True if a prefill instance also serves `Generate`, so that it can generate answers while no decode or unified
    instance is ready. Prefill instances of versions before this field register without it."""
    wrong_kernels: list[str] = []
    """Operations whose kernels were wrong on the instance's device at its start, and are not used."""
    rank_transfers: RankTransfers | None = None
    """Set if each rank can send its part of the blocks itself. Older instances register without it."""
    pooling: PoolingProfile | None = None
    """Set if the model computes vectors. Such an instance generates no text, and its blocks are empty."""
