"""One placement of sequences of a flight: which instances work for it, under which request id, and what they get."""

from collections.abc import Sequence
from math import ceil
from typing import Protocol

import msgspec

from baton_serve.contracts.identity import BlockHash, RequestId, new_ticket_id
from baton_serve.contracts.messages import Answer, Cancel, Decode, Generate, Prefill, Pull, Ticket, Tokens, Work
from baton_serve.services.router.cluster.worker_state import Lease, LoadEstimate, Sending, WorkerState
from baton_serve.services.router.placement.policy import Candidate, Placement
from baton_serve.services.router.requests.prompt_request import PromptBlockHashes
from baton_serve.services.router.text.token_sequence import TokenSequence

PULL_TIMEOUT_FACTOR = 4.0
PULL_EXTRA_TIMEOUT_S = 1.0
"""A fetch of a cached prefix is given up after so many times its predicted duration, and this; then it is computed."""


class AttemptOwner(Protocol):
    """The flight."""

    def on_tokens(self, attempt: "Attempt", worker: WorkerState, tokens: Tokens, now: float) -> None: ...
    def on_answer(self, attempt: "Attempt", worker: WorkerState, answer: Answer) -> None:
        """Any other."""

    def on_lost(self, attempt: "Attempt", worker: WorkerState, reason: str) -> None: ...

    def on_error(self, error: Exception) -> None:
        """Handling an answer, or a loss, has raised `error`: the request fails, and no other one."""


class Attempt(msgspec.Struct, eq=False):
    """`decode` writes the answer. Without `prefill` it reads the prompt too; without `decode` one token is all."""

    owner: AttemptOwner
    request_id: RequestId
    sequences: dict[int, TokenSequence]
    prefill: WorkerState | None
    decode: WorkerState | None
    position: int
    """Index of the first token that is awaited."""
    replays: int = 0
    """How many attempts for these sequences came before."""
    decode_has_blocks: bool = False
    """The handoff is over: prefill is needed no more."""
    first_token_at: dict[int, float] = {}
    """When each sequence's first token came from `prefill`, until its second comes from `decode`."""
    leases: list[Lease] = []
    """What it occupies of `prefill` and `decode`. Released by `end`."""

    def start(
        self,
        work: Work,
        placement: Placement,
        block_hashes: PromptBlockHashes,
        *,
        handoff_timeout_s: float,
        pull_from: WorkerState | None = None,
        images: Sequence[bytes] = (),
    ) -> None:
        """Tells all instances at once; each gets the root of its own names. `pull_from` is the source of what the
        placement's reader fetches first, which also gets the `images`.

        All messages are encoded before load is assigned for them and the first is sent. Raises
        `contracts.wire.WireError` and whatever a link raises: the caller then calls `end`.
        """
        reader = self.prefill or self.decode
        assert reader is not None
        pull = _pull(self.request_id, placement, pull_from, reader, block_hashes)
        sendings: list[Sending] = []
        if self.prefill is None:
            assert self.decode is not None
            sendings.append(
                self.decode.prepare(Generate(_with_root_of(work, block_hashes, self.decode), pull, list(images)))
            )
        else:
            ticket = None
            if self.decode is not None:
                ticket = _ticket(self.request_id, self.prefill, self.decode, block_hashes, handoff_timeout_s)
            prefill = Prefill(_with_root_of(work, block_hashes, self.prefill), ticket, pull, list(images))
            sendings.append(self.prefill.prepare(prefill))
            if self.decode is not None and ticket is not None:
                sendings.append(self.decode.prepare(Decode(_with_root_of(work, block_hashes, self.decode), ticket)))
        self._assign(placement, len(work.token_ids))
        for send in sendings:
            send()

    def workers(self) -> list[WorkerState]:
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    def unfinished(self) -> list[TokenSequence]:
        return [sequence for sequence in self.sequences.values() if not sequence.is_finished]

    @property
    def needs_prefill(self) -> bool:
        """Whether the loss of prefill breaks it: a first token or blocks are still to come."""
        return not self.decode_has_blocks or any(
            s.has_gap or len(s.token_ids) == self.position for s in self.unfinished()
        )

    def on_second_token(self, index: int, now: float) -> None:
        came_at = self.first_token_at.pop(index, None)
        if came_at is not None and self.decode is not None:
            self.decode.first_gap_quantile.observe(now - came_at)

    def end(self, *, cancel: bool) -> None:
        """Its answers no longer matter. Instances that may still work for it are told so with `cancel`."""
        for lease in self.leases:
            lease.release()
        if cancel:
            for worker in self.workers():
                worker.send(Cancel(self.request_id))

    def prefill_left(self) -> None:
        """It was lost, and is not needed any more."""
        for lease in self.leases:
            if lease.worker is self.prefill:
                lease.release()
        self.prefill = None

    def cancel_sequence(self, index: int) -> None:
        if self.decode is not None:
            self.decode.send(Cancel(self.request_id, index))

    def on_answer(self, worker: WorkerState, answer: Answer, now: float) -> None:
        try:
            if type(answer) is Tokens:  # nearly all
                self.owner.on_tokens(self, worker, answer, now)
            else:
                self.owner.on_answer(self, worker, answer)
        except Exception as exc:  # noqa: BLE001 - one request's, among answers to many
            self.owner.on_error(exc)

    def on_lost(self, worker: WorkerState, reason: str) -> None:
        try:
            self.owner.on_lost(self, worker, reason)
        except Exception as exc:  # noqa: BLE001 - one request's, among all that the instance served
            self.owner.on_error(exc)

    def _assign(self, placement: Placement, num_tokens: int) -> None:
        if self.prefill is not None and placement.prefill is not None:
            share = self._load_estimate(placement.prefill, num_tokens, computes=True)
            self.leases.append(self.prefill.assign(self.request_id, share))
        if self.decode is not None and placement.decode is not None:
            share = self._load_estimate(placement.decode, num_tokens, computes=self.prefill is None)
            self.leases.append(self.decode.assign(self.request_id, share))

    def _load_estimate(self, candidate: Candidate, num_tokens: int, *, computes: bool) -> LoadEstimate:
        missing = max(0, num_tokens - candidate.cached_tokens)
        return LoadEstimate(
            handler=self,
            prefill_tokens=ceil(candidate.uncached(num_tokens)) if computes else 0,
            sequences=len(self.sequences),
            blocks=ceil(missing / candidate.layout.block_tokens),
        )


def sequence_indexes(sequences: Sequence[TokenSequence]) -> list[int]:
    return [sequence.index for sequence in sequences]


def _with_root_of(work: Work, block_hashes: PromptBlockHashes, worker: WorkerState) -> Work:
    root = block_hashes.root(worker.record.layout)
    return work if work.root == root else msgspec.structs.replace(work, root=root)


def _pull(
    request_id: RequestId,
    placement: Placement,
    source: WorkerState | None,
    sink: WorkerState,
    block_hashes: PromptBlockHashes,
) -> Pull | None:
    plan = placement.final_worker.pull
    if plan is None or source is None:
        return None
    block_tokens = sink.record.layout.block_tokens
    timeout_s = PULL_TIMEOUT_FACTOR * plan.seconds + PULL_EXTRA_TIMEOUT_S
    ticket = _ticket(request_id, source, sink, block_hashes, timeout_s)
    return Pull(ticket=ticket, num_blocks=plan.num_tokens // block_tokens)


def _ticket(
    request_id: RequestId, source: WorkerState, sink: WorkerState, block_hashes: PromptBlockHashes, timeout_s: float
) -> Ticket:
    layout = source.record.layout
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
    )
