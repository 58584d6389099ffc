"""A process of another user beside `baton serve`: it joins nothing, reads nothing and stops nothing."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from baton_serve.contracts.messages import ToRouter
from baton_serve.services.common.rpc.instance_link import InstanceLink
from tests.e2e.cluster import Cluster, run_baton
from tests.e2e.test_faults import BODY, FLAGS
from tests.other_user import NOBODY, as_nobody, needs_root
from tests.unit.common.test_other_users import is_refused
from tests.unit.instance.test_operators import drain

pytestmark = pytest.mark.slow


async def _served(address: str) -> bool:
    """Return whether an instance answers as to a router at this address."""
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def end(is_served: bool) -> None:
        if not found.done():
            found.set_result(is_served)

    def on_message(message: ToRouter) -> None:
        end(True)

    link = InstanceLink(address, on_message=on_message, on_lost=lambda _: end(False), heartbeat_s=0.1, timeout_s=2.0)
    await link.start()
    try:
        return await found
    finally:
        await link.close()


def doors(addresses: Sequence[str]) -> list[str]:
    """Return the addresses at which an instance accepts a stranger as a router."""

    async def try_all() -> list[bool]:
        return await asyncio.gather(*map(_served, addresses))

    return [address for address, is_open in zip(addresses, asyncio.run(try_all()), strict=True) if is_open]


def listening(cluster: Cluster) -> tuple[set[int], set[str]]:
    """TCP ports and names of Unix sockets at which the cluster's processes listen, the router's own port left out."""
    serve = psutil.Process(cluster.serve_pid)
    instances = [psutil.Process(cluster.pid(role)) for role in ("prefill", "decode")]
    ports, names = set(), set()
    for process in (serve, *serve.children(recursive=True), *instances):
        for found in process.net_connections("all"):
            if found.status == psutil.CONN_LISTEN:
                ports.add(found.laddr.port)
            elif str(found.laddr).startswith("@baton-"):
                names.add(str(found.laddr))
    return ports - {cluster.port}, names


def who(cluster: Cluster) -> list[tuple[object, ...]]:
    return [tuple(found[key] for key in ("instance", "generation", "draining")) for found in cluster.instances()]


@needs_root
def test_another_user_of_the_machine_gets_nowhere(llama: Path) -> None:
    with Cluster(llama, args=FLAGS) as cluster:
        expected = cluster.complete(**BODY)["choices"][0]["text"]
        before = who(cluster)
        addresses = [instance["http_address"] for instance in cluster.instances()]
        ports, names = listening(cluster)
        # Of each instance: events, blocks, /health; and requests, shared memory; and the registry.
        assert len(ports) == 6 and len(names) == 5

        found = [f"tcp://127.0.0.1:{port}" for port in sorted(ports)] + [f"ipc://{name}" for name in sorted(names)]
        assert as_nobody(doors, found) == []
        assert [name for name in sorted(names) if not as_nobody(is_refused, f"memory:///{name}", None)] == []
        assert [as_nobody(drain, int(address.rpartition(":")[2])) for address in addresses] == [403, 403]

        assert f"another user (uid {NOBODY})" in cluster.log()
        assert "a connection to the registry is refused: a process of another user" in cluster.log()
        assert who(cluster) == before
        assert cluster.complete(**BODY)["choices"][0]["text"] == expected
        # Its own user needs no key for that.
        drained = run_baton("drain", addresses[0], "--no-exit")
        assert drained.returncode == 0, drained.stderr
