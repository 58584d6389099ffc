"""Run one trace through the router's own dispatcher, placement and block index, with simulated instances."""

import asyncio
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from baton_serve.bench.serving.traces import Trace, TraceRequest
from baton_serve.bench.simulation.autoscaling import Autoscaler, PoolSizes, ScalingRules
from baton_serve.bench.simulation.cluster import SimulatedCluster
from baton_serve.bench.simulation.cost import CostModel
from baton_serve.bench.simulation.measures import Distribution, Gaps
from baton_serve.bench.simulation.virtual_time import run_virtually
from baton_serve.contracts.instance import Role
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.main import admission_control, request_policy
from baton_serve.services.router.placement.policy import PolicyName
from baton_serve.services.router.placement.prefix_pull import PullPolicy
from baton_serve.services.router.protocol.caller import Slo
from baton_serve.services.router.protocol.errors import RouterError
from baton_serve.services.router.requests.dispatcher import Dispatcher
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.prompt_request import PromptRequest, RequestTiming
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.settings import RouterSettings

_UNSHARED = 1 << 30
"""First token ID of prompts without hashes in the trace. Each such prompt repeats an ID of its own, larger than all
hashes, so that it shares no prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Inputs of one simulation."""

    trace: Trace
    cost: CostModel
    num_prefill: int
    num_decode: int
    num_unified: int = 0
    policy: PolicyName = "prefix"
    block_tokens: int
    disaggregation_min_tokens: int = 32
    pull: PullPolicy = "auto"
    itl_s: float | None = None
    """ITL SLO of every request; None without one."""
    ttft_s: float | None = None
    """TTFT SLO of every request; None without one."""
    dispatch_ahead_s: float = 1.0
    """As the router's setting: work beyond these seconds waits in the router; inf: none does."""
    seed: int = 0
    shares_cache: bool = False
    """Let all prefill instances share one cache with the sum of their sizes."""
    scaling: ScalingRules | None = None
    keeps_own_gaps: bool = False
    """Keep the gaps of each request, for `Served.itl_p99_s`."""


@dataclass(frozen=True, slots=True)
class Served:
    """Times of one answered request in seconds from its arrival. `tpot_s` is None for an answer of one token."""

    at_s: float
    ttft_s: float
    tpot_s: float | None
    itl_p99_s: float | None
    """99th percentile of its own gaps between tokens; None without gaps, or if they were not kept."""
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    queue_s: float
    exposed_s: float
    predicted_ttft_s: float
    decision: str


