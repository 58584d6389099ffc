"""Decides whether a request goes to its instances now, waits in the router, or gets status 429 (queue full, SLO
missed). Pure.

The router sends instances only as much work as they compute in about `dispatch_ahead_s`, which keeps them busy. The
rest waits in the router: there it can still be reordered by priority and fairness, and its placement is decided late,
when more prefixes are cached.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from baton_serve.services.router.placement.policy import Placement
from baton_serve.services.router.protocol.caller import Slo

RefusalCause = Literal["ttft", "itl", "queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """Limits of the router's queue of waiting requests, from its settings."""

    max_queued_tokens: int
    """Prompt tokens that may wait in the router; further requests are rejected (`--max-queued-tokens`)."""
    dispatch_ahead_s: float
    """Seconds of queued prefill work that the least busy instance may have while requests are still sent on."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a request is rejected. It is a value, not an exception; the caller turns it into a `RateLimitError`."""

    cause: RefusalCause
    """Label of the metric `baton:admission_refusals`."""
    message: str
    """Text for the client."""
    retry_after_s: float | None
    """Seconds after which the request is predicted to be accepted; None if it depends on a running request's end."""


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """The router's queue of waiting requests at the moment when a new request arrives."""

    queued_tokens: int
    """Prompt tokens of all waiting requests."""
    before_s: float
    """Predicted seconds until all requests that go before the new one have been sent on."""
    tokens_per_s: float
    """Prefill rate of all instances together."""


AdmissionVerdict = Literal["go", "wait"] | Refusal


def admission_verdict(
    placement: Placement, slo: Slo, rules: AdmissionRules, *, waited_s: float, tokens: int, waiting: QueueState
) -> AdmissionVerdict:
    """Decide whether a new request is sent to its instances ("go"), waits in the router, or is rejected.

    `waited_s` is the time in seconds since its arrival, `tokens` the length of its prompt, and `waiting` the queue that
    it finds.
    """
    refusal = slo_refusal(placement, slo, waited_s=waited_s, before_s=waiting.before_s)
    if refusal is not None:
        return refusal
    # Compare the shortest queue of the pool, not the one of the chosen instance. A request may be placed on a busy
    # instance for its cached prefix; if it waited here for that instance, it would block all requests behind it, while
    # other instances are idle (mean TTFT rose from 3.4 to 140 s in simulation: docs/log/placement.md).
    has_turn = not waiting.before_s and placement.shortest_queue_s <= rules.dispatch_ahead_s
    if has_turn:
        return "go"
    excess = waiting.queued_tokens + tokens - rules.max_queued_tokens
    if excess > 0:
        message = (
            f"{waiting.queued_tokens} of at most {rules.max_queued_tokens} prompt tokens wait in the router "
            f"(--max-queued-tokens), {tokens} more do not fit"
        )
        return Refusal("queue", message, excess / waiting.tokens_per_s)
    return "wait"


def slo_refusal(placement: Placement, slo: Slo, *, waited_s: float, before_s: float = 0.0) -> Refusal | None:
    """Return why a request would probably miss an SLO on the instances of `placement`, or None if it is predicted to
    meet both.

    `waited_s` is the time in seconds since the arrival, and `before_s` the predicted time in the router's queue. The
    prediction is divided by the uncertainty of the instance's measured speed: an instance that was slow when it was
    last measured would otherwise get no more requests, and so it could never show that it is fast again.
    """
    ttft_s = waited_s + before_s + placement.predicted_ttft_s
    # Only the time at the instance is uncertain; the time in the router's queue is the same at best.
    at_best_s = ttft_s - placement.predicted_ttft_s * (1.0 - 1.0 / placement.final_worker.rate_uncertainty)
    if slo.ttft_s is not None and at_best_s > slo.ttft_s:
        message = f"the first token is predicted after {ttft_s:.3g} s, but the TTFT SLO is {slo.ttft_s:.3g} s"
        return Refusal("ttft", message, ttft_s - slo.ttft_s)
    itl_s = placement.predicted_itl_s
    step_uncertainty = placement.decode.step_uncertainty if placement.decode is not None else 1.0
    if slo.itl_s is not None and itl_s / step_uncertainty > slo.itl_s:
        message = f"an ITL of {itl_s * 1e3:.3g} ms is predicted, but the ITL SLO is {slo.itl_s * 1e3:.3g} ms"
        # Decoding slows down with the number of sequences, so a retry can succeed only after one of them has ended.
        return Refusal("itl", message, None)
    return None
