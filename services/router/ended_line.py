"""The log line of a request that ended: what was decided for it, what was predicted, and what came of it."""

from services.router.flight import Flight


def ended_line(flight: Flight, now: float) -> dict[str, object]:
    """Fields of the line."""
    timeline, report, handoff = flight.timeline, flight.timeline.report, flight.timeline.handoff
    return {
        "request_id": flight.job.request_id,
        "caller": flight.arrival.caller.name,
        "decision": timeline.decision,
        "prefill": timeline.prefill,
        "decode": timeline.decode,
        "finish_reasons": timeline.finish_reasons,
        "prompt_tokens": len(flight.job.token_ids),
        "generated_tokens": sum(len(sequence.token_ids) for sequence in flight.sequences),
        "cached_tokens": sum(timeline.cached_tokens.values()),
        "pulled_tokens": report.pulled_tokens if report is not None else None,
        "predicted_ttft_s": _rounded(timeline.predicted_ttft_s),
        "ttft_s": _rounded(timeline.ttft_s),
        "predicted_itl_s": _rounded(timeline.predicted_itl_s),
        "itl_s": _rounded(timeline.itl_s),
        "admission_s": _rounded(timeline.admission_s),
        "tokenize_s": _rounded(timeline.tokenize_s),
        "queue_s": _rounded(report.queue_s if report is not None else None),
        "prefill_s": _rounded(report.prefill_s if report is not None else None),
        "handoff_s": _rounded(handoff.handoff_s if handoff is not None else None),
        "exposed_s": _rounded(handoff.exposed_s if handoff is not None else None),
        "transport": handoff.transport if handoff is not None else None,
        "decode_s": _rounded(timeline.decode_s),
        "e2e_s": _rounded(now - timeline.arrived_at),
        "replays": timeline.replays,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
