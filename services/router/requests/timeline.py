"""Computes TTFT, ITL and the other times of a request, and the answer to `x-baton-explain`.

The lifecycle fills it. The metrics, the request log and the `x-baton-explain` answer field read it.
"""

import msgspec

from baton_serve.contracts.events import Tier
from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.messages import FinishReason, HandoffReport, PrefillReport
from baton_serve.services.router.placement.policy import Decision, Placement
from baton_serve.services.router.protocol.openai_responses import Explanation


class Timeline(msgspec.Struct):
    """Records when each phase of one request happened, for metrics, logs and the client. Times are those of the
    router's monotonic clock, in seconds. After replays it has the last placement, the first prefill report and the last
    handoff report.
    """

    arrived_at: float
    tokenize_s: float = 0.0
    decision: Decision = "decode_only"
    prefill: InstanceId | None = None
    decode: InstanceId | None = None
    """Instances of the last placement."""
    predicted_ttft_s: float = 0.0
    """Predicted time from arrival to first token, of the placement that led to the first token."""
    other_ttft_s: float = 0.0
    """The same prediction for the placement that was not chosen (`Placement.other_ttft_s`); 0 if there was none."""
    predicted_itl_s: float = 0.0
    placed_at: float | None = None
    """Moment of the last placement before the first token."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    held_s: float = 0.0
    """Longest time that the router held back the first token of a sequence."""
    ended_at: float | None = None
    report: PrefillReport | None = None
    handoff: HandoffReport | None = None
    replays: int = 0
    """Number of replays, including uncounted ones."""
    num_later_tokens: int = 0
    """Tokens of the longest sequence after its first one."""
    finish_reasons: list[FinishReason | str] = []

    def record_placement(self, placement: Placement, now: float) -> None:
        """Record which instances were chosen at `now`, and the predicted TTFT and ITL unless the first token has been
        sent already.
        """
        self.decision = placement.decision
        self.prefill = placement.prefill.instance if placement.prefill is not None else None
        self.decode = placement.decode.instance if placement.decode is not None else None
        # After the first token the predictions stay as they are: metrics compare them with what was measured.
        if self.first_token_at is None:
            before_s = now - self.arrived_at
            self.predicted_ttft_s = before_s + placement.predicted_ttft_s
            self.other_ttft_s = before_s + placement.other_ttft_s if placement.other_ttft_s else 0.0
            self.predicted_itl_s = placement.predicted_itl_s
            self.placed_at = now

    @property
    def ttft_s(self) -> float | None:
        """The time from arrival to first token in seconds; None before the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def admission_s(self) -> float | None:
        """The time in seconds from arrival until the request was sent to instances: tokenization, and waiting in the
        router.
        """
        return None if self.placed_at is None else self.placed_at - self.arrived_at

    @property
    def itl_s(self) -> float | None:
        """The mean time between the tokens of the longest sequence in seconds; None with fewer than two tokens."""
        # The sequences of a request are decoded at the same time, so only the tokens of the longest one count.
        decode_s = self.decode_s
        if decode_s is None or self.num_later_tokens <= 0:
            return None
        return decode_s / self.num_later_tokens

    @property
    def decode_s(self) -> float | None:
        """The time from the first to the last token in seconds."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at

    @property
    def e2e_s(self) -> float | None:
        """The time from arrival to the end of the request in seconds; None before its end."""
        return None if self.ended_at is None else self.ended_at - self.arrived_at

    @property
    def queue_s(self) -> float | None:
        """The time in seconds that the prompt waited at the instance that computed it; None if that is not known."""
        return None if self.report is None else self.report.queue_s

    @property
    def prefill_s(self) -> float | None:
        """The time in seconds in which the prompt was computed; None if that is not known."""
        return None if self.report is None else self.report.prefill_s

    @property
    def cached_tokens(self) -> dict[Tier, int]:
        """The number of prompt tokens that the instance found in its cache, by tier."""
        return {} if self.report is None else self.report.cached_tokens

    def explain(self, request_id: str, now: float) -> Explanation:
        """Return the times and instances of a request in the form for its client. Before the request's end, times run
        until `now`.
        """
        report, handoff = self.report, self.handoff
        explanation = Explanation(
            request_id=request_id,
            decision=self.decision,
            prefill=self.prefill,
            decode=self.decode,
            pulled_tokens=report.pulled_tokens if report is not None else 0,
            pulled_from=report.pulled_from if report is not None else None,
            # None and not 0.0: msgspec leaves out a default only if it is the same object, and floats are not.
            pull_s=(report.pull_s or None) if report is not None else None,
            cached_tokens={str(tier): tokens for tier, tokens in self.cached_tokens.items()},
            predicted_ttft_s=self.predicted_ttft_s,
            other_ttft_s=self.other_ttft_s or None,
            predicted_itl_s=self.predicted_itl_s,
            itl_s=self.itl_s,
            admission_s=self.admission_s,
            ttft_s=self.ttft_s,
            held_s=self.held_s or None,
            tokenize_s=self.tokenize_s,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            e2e_s=(self.ended_at or now) - self.arrived_at,
            replays=self.replays,
        )
        if handoff is None:
            return explanation
        return msgspec.structs.replace(
            explanation,
            transport=handoff.transport,
            handoff_s=handoff.handoff_s,
            handoff_exposed_s=handoff.exposed_s,
            handoff_to_step_s=handoff.to_step_s,
            transferred_blocks=handoff.transferred_blocks,
            transferred_bytes=handoff.transferred_bytes,
            reused_blocks=handoff.reused_blocks,
            handoff_bytes_per_s=handoff.transferred_bytes / handoff.handoff_s if handoff.handoff_s > 0 else None,
        )
