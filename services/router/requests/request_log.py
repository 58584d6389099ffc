"""Records ended requests: in the metrics, in the list of recent requests, as log line and trace span.

Requests are recorded in small batches, a moment after their end, so that no answer waits for it. Doing the same for
several requests in a row takes half the time, because the code and its data are in the CPU caches (docs/log/router.md,
"what is done for several in a row"). Readers of the metrics and of the list call `flush` first.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from baton_serve.services.common.logs import log_at
from baton_serve.services.common.process_lifecycle import call_each
from baton_serve.services.common.tracing import Attributes
from baton_serve.services.router.protocol.openai_responses import Explanation
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.timeline import Timeline


def span_attributes(lifecycle: RequestLifecycle) -> Attributes:
    """Return the attributes of a request's trace span, with times in seconds. Unknown values are left out."""
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
    # As in vLLM: from the start of the computation to the last token.
    computed = [seconds for seconds in (timeline.prefill_s, timeline.decode_s) if seconds is not None]
    yield "gen_ai.latency.time_in_model_inference", sum(computed) if computed else None
    yield "baton.decision", timeline.decision
    yield "baton.prefill", timeline.prefill
    yield "baton.decode", timeline.decode
    yield "baton.cached_tokens", sum(timeline.cached_tokens.values())
    yield "baton.predicted_ttft_s", timeline.predicted_ttft_s
    yield "baton.held_s", timeline.held_s or None  # 0 means that nothing was held back: leave it out
    yield "baton.replays", timeline.replays
    if timeline.handoff is not None:
        yield "baton.handoff_exposed_s", timeline.handoff.exposed_s


def log_fields(lifecycle: RequestLifecycle) -> dict[str, object]:
    """Return the fields of a request's log line. Times are in seconds; unknown values are None."""
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


_MAX_RECENT_REQUESTS = 50
"""Number of ended requests that the router's status page can show."""


class RecentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a request that has ended, as the router's status page shows it."""

    prompt_tokens: int
    generated_tokens: int
    finish_reasons: list[str]
    baton: Explanation


class RecentRequests:
    """Keeps a description of the requests that ended last. It keeps no `RequestLifecycle`, whose tokens would stay in
    memory.
    """

    def __init__(self) -> None:
        self._requests: deque[tuple[str, str, int, int, Timeline]] = deque(maxlen=_MAX_RECENT_REQUESTS)

    def add(self, request_id: str, caller: str, prompt_tokens: int, generated_tokens: int, timeline: Timeline) -> None:
        """Add a request that has ended. Its explanation is built from `timeline` only when the list is read."""
        self._requests.appendleft((request_id, caller, prompt_tokens, generated_tokens, timeline))

    def all(self) -> Sequence[tuple[float, str, RecentRequest]]:
        """Return three values for each request, the newest first: the time of its end (router's clock), the name of its
        caller, and its description.
        """
        return [
            (
                timeline.ended_at or timeline.arrived_at,
                caller,
                RecentRequest(
                    prompt_tokens=prompt_tokens,
                    generated_tokens=generated_tokens,
                    finish_reasons=[str(reason) for reason in timeline.finish_reasons],
                    baton=timeline.explain(request_id, timeline.ended_at or timeline.arrived_at),
                ),
            )
            for request_id, caller, prompt_tokens, generated_tokens, timeline in self._requests
        ]


logger = logging.getLogger(__name__)

_MAX_BATCH_REQUESTS = 16
"""Requests in one batch. A larger one would delay the tokens of running requests by more than half a millisecond."""
_MAX_DELAY_S = 0.05
"""Longest time until an ended request is recorded."""


class RequestLog:
    """Records the metrics and log lines of one dispatcher's ended requests, many at a time. Use it on the event loop
    only.
    """

    def __init__(self, metrics: RouterMetrics, *, clock: Callable[[], float], is_enabled: bool = False) -> None:
        """Create the log. With `is_enabled` its lines have the level info, otherwise debug. `metrics` gets the metrics
        of each request.
        """
        self._level = logging.INFO if is_enabled else logging.DEBUG
        self._metrics = metrics
        self._clock = clock
        self._unlogged: list[RequestLifecycle] = []
        self._next: asyncio.Handle | None = None
        self._is_soon = False
        """`_next` runs in the next turn of the event loop, not after `_MAX_DELAY_S`."""
        self._recent = RecentRequests()

    def add(self, lifecycle: RequestLifecycle) -> None:
        """Add a request that has ended. Its metrics and its log line are written within `_MAX_DELAY_S` seconds, or
        earlier if many requests have ended.
        """
        self._unlogged.append(lifecycle)
        # A full batch is not recorded immediately: the caller is in the middle of delivering an answer.
        if self._next is None or (len(self._unlogged) >= _MAX_BATCH_REQUESTS and not self._is_soon):
            self._schedule()

    def recent(self) -> Sequence[tuple[float, str, RecentRequest]]:
        """Return three values for each of the requests that ended last, the newest first: the time of its end (router's
        clock), the name of its caller, and its description.
        """
        self.flush()
        return self._recent.all()

    def flush(self) -> None:
        """Write the metrics and log lines of all requests that were added until now."""
        lifecycles, self._unlogged = self._unlogged, []
        self._schedule()  # with an empty list it only cancels the scheduled batch
        self._log(lifecycles)

    def _schedule(self) -> None:
        """Schedule the next call of `_flush_some`: in the next turn of the event loop if enough requests have ended,
        otherwise later.
        """
        if self._next is not None:
            self._next.cancel()
        loop, num_unlogged = asyncio.get_running_loop(), len(self._unlogged)
        self._is_soon = num_unlogged >= _MAX_BATCH_REQUESTS
        if self._is_soon:
            self._next = loop.call_soon(self._flush_some)
        else:
            self._next = loop.call_later(_MAX_DELAY_S, self._flush_some) if num_unlogged else None

    def _flush_some(self) -> None:
        """Write the metrics and log lines of some requests, and schedule the rest: hundreds of requests may end at the
        same time.
        """
        lifecycles, self._unlogged = self._unlogged[:_MAX_BATCH_REQUESTS], self._unlogged[_MAX_BATCH_REQUESTS:]
        self._schedule()
        self._log(lifecycles)

    def _log(self, lifecycles: Sequence[RequestLifecycle]) -> None:
        """Record the metrics of these requests and write their log lines."""
        call_each("recording an ended request", [partial(self._record, lifecycle) for lifecycle in lifecycles])
        if logger.isEnabledFor(self._level):
            # A line carries the moment of the request's end, not the later one at which it is written.
            now = self._clock()
            since_1970 = time.time() - now
            for lifecycle in lifecycles:
                ended_at = since_1970 + (lifecycle.timeline.ended_at or now)
                log_at(logger, self._level, "request ended", log_fields(lifecycle), at=ended_at)

    def _record(self, lifecycle: RequestLifecycle) -> None:
        self._metrics.ended(lifecycle)
        self._recent.add(
            lifecycle.request.request_id,
            lifecycle.timing.caller.name,
            len(lifecycle.request.token_ids),
            lifecycle.num_generated,
            lifecycle.timeline,
        )
