"""The front's part in an attempt whose prompt two prefill instances read: what is counted of it, until it has ended.

The back copes with the loss of its front by itself, so nothing that happens here ends or repeats the attempt.
"""

import logging
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

    def front_freed(self, report: PrefillReport | None) -> None:
        """It has less to compute. `report`, if it has read its part."""

    def blame(self, culprit: InstanceId, failed: Failed) -> None: ...


class FrontPart(msgspec.Struct, eq=False):
    """`services.router.member.Assignment`."""

    owner: Owner
    request_id: RequestId
    member: Member
    is_over: bool = False

    def start(self, work: Work, ticket: Ticket, placement: Placement, naming: PromptNames, pull: Pull | None) -> Front:
        """The member reads its part of `work` as if that were a prompt. Returns what the other one is told."""
        candidate, num_tokens = placement.beginning, placement.front_tokens
        block_tokens = candidate.layout.block_tokens
        share = Share(
            assignment=self,
            prefill_tokens=ceil(candidate.uncached(num_tokens)),
            sequences=1,
            blocks=ceil(max(0, num_tokens - candidate.cached_tokens) / block_tokens),
        )
        self.member.assign(self.request_id, share)
        part = Work(
            request_id=self.request_id,
            token_ids=work.token_ids[:num_tokens],
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
            root=naming.root(self.member.record.layout),
            priority=work.priority,
            lora=work.lora,
            timeout_s=work.timeout_s,
            trace_headers=work.trace_headers,
        )
        self.member.send(Prefill(part, ticket, pull))
        return Front(ticket=ticket, num_blocks=num_tokens // block_tokens)

    def on_answer(self, member: Member, answer: Answer, now: float) -> None:
        match answer:
            case PrefillReport():
                member.prefilled(self.request_id)
                member.circuit.succeeded()
                self.owner.front_freed(answer)
            case Tokens():
                self._release()
            case Failed():
                extra = {"request_id": self.request_id}
                logger.warning("%s failed: %s: %s", member.record.instance, answer.code, answer.message, extra=extra)
                self._release()
                self.owner.blame(answer.lost if answer.lost is not None else member.record.instance, answer)
                self.owner.front_freed(None)

    def on_lost(self, member: Member, reason: str) -> None:
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
