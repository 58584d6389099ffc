"""What a flight's span says when it ends, named as vLLM names it. Never a prompt or an answer."""

from collections.abc import Iterator

from baton_serve.services.common.tracing import Attributes
from baton_serve.services.router.requests.lifecycle import RequestLifecycle


def span_attributes(lifecycle: RequestLifecycle) -> Attributes:
    """Times in seconds. What is not known is left out."""
    return {name: value for name, value in _attributes(lifecycle) if value is not None}


def _attributes(lifecycle: RequestLifecycle) -> Iterator[tuple[str, str | int | float | None]]:
    request, timeline = lifecycle.request, lifecycle.timeline
    yield "gen_ai.request.id", request.request_id
    yield "gen_ai.request.n", request.num_sequences
    yield "gen_ai.request.max_tokens", request.sampling.max_tokens
    yield "gen_ai.request.temperature", request.sampling.temperature
    yield "gen_ai.request.top_p", request.sampling.top_p
    yield "gen_ai.usage.prompt_tokens", len(request.token_ids)
    yield "gen_ai.usage.completion_tokens", lifecycle.num_generated
    yield "gen_ai.latency.time_to_first_token", timeline.ttft_s
    yield "gen_ai.latency.e2e", timeline.e2e_s
    yield "gen_ai.latency.time_in_queue", timeline.queue_s
    yield "gen_ai.latency.time_in_model_prefill", timeline.prefill_s
    yield "gen_ai.latency.time_in_model_decode", timeline.decode_s
    yield "baton.decision", timeline.decision
    yield "baton.prefill", timeline.prefill
    yield "baton.decode", timeline.decode
    yield "baton.cached_tokens", sum(timeline.cached_tokens.values())
    yield "baton.predicted_ttft_s", timeline.predicted_ttft_s
    yield "baton.held_s", timeline.held_s or None
    yield "baton.replays", timeline.replays
    if timeline.handoff is not None:
        yield "baton.handoff_exposed_s", timeline.handoff.exposed_s
