"""Several router processes behind one port: their messages to each other, and their metrics as one answer."""

import asyncio
import tempfile
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.services.router.processes.sibling_rpc import (
    ProcessStats,
    RouterProcess,
    SiblingRpc,
    join_metrics,
    newest_requests,
)
from baton_serve.services.router.quota.usage_limits import DAY_S, MINUTE_S, UsageWindow, WindowUsage
from baton_serve.services.router.requests.metrics import RouterMetrics

MINUTE, DAY = UsageWindow("alice", MINUTE_S, 7), UsageWindow("alice", DAY_S, 1)


def exposition(*, errors: int, model: str = "m") -> str:
    metrics = RouterMetrics(CollectorRegistry(), model)
    for _ in range(errors):
        metrics.error(429)
    metrics.generated(1, 0.03)
    return generate_latest(metrics.registry).decode()


def test_metrics_of_router_processes_have_a_label_and_add_up() -> None:
    text = join_metrics({0: exposition(errors=2), 1: exposition(errors=3)})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    errors = {sample.labels["worker"]: sample.value for sample in families["baton:http_errors"].samples}
    assert errors == {"0": 2.0, "1": 3.0}
    tokens = families["vllm:time_per_output_token_seconds"]
    assert tokens.type == "histogram"
    assert sum(sample.value for sample in tokens.samples if sample.name.endswith("_count")) == 2.0
    assert text.count("# TYPE baton:http_errors_total") == 1


def test_a_sample_that_only_one_worker_has_stays_with_its_family() -> None:
    text = join_metrics({0: exposition(errors=0), 1: exposition(errors=1, model="other")})
    lines = text.splitlines()
    (sample,) = [line for line in lines if line.startswith("baton:http_errors_total{")]
    assert lines[lines.index(sample) - 1] == "# TYPE baton:http_errors_total counter"
    assert sample == 'baton:http_errors_total{worker="1",model_name="other",status="429"} 1.0'


def test_a_sample_without_labels_gets_one() -> None:
    assert join_metrics({3: "# HELP a b\n# TYPE a gauge\na 1.0\n"}) == '# HELP a b\n# TYPE a gauge\na{worker="3"} 1.0\n'


def test_the_last_requests_of_all_are_newest_first() -> None:
    mine = ProcessStats(
        requests_in_flight=0, generated_tokens=0, recent=[(at, "alice", msgspec.Raw(b"%d" % at)) for at in (3.0, 1.0)]
    )
    other = ProcessStats(requests_in_flight=0, generated_tokens=0, recent=[(2.0, "alice", msgspec.Raw(b"2"))])
    assert [bytes(one) for one in newest_requests([mine, other], "alice")] == [b"3", b"2", b"1"]


class FixedProcess:
    """A router process that answers with the values it is given."""

    def __init__(self, index: int, folder: str) -> None:
        self.used: list[WindowUsage] = []
        self.sibling_rpc = SiblingRpc(
            RouterProcess(index, 3, folder),
            stats=lambda: ProcessStats(requests_in_flight=index, generated_tokens=10, recent=[]),
            metrics=lambda: exposition(errors=index),
            usage=lambda: self.used,
        )


def test_workers_know_each_others_figures_and_count_limits_together() -> None:
    async def run(folder: str) -> None:
        first, second, third = (FixedProcess(index, folder) for index in range(3))
        first.used = [WindowUsage(MINUTE, 1, 100), WindowUsage(DAY, 5, 500)]
        second.used = [WindowUsage(MINUTE, 2, 20)]
        third.used = [WindowUsage(MINUTE, 4, 40), WindowUsage(DAY, 4, 40)]
        for reported in (first, second):
            await reported.sibling_rpc.start()
        assert [stats.requests_in_flight for stats in await first.sibling_rpc.siblings()] == [
            1
        ]  # the third is not there
        await third.sibling_rpc.start()
        assert sum(stats.requests_in_flight for stats in await first.sibling_rpc.siblings()) == 3
        assert list(await second.sibling_rpc.metrics()) == [0, 1, 2]
        assert await first.sibling_rpc.exchange(first.used) == [WindowUsage(MINUTE, 6, 60), WindowUsage(DAY, 4, 40)]
        for reported in (first, second, third):
            await reported.sibling_rpc.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(folder))
        assert len(list(Path(folder).iterdir())) <= 3
