"""The parts, but the last, of a prompt that two prefill instances read by turns: what each of the two is told of them,
and what is counted of them until they have ended.

An instance computes what it misses of the other's parts, so nothing that happens here ends or repeats the attempt.
"""

import logging
from collections.abc import Callable, Sequence
from math import ceil
from typing import Protocol

import msgspec

from contracts.identity import InstanceId, RequestId
from contracts.messages import (
    Answer,
    Cancel,
    Failed,
    Front,
    Prefill,
    PrefillReport,
    Pull,
    Ticket,
    Tokens,
    Work,
)
from contracts.sampling import SamplingParams
from services.router.job import PromptNames
from services.router.member import Member, Share
from services.router.placement import Placement

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """The flight."""

    def part_read(self, part: "FrontPart", report: PrefillReport) -> None: ...

    def part_failed(self, culprit: InstanceId, failed: Failed) -> None: ...


class FrontPart(msgspec.Struct, eq=False):
    """`services.router.member.Assignment`."""

    owner: Owner
    request_id: RequestId
    member: Member
    number: int
    is_over: bool = False
    has_failed: bool = False
    """It has not fetched what it was to have from the part before, or nobody knows."""

    def start(
        self,
        work: Work,
        placement: Placement,
        naming: PromptNames,
        *,
        ticket: Ticket,
        pull: Pull | None,
        front: Front | None,
    ) -> None:
        """The member reads its part of `work` as if what comes before it and it were a prompt, and hands it on by
        `ticket`. It has the tokens that `front` says it knows."""
        known = front.known_tokens if front is not None else 0
        num_tokens = placement.part_ends[self.number]
        self.member.assign(self.request_id, self._share(placement))
        part = Work(
            request_id=self.request_id,
            token_ids=work.token_ids[known:num_tokens],
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
            root=naming.root(self.member.record.layout),
            priority=work.priority,
            lora=work.lora,
            timeout_s=work.timeout_s,
            trace_headers=work.trace_headers,
        )
        self.member.send(Prefill(part, ticket, pull, front))

    def _share(self, placement: Placement) -> Share:
        """Blocks and sequences of the one that serves the request are counted with the request."""
        ends, candidate = placement.part_ends, placement.beginning
        end = ends[self.number]
        is_fronts, is_last = self.number % 2 == 0, self.number == len(ends) - 1
        held = ends[self.number - 2] if self.number >= 2 else candidate.cached_tokens
        return Share(
            assignment=self,
            prefill_tokens=end - ends[self.number - 1] if self.number else ceil(candidate.uncached(end)),
            sequences=int(is_last),
            blocks=ceil(max(0, end - held) / candidate.layout.block_tokens) if is_fronts else 0,
        )

    def on_answer(self, member: Member, answer: Answer, now: float) -> None:
        match answer:
            case PrefillReport():
                member.prefilled(self.request_id)
                member.circuit.succeeded()
                self.owner.part_read(self, answer)
            case Tokens():
                self._release()
            case Failed():
                extra = {"request_id": self.request_id}
                logger.warning("%s failed: %s: %s", member.record.instance, answer.code, answer.message, extra=extra)
                self.has_failed = True
                self._release()
                self.owner.part_failed(answer.lost if answer.lost is not None else member.record.instance, answer)

    def on_lost(self, member: Member, reason: str) -> None:
        self.has_failed = True
        self._release()

    def end(self, *, cancel: bool) -> None:
        """Nobody wants its blocks any more. It is told so if it may still compute, or hold them (`cancel`)."""
        if cancel or not self.is_over:
            self.member.send(Cancel(self.request_id))
        self._release()

    def _release(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.member.release(self.request_id)
            self.member.circuit.given_up()


def parts_of(
    owner: Owner, request_id: RequestId, placement: Placement, *, front: Member | None, back: Member | None
) -> list[FrontPart]:
    """All but the last one, which is the request itself; none where one instance reads the prompt."""
    if front is None or back is None:
        return []
    numbers = range(len(placement.part_ends))
    return [FrontPart(owner, RequestId(f"{request_id}^{i}"), (front, back)[i % 2], i) for i in numbers]


def start_parts(
    parts: Sequence[FrontPart],
    back: Member,
    work: Work,
    placement: Placement,
    naming: PromptNames,
    *,
    pull: Pull | None,
    ticket: Callable[[RequestId, Member, Member], Ticket],
) -> Front:
    """Tells all of them; there is one at least. Returns what `back`, which computes the last part, is told. `ticket` is
    for a request id, from one member to another one."""
    front: Front | None = None
    for part, end in zip(parts, placement.part_ends, strict=True):
        sink = parts[part.number + 1].member if part.number + 1 < len(parts) else back
        made = ticket(part.request_id, part.member, sink)
        part.start(work, placement, naming, ticket=made, pull=None if part.number else pull, front=front)
        front = Front(ticket=made, num_blocks=end // placement.beginning.layout.block_tokens)
        if part.number:
            earlier, known = parts[part.number - 1].request_id, placement.part_ends[part.number - 1]
            front = msgspec.structs.replace(front, after=earlier, known_tokens=known)
    assert front is not None
    # The request itself brings all: whatever becomes of its parts, it must be read.
    return msgspec.structs.replace(front, known_tokens=0)
