"""Probes between real temporary processes: one succeeds; others hang, crash, corrupt bytes or stay silent."""

import asyncio
import os
import sys
import time
from collections.abc import Callable

import msgspec
import psutil
import pytest

from baton_serve.kvtransfer.ladder import Rung
from baton_serve.kvtransfer.probing.plan import ProbePlan
from baton_serve.kvtransfer.probing.running import COMMAND, ProbeRunner
from baton_serve.services.doctor.device_findings import check_transports
from tests.contract.test_transports import handoff, run
from tests.contract.transports_pair import LAYOUT, NUM_BLOCKS, SETTINGS, Meddler, Pair, TensorMemory, pair_of

pytestmark = pytest.mark.slow
LADDER = msgspec.structs.replace(SETTINGS, transports=("usm", "zeromq"), probe_retry_s=0.1, probe_timeout_s=60.0)
SHORT_S = {"hang": 4.0, "mute": 2.0}
"""Seconds after which a process that never ends is given up. All other deadlines must be longer."""
BOUND_S = 120.0
"""Probes are nice: where others use all cores, their processes take long to start."""


def with_fault(fault: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.contract.probe_faults", fault)


OTHERS: set[int] = set()
"""Processes that tests of other files keep, such as a fork server and compilers of grammars."""


@pytest.fixture(autouse=True)
def _others() -> None:
    OTHERS.clear()
    OTHERS.update(child.pid for child in psutil.Process().children(recursive=True))


def children() -> set[int]:
    """Return the processes that the test has started and that are still there, zombies too."""
    return {child.pid for child in psutil.Process().children(recursive=True)} - OTHERS


async def until(is_so: Callable[[], bool], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.01)


async def demote_usm(pair: Pair, meddler: Meddler) -> None:
    meddler.after = lambda transport, _: "bad" if transport == "usm" else None  # type: ignore[assignment]
    assert await handoff(pair, 3) == "zeromq"
    meddler.after = lambda transport, _: None


def test_a_demoted_transport_is_probed_and_used_again_when_it_proved_itself() -> None:
    async def test() -> None:
        meddler = Meddler()
        async with pair_of(LADDER, meddler=meddler) as pair:
            await demote_usm(pair, meddler)
            ticket = pair.ticket(timeout_s=100)
            pair.producer.node.open(ticket)
            begun = asyncio.create_task(pair.consumer.node.fetch(ticket, [(b"0" * 16, 40)]))  # type: ignore[list-item]
            await until(lambda: pair.consumer.node.links()[0].transport == "usm")
            (link,) = pair.consumer.node.links()
            assert link.choice == "proved" and link.probed_bytes_per_second > 1e7
            assert link.reason.startswith("usm: in use, ") and "zeromq: not the fastest" in link.reason
            assert pair.consumer.tally.changes == [("usm", "demoted"), ("usm", "promoted")]
            assert {("usm", "proved"), ("zeromq", "proved")} == set(pair.consumer.tally.probes)
            assert await handoff(pair, 3) == "usm"
            pair.producer.fill(9, seed=9)
            pair.producer.node.publish(ticket.ticket, [(b"0" * 16, 9)])  # type: ignore[list-item]
            pair.producer.node.finish(ticket.ticket, b"")
            assert (await begun).transport == "zeromq"  # what had begun ended where it was
            assert pair.consumer.holds(40, seed=9)
            assert not pair.consumer.tally.retries[1:]
        assert not children()

    run(test(), bound_s=BOUND_S)


@pytest.mark.parametrize(
    ("fault", "outcome", "said"),
    [
        ("hang", "deadline", "did not end within"),
        ("abort", "crashed", "signal 6"),
        ("exit", "crashed", "status 3: the driver says goodbye"),
        ("corrupt", "wrong bytes", "other bytes arrived than were sent"),
        ("mute", "deadline", "at the producer: it did not start within"),
        ("babble", "crashed", "at the producer: it sent an invalid answer"),
    ],
)
def test_what_fails_its_probe_is_not_used_and_nothing_is_left(fault: str, outcome: str, said: str) -> None:
    async def test() -> None:
        meddler = Meddler()
        short = msgspec.structs.replace(LADDER, probe_timeout_s=SHORT_S.get(fault, LADDER.probe_timeout_s))
        source, sink = (short, LADDER) if fault == "mute" else (LADDER, short)
        async with pair_of(source, consumer_settings=sink, meddler=meddler, probe_command=with_fault(fault)) as pair:
            await demote_usm(pair, meddler)
            await until(lambda: ("usm", outcome) in pair.consumer.tally.probes)
            assert await handoff(pair, 3, first=5) == "zeromq"
            (link,) = pair.consumer.node.links()
            assert (link.transport, link.choice) == ("zeromq", "fallback")
            assert said in link.reason and f"usm: probe: {outcome}" in link.reason
            assert not [change for change in pair.consumer.tally.changes if change[1] == "promoted"]
        assert not children()

    run(test(), bound_s=BOUND_S)


def test_closing_a_node_ends_its_probe() -> None:
    async def test() -> None:
        meddler = Meddler()
        async with pair_of(LADDER, meddler=meddler, probe_command=with_fault("hang")) as pair:
            await demote_usm(pair, meddler)
            await until(lambda: len(children()) == 2)
            assert await handoff(pair, 3, first=5) == "zeromq"  # which waits for no probe
            assert children()
            began = time.monotonic()
        assert time.monotonic() - began < LADDER.probe_timeout_s / 2
        assert not children()

    run(test(), bound_s=BOUND_S)


def test_a_process_whose_parent_is_gone_ends() -> None:
    """Its stdin closes then, also after `kill -9`."""

    async def test() -> None:
        read, write = os.pipe()
        process = await asyncio.create_subprocess_exec(*COMMAND, stdin=read, stdout=asyncio.subprocess.PIPE)
        os.close(read)
        plan = ProbePlan(rungs=[Rung("usm")], settings=SETTINGS, seed=1, timeout_s=30.0)
        os.write(write, msgspec.json.encode(plan) + b"\n")
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"baton-probe ")
        os.close(write)
        assert await asyncio.wait_for(process.wait(), 60) == 0

    run(test(), bound_s=BOUND_S)


