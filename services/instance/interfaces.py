"""Defines the interfaces (protocols) of engine, KV transfer and routers that request handling needs, so that tests can
use fakes.

The real classes match them structurally and do not import this module; tests use fakes. Value types are imported from
the modules that define them.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.events import BlockEvent
from baton_serve.contracts.identity import BlockHash, RequestId, TicketId
from baton_serve.contracts.instance import LinkStatus
from baton_serve.contracts.messages import Ticket, ToRouter, Work
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.contracts.vision.media_text import EmbeddingShape
from baton_serve.engine.core.outputs import BatchSize, EngineStats, NamedBlock, Reservation, StepResult
from baton_serve.engine.model.vision.image_types import NO_PIXELS, Pixels
from baton_serve.kvtransfer import Translation
from baton_serve.services.common.rpc.instance_link import RouterId

Mode = Literal["generate", "prefill"]


class SteppingPort(Protocol):
    """The interface of any engine that works in steps. Its methods are called only from the engine thread, except
    `last_batch`.
    """

    @property
    def layout(self) -> KVLayout: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def last_batch(self) -> BatchSize:
        """Return the size of the batch (sequences and tokens) whose step was launched last. Any thread may call it."""

    def step(self) -> StepResult: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class PoolingPort(SteppingPort, Protocol):
    """The interface of `engine.pooling.engine.PoolingEngine`, which computes vectors. Its methods are called only from
    the engine thread.
    """

    def pool(
        self,
        request_id: RequestId,
        inputs: list[PoolingInput],
        params: PoolingSpec,
        *,
        priority: int = 0,
        pixels: Pixels = NO_PIXELS,
    ) -> None: ...
    def cancel(self, request_id: RequestId) -> None: ...


class EncoderPort(SteppingPort, Protocol):
    """The interface of `engine.pooling.encode_engine.ImageEncoder`. Engine thread only."""

    def claim(self, request_id: RequestId, root: BlockHash, digests: Sequence[bytes]) -> list[bytes]: ...
    def add(self, request_id: RequestId, images: Pixels) -> None: ...
    def blocks_of(self, request_id: RequestId) -> list[tuple[EmbeddingShape, list[NamedBlock]]]: ...
    def release(self, request_id: RequestId) -> None: ...
    def cached_block_hashes(self) -> list[BlockHash]: ...


class EnginePort(SteppingPort, Protocol):
    """The interface of `engine.Engine`, which generates text. Its methods are called only from the engine thread."""

    def compile_grammar(self, grammar: str) -> "Future[object]": ...
    def add(
        self,
        work: Work,
        *,
        mode: Mode = "generate",
        pixels: Pixels = NO_PIXELS,
        sends_parts: bool = False,
        awaited: Collection[bytes] = (),
    ) -> None: ...
    def supply_images(self, request_id: RequestId, pixels: Pixels) -> None: ...
    def mirror(self, request_id: RequestId) -> None: ...
    def reserve(self, work: Work) -> Reservation | None: ...
    def mark_received(self, request_id: RequestId, names: Sequence[BlockHash], *, in_parts: bool = False) -> None: ...
    def admit(self, request_id: RequestId, first_tokens: dict[int, int]) -> None: ...
    def admit_locally(self, request_id: RequestId) -> None: ...
    def cancel(self, request_id: RequestId, sequence: int | None = None) -> None: ...
    def release(self, request_id: RequestId) -> None: ...
    def pin(self, pin_id: RequestId, names: Sequence[BlockHash]) -> list[NamedBlock]: ...
    def unpin(self, pin_id: RequestId) -> None: ...
    def begin_import(self, import_id: RequestId, names: Sequence[BlockHash]) -> list[NamedBlock]: ...
    def end_import(self, import_id: RequestId, received: Sequence[BlockHash]) -> None: ...
    def cached_block_hashes(self) -> list[BlockHash]: ...
    def hot_block_hashes(self, limit: int) -> list[BlockHash]: ...
    def host_block_hashes(self) -> list[BlockHash]: ...


class CompletedFetch(Protocol):
    """The result of a successful fetch of KV blocks, as `kvtransfer.FetchResult` has it.

    `exposed_s` is the time from the producer's `finish`, when all blocks had been computed, to the end of the fetch:
    the part of the transfer that did not overlap with computation. `ended_at` is the end of the fetch
    (`time.monotonic()`).
    """

    @property
    def payload(self) -> bytes: ...
    @property
    def transport(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def exposed_s(self) -> float: ...
    @property
    def ended_at(self) -> float: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


class SourcePort(Protocol):
    """The methods of `kvtransfer.TransferNode` that an instance uses to send KV blocks; they are documented there. Use
    it only on the event loop.
    """

    def open(self, ticket: Ticket, /) -> None: ...
    def publish(self, ticket: TicketId, blocks: Sequence[tuple[BlockHash, int]], /) -> None: ...
    def publish_parts(self, ticket: TicketId, blocks: Sequence[tuple[BlockHash, int]], parts: range, /) -> None: ...
    def finish(self, ticket: TicketId, payload: bytes, /) -> None: ...
    def fail(self, ticket: TicketId, reason: str, /) -> None: ...
    def released(self, ticket: TicketId, /) -> Awaitable[str]: ...
    def cancel(self, ticket: TicketId, /) -> None: ...


class HandoffSourcePort(SourcePort, Protocol):
    """The methods of `kvtransfer.RankedTransferNode` that a prefill instance uses; they are documented there. Use it
    only on the event loop.
    """

    def open_handoff(self, ticket: Ticket, mirror: Callable[[], Awaitable[None]] | None, /) -> bool: ...


class SinkPort(Protocol):
    """The methods of `kvtransfer.TransferNode` that an instance uses to receive KV blocks; they are documented there.
    Use it only on the event loop.
    """

    def fetch(
        self,
        ticket: Ticket,
        wanted: Sequence[tuple[BlockHash, int]],
        *,
        on_blocks: Callable[[list[BlockHash]], None] | None = None,
        on_end: Callable[["CompletedFetch"], None] | None = None,
        translation: Translation | None = None,
        partial: bool = False,
    ) -> Awaitable[CompletedFetch]: ...
    def cancel(self, ticket: TicketId, /) -> None: ...


class HandoffSinkPort(Protocol):
    """The method of `kvtransfer.RankedTransferNode` that a decode instance uses; it is documented there. Use it only on
    the event loop.
    """

    def fetch(
        self,
        ticket: Ticket,
        wanted: Sequence[tuple[BlockHash, int]],
        *,
        on_blocks: Callable[[list[BlockHash]], None] | None = None,
        on_rank_blocks: Callable[[list[BlockHash]], None] | None = None,
        on_end: Callable[["CompletedFetch"], None] | None = None,
        translation: Translation | None = None,
    ) -> Awaitable[CompletedFetch]: ...


class HandoffCounter(Protocol):
    """The interface by which failed handoffs are counted by their reason, for metrics."""

    def handoff_failed(self, reason: str) -> None: ...


class LinksPort(Protocol):
    """The interface that returns the state of the connections by which KV blocks arrive from other instances."""

    def links(self) -> list[LinkStatus]: ...


class RouterPort(Protocol):
    """The interface that sends messages to connected routers: `services.common.rpc.instance_link.InstanceServer` after
    its start.
    """

    def routers(self) -> list[RouterId]: ...
    def send(self, router: RouterId, message: ToRouter) -> None: ...


class EventsPort(Protocol):
    """The interface that publishes changes of the KV cache to routers; `sequence` is the number of the last published
    batch.
    """

    @property
    def sequence(self) -> int: ...
    def publish(self, events: list[BlockEvent]) -> None: ...


__all__ = [
    "CompletedFetch",
    "EncoderPort",
    "EnginePort",
    "EngineStats",
    "EventsPort",
    "HandoffCounter",
    "LinksPort",
    "Mode",
    "NamedBlock",
    "PoolingPort",
    "Reservation",
    "RouterPort",
    "SinkPort",
    "SourcePort",
    "StepResult",
    "SteppingPort",
]
