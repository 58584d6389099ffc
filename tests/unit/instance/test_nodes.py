"""The hosts of an instance meet: other processes cannot join, missing hosts are named, and waits end."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from baton_serve.bench.ports import free_port
from baton_serve.engine.parallel.channel import ChannelError
from baton_serve.services.common.cluster_key import cluster_key
from baton_serve.services.common.restart_policy import RestartPolicy
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.nodes import rank_host
from baton_serve.services.instance.nodes.agreement import EXIT_ALONE, check_nodes, rank_job
from baton_serve.services.instance.nodes.meeting import NodeMeeting
from baton_serve.services.instance.nodes.remote_rank import join
from baton_serve.services.instance.settings import InstanceSettings

KEY, OTHER_KEY = cluster_key("k" * 32), cluster_key("o" * 32)
Make = Callable[..., tuple[NodeMeeting, InstanceSettings]]


@pytest.fixture
def meet() -> Iterator[Make]:
    """Open a meeting of three hosts with one rank each."""
    opened: list[NodeMeeting] = []

    def make(**given: Any) -> tuple[NodeMeeting, InstanceSettings]:
        settings = InstanceSettings(
            model="/on/the/first", tensor_parallel_size=3, nnodes=3, master_port=free_port(), node_wait_s=0.2, **given
        )
        meeting = NodeMeeting(settings)
        meeting.open(KEY)
        opened.append(meeting)
        return meeting, settings

    yield make
    for meeting in opened:
        asyncio.run(meeting.close())


def test_the_ranks_of_other_hosts_join_and_missing_ones_are_named(meet: Make) -> None:
    meeting, settings = meet()
    first, model = join(rank_job(settings, 1), KEY)
    assert model == "/on/the/first"
    with pytest.raises(ChannelError, match=r"--node-rank 2 of --nnodes 3 \(ranks 2\) did not come .* within 0.2 s"):
        meeting.connect()
    second, _ = join(rank_job(settings, 2), KEY)
    # Rank 1 has been started again: its newer connection counts.
    again, _ = join(rank_job(settings, 1), KEY)
    assert first.recv(1) == b""
    found = meeting.connect()
    assert sorted(found) == [1, 2]
    found[1].sendall(b"x")
    assert again.recv(1) == b"x"
    for connection in (first, second, again, *found.values()):
        connection.close()
    # Ranks of the next start must connect again, and one that has ended does not count.
    join(rank_job(settings, 2), KEY)[0].close()
    with pytest.raises(ChannelError, match=r"--node-rank 1, 2 of --nnodes 3 \(ranks 1, 2\)"):
        meeting.connect()


def test_nobody_else_gets_in(meet: Make) -> None:
    meeting, settings = meet()
    with pytest.raises(TimeoutError, match=r"did not answer at 127.0.0.1 port .* within 0.2 s"):
        join(rank_job(settings, 1), OTHER_KEY)
    with socket.create_connection((settings.master_addr, settings.master_port)) as stranger:
        stranger.sendall(b"\x80\x04N." * 100)
        stranger.settimeout(5)
        # Its bytes begin no handshake, so it gets an alert at most, and the connection ends.
        with suppress(ConnectionError):
            assert stranger.recv(1 << 16)[:1] in (b"", b"\x15")
    with pytest.raises(StartFailed, match=r"--tensor-parallel-size 6 .* must be equal"):
        join(rank_job(msgspec.structs.replace(settings, tensor_parallel_size=6), 1), KEY)
    with pytest.raises(StartFailed, match="it has rank 3, and the other hosts have 1 to 2"):
        join(rank_job(settings, 3), KEY)
    with pytest.raises(ChannelError, match="ranks 1, 2"):
        meeting.connect()


def test_a_rank_waits_for_the_first_host(meet: Make) -> None:
    settings = InstanceSettings(model="m", tensor_parallel_size=2, nnodes=2, master_port=free_port(), node_wait_s=0.2)
    with pytest.raises(TimeoutError, match=r"--node-rank 0 did not answer .*refused"):
        join(rank_job(settings, 1), KEY)
    settings = msgspec.structs.replace(settings, node_wait_s=20.0)
    meeting = NodeMeeting(settings)
    opening = threading.Timer(0.1, meeting.open, (KEY,))
    opening.start()
    try:
        join(rank_job(settings, 1), KEY)[0].close()
    finally:
        opening.join()
        asyncio.run(meeting.close())


def test_an_address_of_another_host_cannot_be_opened() -> None:
    settings = InstanceSettings(model="m", tensor_parallel_size=2, nnodes=2, master_addr="192.0.2.1")
    with pytest.raises(StartFailed, match=r"--master-addr 192.0.2.1.*give an address of this host"):
        NodeMeeting(settings).open(KEY)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"node_rank": 1}, "--node-rank 1 is not among the hosts of --nnodes 1"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "is 3, which cannot be divided equally over --nnodes 2"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "cluster_key_file": None}, "needs --cluster-key-file"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(StartFailed, match=words):
        check_nodes(InstanceSettings(**{"model": "m", "cluster_key_file": "/key", **given}), "decode")


@pytest.mark.parametrize(
    ("of_ranks", "expected"), [([0, -9, EXIT_ALONE], 1), ([2], 2), ([0, "stop"], 0)], ids=["alone", "refused", "stop"]
)
def test_ranks_start_again_until_a_restart_cannot_help(
    of_ranks: list[Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank ends with its instance, or crashes: the next one waits. A signal ends the process of the host."""
    results = iter(of_ranks)

    def command(*_: str) -> list[str]:
        result = next(results)
        if result == "stop":
            return ["sh", "-c", "kill -TERM $PPID; exec sleep 60"]
        return ["sh", "-c", "kill -KILL $$" if result < 0 else f"exit {result}"]

    monkeypatch.setattr(rank_host, "module_command", command)
    monkeypatch.setattr(RestartPolicy, "next_delay_s", lambda *_, **__: 0.01)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    try:
        settings = InstanceSettings(model="m", tensor_parallel_size=2, nnodes=2, node_rank=1)
        assert rank_host.NodeRanks(settings).run() == expected
        assert list(results) == []
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
        signal.set_wakeup_fd(before[2])
