"""Defines and records the router's Prometheus metrics; the times come from `timeline.py`, finish reasons from
`lifecycle.py`.

The router counts everything per request and per token. The instances count their own state (running, waiting, cache
use, transferred bytes), so that a sum over the cluster counts nothing twice. A metric has the name that vLLM gives it
where there is one, so that existing dashboards work.
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
"""Largest bucket of the histograms of token counts."""


def _one_two_five(limit: int) -> tuple[int, ...]:
    """Return the upper bounds 1, 2, 5, 10, 20, 50, … up to `limit` for a histogram's buckets, as vLLM has them."""
    return tuple(m * 10**e for e in range(len(str(limit))) for m in (1, 2, 5) if m * 10**e <= limit)


class MetricFamilies:
    """Holds the Prometheus metrics of one process, by name. Each model has its own samples in them, by the label
    `model_name`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.histograms = HistogramFamilies(registry)
        self.counters = CounterFamilies(registry)
        # Gauges are set rarely, unlike counters and histograms, so that the library's own are fast enough.
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """Return the gauge with this name; the first call registers it. `text` is its help, and `labels` are its labels
        besides `model_name`.
        """
        # Prometheus does not allow a second registration, but every model of the router asks for the same gauges.
        known = self._gauges.get(name)
        if known is None:
            known = self._gauges[name] = Gauge(name, text, ["model_name", *labels], registry=self._registry)
        return known

    def gauge_of_all_models(self, name: str, text: str) -> Gauge:
        """Return the gauge with this name, without the label `model_name`; the first call registers it. `text` is its
        help.
        """
        known = self._gauges.get(name)
        if known is None:
            known = self._gauges[name] = Gauge(name, text, registry=self._registry)
        return known


class RouterMetrics:
    """Records the metrics of one model in one router process. Use it on the event loop only: the counters have no
    locks.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, *, families: MetricFamilies | None = None) -> None:
        self._families = families or MetricFamilies(registry)
        self.registry = registry
        self.model_name = model_name
        lengths = _one_two_five(_MAX_TOKENS_BUCKET)
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from the arrival of a request to its first token.", _TTFT_S
        )
        self._tpot = self._histogram(
            "vllm:time_per_output_token_seconds", "Time between two tokens of a sequence.", _TPOT_S
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from the arrival of a request to its last token.", _E2E_S
        )
        self._tokenize = self._histogram(
            "baton:tokenize_seconds", "Time to render the chat template and to tokenize the prompt.", _TTFT_S
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Time that a prompt waited at its prefill instance.", _E2E_S
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Time in which the prompt was computed.", _E2E_S
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "Time from the first to the last token.", _E2E_S
        )
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Number of tokens of a prompt.", lengths)
        self._answer_length = self._histogram(
            "vllm:request_generation_tokens", "Number of generated tokens of a request.", lengths
        )
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Number of generated tokens of a request's longest sequence.",
            lengths,
        )
        self._n, self._best_of = (
            self._histogram("vllm:request_params_n", "Request parameter n.", _COUNT),
            self._histogram("vllm:request_params_best_of", "Request parameter best_of, by default n.", _COUNT),
        )
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "Request parameter max_tokens.", lengths)
        self._handoff = self._histogram(
            "baton:handoff_seconds",
            "Duration of a KV handoff, from requesting the first block to receiving the last one.",
            _HANDOFF_S,
        )
        self._exposed = self._histogram(
            "baton:handoff_exposed_seconds", "Part of a KV handoff that did not overlap with the prefill.", _HANDOFF_S
        )
        self._held = self._histogram(
            "baton:first_token_held_seconds",
            "Time that a first token was held back in the router so that the second one followed within the ITL SLO.",
            _HANDOFF_S,
        )
        self._ttft_error = self._histogram(
            "baton:ttft_prediction_error_seconds",
            "Absolute difference between predicted and actual time to first token.",
            _TTFT_S,
        )
        self._itl_error = self._histogram(
            "baton:itl_prediction_error_seconds",
            "Absolute difference between predicted and actual mean time between tokens.",
            _TPOT_S,
        )
        self._admission = self._histogram(
            "baton:admission_seconds",
            "Time from arrival to placement: tokenization, and waiting in the router.",
            _TTFT_S,
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Cumulative number of prompt tokens.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Cumulative number of generated tokens.")
        self._images = self._counter("baton:prompt_images", "Cumulative number of images in prompts.")
        self._replays = self._counter(
            "baton:replays",
            "Cumulative number of replays: streams that were resumed on other instances after a failure.",
        )
        self._handoffs_due = self._counter(
            "baton:handoffs_due",
            "Cumulative number of placements that needed a KV handoff, or would have needed one that no two instances "
            "can do.",
        )
        self._handoffs_completed = self._counter(
            "baton:handoffs_completed", "Cumulative number of completed KV handoffs, counted when the last block came."
        )
        self._success = self._labelled(
            "vllm:request_success", "Cumulative number of finished sequences, by finish reason.", "finished_reason"
        )
        self._placements = self._labelled(
            "baton:placements", "Cumulative number of requests, by placement decision.", "decision"
        )
        self._hits = self._labelled(
            "baton:prefix_hit_tokens", "Cumulative number of prompt tokens found in a prefix cache, by tier.", "tier"
        )
        self._errors = self._labelled(
            "baton:http_errors", "Cumulative number of requests that were rejected or failed, by HTTP status.", "status"
        )
        self._refusals = self._labelled(
            "baton:admission_refusals", "Cumulative number of requests rejected with status 429, by cause.", "cause"
        )
        self._waiting = self._gauge("baton:router_waiting_requests", "Number of prompts that wait in the router.")
        self._waiting_tokens = self._gauge(
            "baton:router_waiting_tokens", "Number of tokens of the prompts that wait in the router."
        )
        self.waiting(requests=0, tokens=0)
        self.in_flight = self._gauge("baton:requests_in_flight", "Number of prompts that are running or waiting.")
        self.assigned = self._families.gauge_of_all_models(
            "baton:router_assigned_requests",
            "Number of requests that this router counts as load of an instance; a handed-off one counts for both.",
        )
        self.registry_connected = self._families.gauge_of_all_models(
            "baton:registry_connected", "1 if the registry answers this router, 0 if it uses the last known instances."
        )
        self._pool_instances = self._families.gauge(
            "baton:pool_instances",
            "Number of instances of a role to which this router may send requests of the model.",
            ["role"],
        )

    def for_model(self, model_name: str) -> "RouterMetrics":
        """Return the metrics of another model of this router, in the same Prometheus registry."""
        return RouterMetrics(self.registry, model_name, families=self._families)

    def pool_instances(self, role: str) -> Gauge:
        """Return the gauge for the number of this model's instances that have this role."""
        return self._pool_instances.labels(self.model_name, role)

    def error(self, status: int) -> None:
        """Count an HTTP error response with this status."""
        self._count(self._errors, str(status)).value += 1

    def refused(self, cause: str) -> None:
        """Count a request that was rejected with status 429. `cause` is the value of the metric's label."""
        self._count(self._refusals, cause).value += 1

    def handoff_due(self) -> None:
        """Count a request whose placement needs a KV handoff."""
        self._handoffs_due.value += 1

    def handoff_completed(self) -> None:
        """Count a KV handoff whose blocks have all arrived."""
        self._handoffs_completed.value += 1

    def waiting(self, *, requests: int, tokens: int) -> None:
        """Set the gauges for the number of prompts that wait in the router, and for the number of their tokens."""
        self._waiting.set(requests)
        self._waiting_tokens.set(tokens)

    @property
    def generated_tokens(self) -> int:
        """The number of tokens generated for this model since the start of the process."""
        return int(self._generation_tokens.value)

    def generated(self, num_tokens: int, since_last_s: float | None) -> None:
        """Count new tokens of one sequence. `since_last_s` is the mean time between them in seconds; None for a
        sequence's first tokens.
        """
        self._generation_tokens.value += num_tokens
        if since_last_s is not None:
            self._tpot.observe(since_last_s)

    def started(self, lifecycle: RequestLifecycle) -> None:
        """Count the prompt tokens and images of a request that was accepted."""
        self._prompt_tokens.value += len(lifecycle.request.token_ids)
        self._images.value += len(lifecycle.request.media)

    def pooled(self, lengths: Sequence[int], seconds: float) -> None:
        """Count a finished pooling request that took `seconds`; `lengths` are the numbers of tokens of its inputs."""
        self._prompt_tokens.value += sum(lengths)
        for length in lengths:
            self._prompt_length.observe(length)
        self._count(self._success, "stop").value += len(lengths)
        self._e2e.observe(seconds)

    def ended(self, lifecycle: RequestLifecycle) -> None:
        """Record the times, lengths and finish reasons of a request that has ended, successfully or not."""
        timeline, request = lifecycle.timeline, lifecycle.request
        ttft_s, itl_s, decode_s, admission_s = timeline.ttft_s, timeline.itl_s, timeline.decode_s, timeline.admission_s
        lengths = [len(sequence.token_ids) for sequence in lifecycle.sequences]
        for reason in timeline.finish_reasons:
            self._count(self._success, reason).value += 1
        self._count(self._placements, timeline.decision).value += 1
        self._replays.value += timeline.replays
        self._tokenize.observe(timeline.tokenize_s)
        self._prompt_length.observe(len(request.token_ids))
        self._n.observe(request.num_choices)
        self._best_of.observe(request.num_sequences)
        self._max_tokens.observe(request.sampling.max_tokens)
        self._answer_length.observe(sum(lengths))
        self._longest.observe(max(lengths))
        # Failed requests are left out: a fast error would look like a fast answer.
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
        # A prediction of 0 means that there was none: no step of the decode instance had been measured yet.
        if itl_s is not None and timeline.predicted_itl_s:
            self._itl_error.observe(abs(itl_s - timeline.predicted_itl_s))
        if admission_s is not None:
            self._admission.observe(admission_s)

    def _first_token(self, timeline: Timeline, ttft_s: float) -> None:
        """Record the time to first token of a request, in seconds, and how far it differs from the prediction."""
        self._ttft.observe(ttft_s)
        # The prediction does not include the time for which the router itself held the token back.
        self._ttft_error.observe(abs(ttft_s - timeline.held_s - timeline.predicted_ttft_s))
        if timeline.held_s:
            self._held.observe(timeline.held_s)

    def _count(self, family: str, label: str) -> CounterValue:
        return self._families.counters.labels(family, self.model_name, label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._families.histograms.add(name, text, buckets, self.model_name)

    def _counter(self, name: str, text: str) -> CounterValue:
        self._families.counters.declare(name, text)
        return self._families.counters.labels(name, self.model_name)

    def _labelled(self, name: str, text: str, label: str) -> str:
        """Declare a counter with one label besides the model's name, and return its name, which `_count` takes."""
        self._families.counters.declare(name, text, [label])
        return name

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._families.gauge(name, text).labels(self.model_name)
