"""The log line of a request that ended: what was decided for it, what was predicted, and what came of it."""

from baton_serve.services.router.requests.lifecycle import RequestLifecycle


def log_fields(lifecycle: RequestLifecycle) -> dict[str, object]:
    """Fields of the line."""
    timeline, report, handoff = lifecycle.timeline, lifecycle.timeline.report, lifecycle.timeline.handoff
    return {
        "request_id": lifecycle.request.request_id,
        "caller": lifecycle.timing.caller.name,
        "decision": timeline.decision,
        "prefill": timeline.prefill,
        "decode": timeline.decode,
        "finish_reasons": timeline.finish_reasons,
        "prompt_tokens": len(lifecycle.request.token_ids),
        "images": len(lifecycle.request.media) or None,
        "generated_tokens": lifecycle.num_generated,
        "cached_tokens": sum(timeline.cached_tokens.values()),
        "pulled_tokens": report.pulled_tokens if report is not None else None,
        "predicted_ttft_s": timeline.predicted_ttft_s,
        "other_ttft_s": timeline.other_ttft_s or None,
        "ttft_s": timeline.ttft_s,
        "held_s": timeline.held_s or None,
        "predicted_itl_s": timeline.predicted_itl_s,
        "itl_s": timeline.itl_s,
        "admission_s": timeline.admission_s,
        "tokenize_s": timeline.tokenize_s,
        "queue_s": timeline.queue_s,
        "prefill_s": timeline.prefill_s,
        "handoff_s": handoff.handoff_s if handoff is not None else None,
        "exposed_s": handoff.exposed_s if handoff is not None else None,
        "decode_s": timeline.decode_s,
        "e2e_s": timeline.e2e_s,
        "transport": handoff.transport if handoff is not None else None,
        "replays": timeline.replays,
    }
