"""Processes that may take an instance out of service: those of its own user, of root, and with the cluster's key."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import Load
from baton_serve.services.common.cluster_key import cluster_key
from baton_serve.services.common.http.server import HttpServer
from baton_serve.services.instance.health import HealthStatus, create_app, owners
from tests.other_user import as_nobody, needs_root

KEY = cluster_key("k" * 32)
HEALTH = HealthStatus(
    status="ready",
    role="decode",
    instance=InstanceId("decode-0"),
    generation=Generation(1),
    pid=1,
    model="m",
    device="cpu",
    uptime_s=1.0,
    load=Load(free_blocks=1, total_blocks=1),
    links=[],
    routers=1,
    requests=0,
    step_age_s=0.0,
)


def drain(port: int, **headers: str) -> int:
    """Drain the instance and return the status of the answer."""
    request = Request(f"http://127.0.0.1:{port}/admin/drain?exit=0", method="POST", headers=headers)
    try:
        with urlopen(request, timeout=8) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


def asked(ask: Callable[[int], int], *, host: str = "127.0.0.1") -> tuple[int, int]:
    """Return the result of `ask` with an instance's port, and how often the instance was drained."""
    drained: list[bool] = []

    async def on_drain(exit_afterwards: bool) -> None:
        drained.append(exit_afterwards)

    async def whole() -> int:
        app = create_app(lambda: HEALTH, CollectorRegistry(), drain=on_drain, key=KEY)
        server = HttpServer(app, host=host, port=0)
        await server.start()
        try:
            async with asyncio.timeout(40):
                return await asyncio.to_thread(ask, server.port)
        finally:
            await server.close()

    return asyncio.run(whole()), len(drained)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_process_of_the_same_user_needs_no_key(host: str) -> None:
    assert asked(drain, host=host) == (202, 1)


@needs_root
def test_another_user_of_the_machine_needs_the_key() -> None:
    assert asked(lambda port: as_nobody(drain, port)) == (403, 0)
    assert asked(lambda port: as_nobody(drain, port, authorization="Bearer guess")) == (403, 0)
    token = f"Bearer {KEY.admin_token}"
    assert asked(lambda port: as_nobody(drain, port, authorization=token)) == (202, 1)


def test_a_page_in_the_user_s_browser_is_not_the_user() -> None:
    assert asked(lambda port: drain(port, origin="https://chat.example.com")) == (403, 0)


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1075 1 0 100 0 0 10 0
   1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 1076 1 0 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 1077 1 0 20 4 30 10 -1
   3: 0100007F:C351 0100007F:1F90 06 00000000:00000000 03:000016F4 00000000     0        0 0 3 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:C352 00000000000000000000000001000000:1F90 01 0:0 00:0 0  1002        0 1 1 0
   1: 0000000000000000FFFF00000100007F:C353 0000000000000000FFFF00000100007F:1F90 01 0:0 00:0 0  1003        0 2 1 0
"""


def test_the_kernel_s_table_names_the_owner_of_the_client_s_end(tmp_path: Path) -> None:
    tables = [tmp_path / "tcp", tmp_path / "tcp6", tmp_path / "not there"]
    tables[0].write_text(TCP)
    tables[1].write_text(TCP6)
    for client, found in (
        (("127.0.0.1", 50000), {1001}),
        (("::ffff:127.0.0.1", 50000), {1001}),
        (("::1", 50002), {1002}),
        (("127.0.0.1", 50003), {1003}),
        (("127.0.0.1", 50001), set()),
        (("127.0.0.2", 50000), set()),
        (("10.1.2.3", 50000), set()),
    ):
        assert owners(client, ("127.0.0.1", 8080), tables) == found, client
    assert owners(("127.0.0.1", 50000), ("127.0.0.1", 8081), tables) == set()