def test_a_process_that_cannot_be_started_is_a_verdict() -> None:
    async def test() -> None:
        plan = ProbePlan(
            rungs=[Rung("usm"), Rung("zeromq")], settings=SETTINGS, seed=1, timeout_s=5.0, address="tcp://x:1"
        )
        verdicts = await ProbeRunner(["/nowhere"]).fetch(plan)
        assert [verdict.outcome for verdict in verdicts] == ["unavailable", "skipped"]
        assert "no process could be started" in verdicts[0].reason

    run(test(), bound_s=BOUND_S)


def tensors() -> tuple[TensorMemory, TensorMemory]:
    return TensorMemory(NUM_BLOCKS, LAYOUT.block_bytes), TensorMemory(NUM_BLOCKS, LAYOUT.block_bytes)


def test_between_devices_the_first_handoff_goes_by_the_host_and_a_probe_measures_the_rest() -> None:
    """Tensors of the CPU stand in for memory of devices, gloo for their collective library."""

    async def test() -> None:
        settings = msgspec.structs.replace(SETTINGS, probe_timeout_s=60.0)
        async with pair_of(settings, memories=tensors()) as pair:
            assert await handoff(pair, 3) == "usm"
            await until(lambda: len(pair.consumer.tally.probes) == 2)
            assert pair.consumer.tally.probes == [("usm", "proved"), ("oneccl", "proved")]
            assert await handoff(pair, 3, first=5) in ("usm", "oneccl")
            (link,) = pair.consumer.node.links()
            assert link.choice == "proved" and link.probed_bytes_per_second
            assert "GB/s in a probe" in link.reason and "oneccl" in link.reason

    asyncio.run(asyncio.wait_for(test(), 200))


@pytest.mark.parametrize(
    ("peer_access", "transport", "choice", "said"),
    [
        ("1", "oneccl", "forced", "oneccl: in use by gloo+staging, forced by CCL_TOPO_P2P_ACCESS=1"),
        ("0", "usm", "rule", "oneccl: left out by CCL_TOPO_P2P_ACCESS=0"),
    ],
)
def test_peer_access_forces_a_choice_between_devices(peer_access: str, transport: str, choice: str, said: str) -> None:
    async def test() -> None:
        settings = msgspec.structs.replace(SETTINGS, peer_access=peer_access)
        async with pair_of(settings, memories=tensors()) as pair:
            assert await handoff(pair, 3) == transport
            await asyncio.sleep(0.7)
            (link,) = pair.consumer.node.links()
            assert link.choice == choice and said in link.reason
            assert not children()

    run(test(), bound_s=BOUND_S)


def test_on_hosts_nothing_is_probed() -> None:
    async def test() -> None:
        async with pair_of(SETTINGS) as pair:
            assert await handoff(pair, 3) == "memory"
            await asyncio.sleep(0.7)
            assert not children() and not pair.consumer.tally.probes
            assert pair.consumer.node.links()[0].choice == "rule"

    run(test(), bound_s=BOUND_S)


def test_the_doctor_tries_every_transport_of_this_machine() -> None:
    async def test() -> None:
        found = [finding async for finding in check_transports(None, 60.0)]
        assert [finding.check for finding in found][:2] == ["transport usm", "transport zeromq"]
        assert all(finding.status == "ok" and "every byte correct" in finding.message for finding in found[:2])
        assert not children()

    asyncio.run(asyncio.wait_for(test(), 200))
