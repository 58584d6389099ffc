"""What an instance says about itself: to the registry, and to routers as its load changes."""

from typing import Annotated, Literal

import msgspec

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.pooling import PoolingProfile

Role = Literal["prefill", "decode", "unified"]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Rates are measured by the instance itself; before any work they come from its warm-up."""

    free_blocks: int
    total_blocks: int
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens admitted and not yet computed."""
    prefill_tokens_per_s: float = 0.0
    prefill_is_measured: bool = True
    """False: that is of the warm-up, beside which others may have started; no prompt to speak of was computed since."""
    decode_step_s: float = 0.0
    spare_tokens_per_s: float = 0.0
    """Of prompts, computed beside those who write, within the time between tokens that each of them was promised; 0:
    not at all, for one was promised nothing or there is no such time."""
    held_blocks: int = 0
    """Blocks kept under a lease for a handoff."""
    host_used_blocks: int = 0
    """In the host tier, as the next."""
    host_total_blocks: int = 0


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One link to a peer instance as its consumer measured it."""

    peer: InstanceId
    transport: str
    bytes_per_second: float
    probed_bytes_per_second: float = 0.0
    """In the last probe; 0: there was none."""
    choice: str = ""
    """How the transport was chosen: `rule`, `proved` by a probe, `forced`, or `fallback` for a better one."""
    reason: str = ""
    """Why this transport: what became of each that was tried, best first."""


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A low-rank adapter that an instance has loaded. `name` is what clients ask for; equal fingerprints, equal KV."""

    name: str
    fingerprint: str
    path: str
    at_run_time: bool = False
    """Asked for over HTTP, not by the instance's settings: instances that join are told to load it too."""


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A registry record. It lives for a TTL and is renewed with fresh `load`."""

    instance: InstanceId
    generation: Generation
    role: Role
    model: str
    """Name under which clients ask for the model."""
    layout: KVLayout
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]
    rpc_address: str
    """ZeroMQ ROUTER that takes `contracts.messages`."""
    transfer_address: str
    """ZeroMQ ROUTER of this instance's block transfer."""
    events_address: str
    """ZeroMQ PUB of `contracts.events`."""
    http_address: str
    """`host:port` of /health and /metrics."""
    host: str
    """Equal for instances that can share memory."""
    load: Load
    draining: bool = False
    model_aliases: list[str] = []
    adapters: list[AdapterRecord] = []
    reads_images: bool = False
    """Has a vision tower: prompts with images are read by such instances alone."""
    pooling: PoolingProfile | None = None
    """Set where the model answers with vectors; such an instance writes no text and its blocks are empty."""
