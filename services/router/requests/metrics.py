"""Metrics of the router: what a request as a whole experienced.

The router owns everything that is counted per request or per token; what an instance has or does now (running, waiting,
cache use, bytes moved) is for the instances, so nothing is counted twice in a sum over the cluster. Names are vLLM's
where dashboards know them.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge

from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.prometheus_families import (
    CounterFamilies,
    CounterValue,
    Histogram,
    HistogramFamilies,
)
from baton_serve.services.router.requests.timeline import Timeline

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_E2E_S = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_HANDOFF_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COUNT = (1, 2, 5, 10, 20)
_MAX_TOKENS_BUCKET = 1_000_000


def _one_two_five(limit: int) -> tuple[int, ...]:
    return tuple(m * 10**e for e in range(len(str(limit))) for m in (1, 2, 5) if m * 10**e <= limit)


class MetricFamilies:
    """The families of metrics of one process; each model has its own samples of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.histograms = HistogramFamilies(registry)
        self.counters = CounterFamilies(registry)
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    def gauge(self, name: str, text: str) -> Gauge:
        known = self._gauges.get(name)
        if known is None:
            known = self._gauges[name] = Gauge(name, text, ["model_name"], registry=self._registry)
        return known


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, model_name: str, *, families: MetricFamilies | None = None) -> None:
        self._families = families or MetricFamilies(registry)
        self.registry = registry
        self._model = model_name
        lengths = _one_two_five(_MAX_TOKENS_BUCKET)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._tpot = self._histogram("vllm:time_per_output_token_seconds", "Between tokens of a sequence.", _TPOT_S)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _E2E_S)
        self._tokenize = self._histogram(
            "baton:tokenize_seconds", "Rendering the chat and turning text into tokens.", _TTFT_S
        )
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Waiting at the prefill instance.", _E2E_S)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Computing the prompt.", _E2E_S)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First to last token.", _E2E_S)
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", lengths)
        self._answer_length = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", lengths)
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest sequence.", lengths
        )
        self._n = self._histogram("vllm:request_params_n", "Parameter n.", _COUNT)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "Parameter max_tokens.", lengths)
        self._handoff = self._histogram(
            "baton:handoff_seconds", "First block asked for to last block there.", _HANDOFF_S
        )
        self._exposed = self._histogram(
            "baton:handoff_exposed_seconds", "Part of a handoff that prefill's computing did not hide.", _HANDOFF_S
        )
        self._held = self._histogram(
            "baton:first_token_held_seconds", "First tokens held back for the second to follow in time.", _HANDOFF_S
        )
        self._ttft_error = self._histogram(
            "baton:ttft_prediction_error_seconds", "Distance of predicted and actual time to first token.", _TTFT_S
        )
        self._itl_error = self._histogram(
            "baton:itl_prediction_error_seconds", "Distance of predicted and mean actual time between tokens.", _TPOT_S
        )
        self._admission = self._histogram(
            "baton:admission_seconds", "Arrival until instances were chosen: tokenising, and waiting here.", _TTFT_S
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of all prompts.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens of all answers.")
        self._images = self._counter("baton:prompt_images", "Images of all prompts.")
        self._replays = self._counter("baton:replays", "Broken streams resumed on other instances.")
        self._success = self._labelled("vllm:request_success", "Sequences by how they ended.", "finished_reason")
        self._placements = self._labelled("baton:placements", "Requests by who serves them.", "decision")
        self._hits = self._labelled("baton:prefix_hit_tokens", "Prompt tokens found in a cache.", "tier")
        self._errors = self._labelled("baton:http_errors", "Requests refused or failed, by status.", "status")
        self._refusals = self._labelled("baton:admission_refusals", "Requests refused with 429, by cause.", "cause")
        self._waiting = self._gauge("baton:router_waiting_requests", "Prompts that wait in the router.")
        self._waiting_tokens = self._gauge("baton:router_waiting_tokens", "Tokens of prompts that wait in the router.")
        self.waiting(requests=0, tokens=0)
        self.in_flight = self._gauge("baton:requests_in_flight", "Prompts being answered.")

    def for_model(self, model_name: str) -> "RouterMetrics":
        """Of another model behind this router."""
        return RouterMetrics(self.registry, model_name, families=self._families)

    def error(self, status: int) -> None:
        self._count(self._errors, str(status)).value += 1

    def refused(self, cause: str) -> None:
        self._count(self._refusals, cause).value += 1

    def waiting(self, *, requests: int, tokens: int) -> None:
        self._waiting.set(requests)
        self._waiting_tokens.set(tokens)

    @property
    def generated_tokens(self) -> int:
        return int(self._generation_tokens.value)

    def generated(self, num_tokens: int, since_last_s: float | None) -> None:
        """Of one sequence. `since_last_s`: for each of them; None: they are its first."""
        self._generation_tokens.value += num_tokens
        if since_last_s is not None:
            self._tpot.observe(since_last_s)

    def started(self, lifecycle: RequestLifecycle) -> None:
        self._prompt_tokens.value += len(lifecycle.request.token_ids)
        self._images.value += len(lifecycle.request.media)

    def pooled(self, lengths: Sequence[int], seconds: float) -> None:
        """A call to a model that answers with vectors; `lengths` of its inputs in tokens."""
        self._prompt_tokens.value += sum(lengths)
        for length in lengths:
            self._prompt_length.observe(length)
        self._count(self._success, "stop").value += len(lengths)
        self._e2e.observe(seconds)

    def ended(self, lifecycle: RequestLifecycle) -> None:
        timeline, request = lifecycle.timeline, lifecycle.request
        ttft_s, itl_s, decode_s, admission_s = timeline.ttft_s, timeline.itl_s, timeline.decode_s, timeline.admission_s
        lengths = [len(sequence.token_ids) for sequence in lifecycle.sequences]
        for reason in timeline.finish_reasons:
            self._count(self._success, reason).value += 1
        self._count(self._placements, timeline.decision).value += 1
        self._replays.value += timeline.replays
        self._tokenize.observe(timeline.tokenize_s)
        self._prompt_length.observe(len(request.token_ids))
        self._n.observe(request.num_sequences)
        self._max_tokens.observe(request.sampling.max_tokens)
        self._answer_length.observe(sum(lengths))
        self._longest.observe(max(lengths))
        if timeline.e2e_s is not None and lifecycle.error is None:
            self._e2e.observe(timeline.e2e_s)
        if decode_s is not None:
            self._decode.observe(decode_s)
        if timeline.report is not None:
            self._queue.observe(timeline.report.queue_s)
            self._prefill.observe(timeline.report.prefill_s)
            for tier, tokens in timeline.report.cached_tokens.items():
                self._count(self._hits, tier).value += tokens
        if timeline.handoff is not None:
            self._handoff.observe(timeline.handoff.handoff_s)
            self._exposed.observe(timeline.handoff.exposed_s)
        if ttft_s is not None:
            self._first_token(timeline, ttft_s)
        if itl_s is not None and timeline.predicted_itl_s:
            self._itl_error.observe(abs(itl_s - timeline.predicted_itl_s))
        if admission_s is not None:
            self._admission.observe(admission_s)

    def _first_token(self, timeline: Timeline, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        self._ttft_error.observe(abs(ttft_s - timeline.held_s - timeline.predicted_ttft_s))
        if timeline.held_s:
            self._held.observe(timeline.held_s)

    def _count(self, family: str, label: str) -> CounterValue:
        return self._families.counters.labels(family, self._model, label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._families.histograms.add(name, text, buckets, self._model)

    def _counter(self, name: str, text: str) -> CounterValue:
        self._families.counters.declare(name, text)
        return self._families.counters.labels(name, self._model)

    def _labelled(self, name: str, text: str, label: str) -> str:
        self._families.counters.declare(name, text, [label])
        return name

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._families.gauge(name, text).labels(self._model)