@dataclass(slots=True)
class SimulationResult:
    """Outcome of one simulation."""

    scenario: Scenario
    served: list[Served] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Error message of each request without an answer."""
    gaps: Distribution = field(default_factory=Distribution)
    """Seconds between tokens, over all requests."""
    duration_s: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    """Fraction of time in which the instances of each role computed."""
    sizes: list[PoolSizes] = field(default_factory=list)


def simulate(scenario: Scenario) -> SimulationResult:
    """Run a scenario. The result is always the same for the same scenario; the router's own work takes no virtual
    time."""
    return run_virtually(lambda: _simulate(scenario))


async def _simulate(scenario: Scenario) -> SimulationResult:
    loop = asyncio.get_running_loop()
    gaps = Gaps(each=scenario.keeps_own_gaps)
    result = SimulationResult(scenario, gaps=gaps.all)
    simulated = SimulatedCluster(
        scenario.cost,
        block_tokens=scenario.block_tokens,
        gaps=gaps,
        num_sharers=scenario.num_prefill if scenario.shares_cache else 0,
    )
    sizes: list[tuple[Role, int]] = [
        ("prefill", scenario.num_prefill),
        ("decode", scenario.num_decode),
        ("unified", scenario.num_unified),
    ]
    for role, size in sizes:
        for _ in range(size):
            simulated.add(role)
    settings = _settings(scenario)
    cluster = Cluster(simulated, simulated, clock=loop.time, first_turn=scenario.seed)
    dispatcher = Dispatcher(
        cluster,
        rules=request_policy(settings),
        admission=admission_control(settings, has_several_owners=lambda: False),
        metrics=RouterMetrics(CollectorRegistry(), "simulated"),
        clock=loop.time,
    )
    await cluster.start()
    # Let the cluster connect to all instances before the first request.
    await asyncio.sleep(0.001)
    began = loop.time()
    autoscaler = Autoscaler(simulated, scenario.scaling, result.sizes) if scenario.scaling is not None else None
    clients: set[asyncio.Task[None]] = set()
    slo = Slo(scenario.ttft_s, scenario.itl_s)
    for number, request in enumerate(scenario.trace.requests):
        await asyncio.sleep(max(0.0, began + request.at_s - loop.time()))
        client = loop.create_task(_client(dispatcher, _prompt_request(scenario, number, request), slo, result, gaps))
        clients.add(client)
        client.add_done_callback(clients.discard)
    await asyncio.gather(*clients)
    result.duration_s = loop.time() - began
    if autoscaler is not None:
        autoscaler.stop()
    result.busy = _busy(simulated, loop.time())
    await cluster.close()
    simulated.check_idle()
    return result


def _settings(scenario: Scenario) -> RouterSettings:
    """Return router settings without deadlines and queue limits: a plan shows how late answers are, not which clients
    give up."""
    return RouterSettings(
        model="simulated",
        placement_policy=scenario.policy,
        disaggregation_min_tokens=scenario.disaggregation_min_tokens,
        kv_pull=scenario.pull,
        dispatch_ahead_s=scenario.dispatch_ahead_s,
        # Longer than any trace, in effect without a limit.
        request_timeout_s=1e6,
        handoff_timeout_s=1e6,
        max_concurrent_requests=len(scenario.trace.requests) + 1,
        max_queued_tokens=1 << 62,
    )


def prompt_tokens(trace: Trace, number: int, request: TraceRequest) -> list[int]:
    """Return token IDs of which two requests share a prefix exactly as far as their hashes in the trace do."""
    if trace.hash_tokens is None or not request.hashes:
        return [_UNSHARED + number] * request.prompt_tokens
    tokens: list[int] = []
    for name in request.hashes:
        tokens += [name] * trace.hash_tokens
    del tokens[request.prompt_tokens :]
    return tokens


def _prompt_request(scenario: Scenario, number: int, request: TraceRequest) -> PromptRequest:
    return PromptRequest(
        request_id=f"request-{number}",
        token_ids=prompt_tokens(scenario.trace, number, request),
        sampling=SamplingSpec(seed=0, max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True),
    )


async def _client(
    dispatcher: Dispatcher, prompt_request: PromptRequest, slo: Slo, result: SimulationResult, gaps: Gaps
) -> None:
    """Send one request and record its outcome."""
    loop = asyncio.get_running_loop()
    token_queue, now = TokenQueue(), loop.time()
    try:
        timing = RequestTiming(at=now, tokenizing_at=now, tokenized_at=now, slo=slo)
        [lifecycle] = dispatcher.submit([prompt_request], token_queue, timing=timing)
        while not lifecycle.is_finished:
            await token_queue.take()
    except RouterError as exc:
        result.refused.append(str(exc))
        return
    result.served.append(_served(lifecycle, prompt_request, gaps))


def _served(lifecycle: RequestLifecycle, prompt_request: PromptRequest, gaps: Gaps) -> Served:
    timeline = lifecycle.timeline
    assert timeline.first_token_at is not None
    assert timeline.last_token_at is not None
    num_tokens = prompt_request.sampling.max_tokens
    decode_s = timeline.last_token_at - timeline.first_token_at
    return Served(
        at_s=timeline.arrived_at,
        ttft_s=timeline.first_token_at - timeline.arrived_at,
        tpot_s=decode_s / (num_tokens - 1) if num_tokens > 1 else None,
        itl_p99_s=gaps.percentile(prompt_request.request_id, 99, held_s=timeline.held_s),
        e2e_s=timeline.last_token_at - timeline.arrived_at,
        prompt_tokens=len(prompt_request.token_ids),
        output_tokens=num_tokens,
        cached_tokens=sum(timeline.cached_tokens.values()),
        queue_s=timeline.report.queue_s if timeline.report is not None else 0.0,
        exposed_s=timeline.handoff.exposed_s if timeline.handoff is not None else 0.0,
        predicted_ttft_s=timeline.predicted_ttft_s,
        decision=timeline.decision,
    )


def _busy(simulated: SimulatedCluster, now: float) -> dict[str, float]:
    """Return by role the fraction of the instances' lifetime in which they computed."""
    totals: dict[str, tuple[float, float]] = {}
    for instance in [*simulated.instances.values(), *simulated.gone]:
        busy_s, lived_s = totals.get(instance.record.role, (0.0, 0.0))
        lived = (instance.ended_at or now) - instance.started_at
        totals[instance.record.role] = (busy_s + instance.engine.busy_s, lived_s + lived)
    return {role: busy_s / lived_s for role, (busy_s, lived_s) in totals.items() if lived_s}
