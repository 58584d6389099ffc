"""Whether a request goes to its instances now, waits in the router, or is refused before anybody works for it. Pure.

Instances get work for about `dispatch_ahead_s`, enough to stay busy; the rest waits here, where it can still be put in
another order and placed by what is cached by then.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from baton_serve.services.router.placement.policy import Placement
from baton_serve.services.router.protocol.caller import Slo

RefusalCause = Literal["ttft", "itl", "queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """`max_queued_tokens` bounds the prompts that wait here."""

    max_queued_tokens: int
    dispatch_ahead_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """`message` is for the client; after `retry_after_s` it is predicted to be taken."""

    cause: RefusalCause
    message: str
    retry_after_s: float | None
    """None: when something that runs has ended."""


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """`before_s` is the predicted time until all that go before it have gone."""

    queued_tokens: int
    before_s: float
    tokens_per_s: float


AdmissionVerdict = Literal["go", "wait"] | Refusal


def admission_verdict(
    placement: Placement, slo: Slo, rules: AdmissionRules, *, waited_s: float, tokens: int, waiting: QueueState
) -> AdmissionVerdict:
    """`waited_s` since its arrival; `tokens` of its prompt; `waiting` is the queue before it."""
    refusal = slo_refusal(placement, slo, waited_s=waited_s, before_s=waiting.before_s)
    if refusal is not None:
        return refusal
    # Where it is placed there may be a longer queue: its cached prefix is worth that, and others must not wait for it.
    has_turn = not waiting.before_s and placement.shortest_queue_s <= rules.dispatch_ahead_s
    if has_turn:
        return "go"
    excess = waiting.queued_tokens + tokens - rules.max_queued_tokens
    if excess > 0:
        message = f"{waiting.queued_tokens} tokens of prompts wait and {rules.max_queued_tokens} is the limit"
        return Refusal("queue", message, excess / waiting.tokens_per_s)
    return "wait"


def slo_refusal(placement: Placement, slo: Slo, *, waited_s: float, before_s: float = 0.0) -> Refusal | None:
    """Whether an answer would begin or go on more slowly than was asked for. An instance that was slow when it last
    computed, and is refused all since, gets another chance after a while: nothing else would show that it is fast."""
    ttft_s = waited_s + before_s + placement.predicted_ttft_s
    at_best_s = ttft_s - placement.predicted_ttft_s * (1.0 - 1.0 / placement.final_worker.rate_uncertainty)
    if slo.ttft_s is not None and at_best_s > slo.ttft_s:
        message = f"the first token is predicted after {ttft_s:.3g} s, {slo.ttft_s:.3g} s was asked for"
        return Refusal("ttft", message, ttft_s - slo.ttft_s)
    itl_s = placement.predicted_itl_s
    step_uncertainty = placement.decode.step_uncertainty if placement.decode is not None else 1.0
    if slo.itl_s is not None and itl_s / step_uncertainty > slo.itl_s:
        message = f"tokens are predicted every {itl_s * 1e3:.3g} ms, {slo.itl_s * 1e3:.3g} ms was asked for"
        return Refusal("itl", message, None)
    return None
