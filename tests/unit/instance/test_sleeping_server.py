"""An instance without a model refuses requests, and reports that it takes none."""

from dataclasses import replace

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import (
    AdapterChanged,
    Decode,
    Failed,
    Heartbeat,
    LoadAdapter,
    LoadReport,
    Pool,
    Snapshot,
    SnapshotRequest,
)
from baton_serve.contracts.pooling import PoolingSpec
from baton_serve.services.instance.sleeping_server import SleepingServer
from tests.unit.instance.fakes import IDENTITY, ROUTER, STATS, FakeRouterPort, run, ticket, work


def test_requests_are_refused_so_that_routers_place_them_elsewhere() -> None:
    async def scenario() -> None:
        router, server = sleeping()
        server.on_message(ROUTER, Decode(work("r"), ticket()))
        server.on_message(ROUTER, Pool(request_id=RequestId("p"), inputs=[], params=PoolingSpec(task="embed")))
        for (_, failed), name in zip(router.sent, ("r", "p"), strict=True):
            assert isinstance(failed, Failed)
            assert (failed.request_id, failed.code, failed.message) == (name, "draining", "it sleeps")
        server.on_message(ROUTER, LoadAdapter(request_id=RequestId("a"), name="a", path="/a"))
        _, refused = router.sent[-1]
        assert isinstance(refused, AdapterChanged) and refused.refusal == "invalid" and refused.message == "it sleeps"
        assert await server.idle(0.0) and server.num_requests == 0
        await server.drain(0.0)

    run(scenario())


def test_reports_have_no_blocks_and_counters_stay() -> None:
    async def scenario() -> None:
        router, server = sleeping()
        server.on_message(ROUTER, Heartbeat())
        _, report = router.sent[-1]
        assert isinstance(report, LoadReport) and report.draining and report.generation == IDENTITY.generation
        assert (report.load.total_blocks, report.load.free_blocks) == (0, 0)
        assert server.stats.generated_tokens == 11
        server.on_message(ROUTER, SnapshotRequest())
        _, snapshot = router.sent[-1]
        assert isinstance(snapshot, Snapshot) and snapshot.device == [] and snapshot.sequence == 0

    run(scenario())


def sleeping() -> tuple[FakeRouterPort, SleepingServer]:
    router = FakeRouterPort()
    stats = replace(STATS, generated_tokens=11, free_blocks=3)
    return router, SleepingServer(IDENTITY, stats=stats, router=router, reason="it sleeps")
