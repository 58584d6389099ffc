"""Sends Prefill, Decode or Generate of one attempt to its instances, and aborts it there; timeouts: `limits.py`."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Protocol

import msgspec

from baton_serve.contracts.identity import BlockHash, RequestId, new_ticket_id
from baton_serve.contracts.messages import (
    Answer,
    Cancel,
    Decode,
    Encode,
    FetchEmbeddings,
    Generate,
    Prefill,
    Pull,
    Ticket,
    Tokens,
    Work,
)
from baton_serve.services.router.cluster.worker_state import Lease, LoadEstimate, WorkerState
from baton_serve.services.router.placement.policy import Candidate, Placement
from baton_serve.services.router.requests.prompt_request import PromptBlockHashes
from baton_serve.services.router.text.token_sequence import TokenSequence

PULL_TIMEOUT_FACTOR = 4.0
PULL_EXTRA_TIMEOUT_S = 1.0
"""Time limit of a fetch of a cached prefix: a multiple of its predicted duration, plus a constant in seconds.

After it the worker computes the prefix instead.
"""


class ImageEncoding(msgspec.Struct, frozen=True):
    """The images of a prompt that one encode instance encodes, with the messages about them."""

    worker: WorkerState
    encode: Encode
    fetch: FetchEmbeddings


class AttemptOwner(Protocol):
    """Receives the instances' answers to an attempt. `RequestLifecycle` implements it, which cannot be imported here
    because it imports this module.
    """

    def on_placed(self, placement: Placement) -> None:
        """Record which instances were chosen for the attempt whose messages are sent next."""

    def on_tokens(self, attempt: "Attempt", worker: WorkerState, tokens: Tokens, now: float) -> None:
        """Handle new tokens of one sequence from `worker`. They arrived at `now` (seconds on the router's monotonic
        clock).
        """

    def on_answer(self, attempt: "Attempt", worker: WorkerState, answer: Answer) -> None:
        """Handle an answer of `worker` other than `Tokens`, such as a report or a failure."""

    def on_lost(self, attempt: "Attempt", worker: WorkerState, reason: str) -> None:
        """Handle the loss of the connection to `worker`, an instance that the attempt uses."""

    def on_error(self, error: Exception) -> None:
        """Fail the request: one of the other methods of this class has raised `error`."""


class Attempt(msgspec.Struct, eq=False):
    """One try to generate some sequences of a request on the instances that placement has chosen. It begins with its
    messages to them.

    With both instances, `prefill` computes the prompt and the first tokens, and `decode` generates the rest. Without
    `prefill`, `decode` does everything. Without `decode`, the request ends with its first tokens. The request's
    `RequestLifecycle` owns it and calls `end` exactly once.
    """

    owner: AttemptOwner
    request_id: RequestId
    """The request id of this attempt alone, so that late answers to an ended attempt find no handler."""
    sequences: dict[int, TokenSequence]
    prefill: WorkerState | None
    decode: WorkerState | None
    position: int
    """Index of the first token that this attempt generates, in each of its sequences."""
    num_replays: int = 0
    """Number of counted replays of these sequences before this attempt."""
    decode_has_blocks: bool = False
    """The handoff is complete, or there is none: the decode worker needs no more blocks of the prefill worker."""
    first_token_at: dict[int, float] = {}
    """Arrival of the first token from `prefill`, by sequence, until the second one arrives from `decode`."""
    encoders: list[WorkerState] = []
    """The encode instances that were sent images of the prompt."""
    omits_images: bool = False
    """Images whose KV is cached where the prompt is computed were not sent."""
    leases: list[Lease] = []
    """The load that is counted on the workers until `end` releases it."""

    def start(
        self,
        work: Work,
        placement: Placement,
        block_hashes: PromptBlockHashes,
        *,
        handoff_timeout_s: float,
        pull_from: WorkerState | None = None,
        images: Sequence[bytes] = (),
        encodings: Sequence[ImageEncoding] = (),
    ) -> None:
        """Count the attempt as load of its instances and send its messages to all of them at the same time.

        Each instance gets the root of the block hashes in its own KV layout. `pull_from` is the instance from which the
        one that computes the prompt fetches a cached prefix, or None; the one that computes the prompt also gets the
        `images`, and fetches the embeddings of `encodings`. Raises `contracts.wire.WireError` if a message cannot be
        encoded, and any error of a connection; the caller then calls `end`.
        """
        prompt_worker = self.prefill or self.decode
        assert prompt_worker is not None
        if branches := placement.final_worker.branches:
            work = msgspec.structs.replace(work, branches=list(branches))
        pull = _pull(self.request_id, placement, pull_from, prompt_worker, block_hashes)
        # Encode all messages before anything is counted or sent: encoding fails for requests that the wire format
        # cannot express, and then no worker must have got a part of the attempt.
        prepared = [encoding.worker.prepare(encoding.encode) for encoding in encodings]
        fetches = [encoding.fetch for encoding in encodings]
        if self.prefill is None:
            assert self.decode is not None
            own = _with_root_of(work, block_hashes, self.decode)
            prepared.append(self.decode.prepare(Generate(own, pull, list(images), fetches)))
        else:
            ticket = None
            if self.decode is not None:
                ticket = _ticket(self.request_id, self.prefill, self.decode, block_hashes, handoff_timeout_s)
            prefill = Prefill(_with_root_of(work, block_hashes, self.prefill), ticket, pull, list(images), fetches)
            prepared.append(self.prefill.prepare(prefill))
            if self.decode is not None and ticket is not None:
                prepared.append(self.decode.prepare(Decode(_with_root_of(work, block_hashes, self.decode), ticket)))
        self._assign(placement, len(work.token_ids))
        for encoding in encodings:
            encoding.worker.unreported_images += len(encoding.fetch.digests)
            self.encoders.append(encoding.worker)
        for send in prepared:
            send()

    def workers(self) -> list[WorkerState]:
        """Return the instances that the attempt still uses: one or both."""
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    def unfinished(self) -> list[TokenSequence]:
        """Return those sequences of the attempt that have not got their last token yet."""
        return [sequence for sequence in self.sequences.values() if not sequence.is_finished]

    @property
    def needs_prefill(self) -> bool:
        """True if the prefill worker must still send something: KV blocks, or the first token of a sequence."""
        # Tokens of the decode worker may overtake the first token. Such a sequence has a gap, and is not longer than
        # `position` yet.
        return not self.decode_has_blocks or any(
            s.has_gap or len(s.token_ids) == self.position for s in self.unfinished()
        )

    def is_done_with(self, worker: WorkerState) -> bool:
        """Return whether `worker` is the prefill worker and has sent all that the attempt needs of it."""
        return worker is self.prefill and worker is not self.decode and not self.needs_prefill

    def on_second_token(self, index: int, now: float) -> None:
        """Measure the time between the first and the second token of sequence `index`, which arrived at `now`. Later
        first tokens are held back according to it. Only the first call for a sequence has an effect.
        """
        came_at = self.first_token_at.pop(index, None)
        if came_at is not None and self.decode is not None:
            self.decode.first_gap_quantile.observe(now - came_at)

    def end(self, *, cancel: bool) -> None:
        """Stop counting the attempt as load of its instances. With `cancel`, also send `Cancel` to the instances that
        may still compute it.
        """
        for lease in self.leases:
            lease.release()
        for worker in self.encoders:
            worker.circuit_breaker.abandon_attempt(self.request_id)
        if cancel:
            for worker in self.workers():
                worker.send(Cancel(self.request_id))

    def drop_prefill(self) -> None:
        """Continue without the prefill worker, which was lost after it had sent all that is needed, and stop counting
        its load.
        """
        for lease in self.leases:
            if lease.worker is self.prefill:
                lease.release()
        self.prefill = None

    def cancel_sequence(self, index: int) -> None:
        """Ask the decode worker to stop generating sequence `index`; the other sequences go on."""
        if self.decode is not None:
            self.decode.send(Cancel(self.request_id, index))

    def on_answer(self, worker: WorkerState, answer: Answer, now: float) -> None:
        """Pass an answer of `worker` to the owner. An exception of the owner fails this request only, because one
        message has answers to many requests.
        """
        try:
            if type(answer) is Tokens:  # the test that is true for nearly all answers comes first
                self.owner.on_tokens(self, worker, answer, now)
            else:
                self.owner.on_answer(self, worker, answer)
        except Exception as exc:  # noqa: BLE001 - the frame has answers to other requests too
            self.owner.on_error(exc)

    def on_lost(self, worker: WorkerState, reason: str) -> None:
        """Pass the loss of the connection to `worker` to the owner. An exception of the owner fails this request
        only.
        """
        try:
            self.owner.on_lost(self, worker, reason)
        except Exception as exc:  # noqa: BLE001 - the worker served other requests too
            self.owner.on_error(exc)

    def _assign(self, placement: Placement, num_tokens: int) -> None:
        """Count the load that the attempt is expected to cause on each of its instances. `num_tokens` is the length of
        its input.
        """
        if self.prefill is not None and placement.prefill is not None:
            estimate = self._load_estimate(placement.prefill, num_tokens, computes=True)
            self.leases.append(self.prefill.assign(self.request_id, estimate))
        if self.decode is not None and placement.decode is not None:
            estimate = self._load_estimate(placement.decode, num_tokens, computes=self.prefill is None)
            self.leases.append(self.decode.assign(self.request_id, estimate))

    def _load_estimate(self, candidate: Candidate, num_tokens: int, *, computes: bool) -> LoadEstimate:
        """Return the load that this attempt is expected to cause on one instance. `computes` says that it computes the
        prompt, of `num_tokens` tokens.
        """
        # Blocks in the host tier need device blocks too, so only the device prefix counts as present here.
        missing = max(0, num_tokens - candidate.cached_tokens)
        return LoadEstimate(
            handler=self,
            prefill_tokens=ceil(candidate.uncached(num_tokens)) if computes else 0,
            sequences=len(self.sequences),
            blocks=ceil(missing / candidate.layout.block_tokens),
        )


def sequence_indexes(sequences: Sequence[TokenSequence]) -> list[int]:
    """Return the index of each sequence in its request, as the field `Work.sequences` lists them."""
    return [sequence.index for sequence in sequences]


def _with_root_of(work: Work, block_hashes: PromptBlockHashes, worker: WorkerState) -> Work:
    """Return the message part `work` with the root hash for this instance: block hashes depend on its KV layout."""
    layout = worker.record.layout
    root = block_hashes.root(layout)
    if work.root == root:
        return work
    tenant_root = block_hashes.tenant_root(layout)
    return msgspec.structs.replace(work, root=root, tenant_root=BlockHash(b"") if tenant_root == root else tenant_root)


def _pull(
    request_id: RequestId,
    placement: Placement,
    source: WorkerState | None,
    sink: WorkerState,
    block_hashes: PromptBlockHashes,
) -> Pull | None:
    """Return the part of a message by which `sink` fetches a cached prefix from `source`, or None if the placement
    plans no such fetch.
    """
    plan = placement.final_worker.pull
    if plan is None or source is None:
        return None
    block_tokens = sink.record.layout.block_tokens
    timeout_s = PULL_TIMEOUT_FACTOR * plan.seconds + PULL_EXTRA_TIMEOUT_S
    ticket = _ticket(request_id, source, sink, block_hashes, timeout_s)
    return Pull(ticket=ticket, num_blocks=plan.num_tokens // block_tokens)


def image_encodings(
    request_id: RequestId,
    encoding: Mapping[WorkerState, Sequence[bytes]],
    sink: WorkerState,
    block_hashes: PromptBlockHashes,
    *,
    images: Mapping[tuple[bytes, ...], bytes],
    has_cached: Callable[[WorkerState, BlockHash], bool],
    timeout_s: float,
) -> list[ImageEncoding]:
    """Return the messages by which encode instances encode files for the worker `sink`. `encoding` has the digests of
    the spans that each instance encodes; `images` are the files of the prompt by the digests of their spans.
    `has_cached` says whether an instance has reported the embeddings of a span, by the hash of their first block: then
    it needs no file.
    """
    found: list[ImageEncoding] = []
    for worker, wanted in encoding.items():
        layout = worker.record.layout
        ticket = msgspec.structs.replace(
            _ticket(request_id, worker, sink, block_hashes, timeout_s),
            source_layout=layout,
            source_root=block_hashes.embedding_root(layout),
        )
        own = [spans for spans in images if not set(wanted).isdisjoint(spans)]
        names = block_hashes.embeddings(layout)
        files = [b"" if all(has_cached(worker, names[one]) for one in spans) else images[spans] for spans in own]
        encode = Encode(ticket, files, list(map(list, own)))
        found.append(ImageEncoding(worker, encode, FetchEmbeddings(ticket=ticket, digests=list(wanted))))
    return found


def _ticket(
    request_id: RequestId, source: WorkerState, sink: WorkerState, block_hashes: PromptBlockHashes, timeout_s: float
) -> Ticket:
    """Return a ticket that permits one transfer of blocks from `source` to `sink` within `timeout_s` seconds."""
    layout = source.record.layout
    # The sink computes the source's block hashes from these two fields. Equal layouts have equal hashes.
    differs = layout != sink.record.layout
    return Ticket(
        ticket=new_ticket_id(),
        source=source.record.instance,
        source_generation=source.record.generation,
        source_address=source.record.transfer_address,
        sink=sink.record.instance,
        sink_generation=sink.record.generation,
        timeout_s=timeout_s,
        request_id=request_id,
        source_layout=layout if differs else None,
        source_root=block_hashes.root(layout) if differs else BlockHash(b""),
        source_ranks=_source_ranks(source, sink),
    )


def _source_ranks(source: WorkerState, sink: WorkerState) -> list[str]:
    """Return the addresses of the ranks of `source` if each can send its part of the blocks to the same rank of `sink`,
    otherwise an empty list.
    """
    ours, theirs = source.record.rank_transfers, sink.record.rank_transfers
    if ours is None or theirs is None or ours.division != theirs.division:
        return []
    return ours.addresses
