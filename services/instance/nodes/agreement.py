"""Checks the settings of an instance on several hosts (`--nnodes`), and defines the messages by which its processes
meet.
"""

import socket

import msgspec

from baton_serve.contracts.instance import Role
from baton_serve.services.common.settings.shared_settings import LogFormat, LogLevel
from baton_serve.services.common.version import VERSION
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import InstanceSettings

SILENCE_S = 10
"""Seconds after which a host that does not answer counts as lost."""
_PROBE_INTERVAL_S = 2
"""Seconds between two keepalive probes of the kernel on an idle connection."""


EXIT_ALONE = 4
"""Exit status of a rank that has not reached the first host in time."""


class RankJob(msgspec.Struct, frozen=True):
    """Describes a rank to its process. The fields are settings of the same name, except the first two."""

    rank: int
    instance: str
    """The text of `agreement`."""
    model: str
    master_addr: str
    master_port: int
    node_wait_s: float
    cluster_key_file: str | None
    log_level: LogLevel
    log_format: LogFormat
    log_config_file: str | None

    @property
    def place(self) -> str:
        """Return where the first host is, for messages."""
        return f"{self.master_addr} port {self.master_port}"


class RankHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank on another host, over a connection that both ends have authenticated."""

    rank: int
    instance: str
    """The text of `agreement`, which must be equal on all hosts."""


class RankWelcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RankHello`: commands follow when the instance starts. `model` is the path on the first host."""

    model: str


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """The answer to the `RankHello` of a rank that does not belong to this instance."""

    reason: str


def rank_job(settings: InstanceSettings, rank: int) -> RankJob:
    """Return the job of a rank of this host."""
    own = {name: getattr(settings, name) for name in RankJob.__struct_fields__ if name not in ("rank", "instance")}
    return RankJob(rank=rank, instance=agreement(settings), **own)


def agreement(settings: InstanceSettings) -> str:
    """Return the text in which the settings of all hosts of an instance must be equal."""
    return (
        f"baton {VERSION} --tensor-parallel-size {settings.tensor_parallel_size}"
        f" --pipeline-parallel-size {settings.pipeline_parallel_size} --nnodes {settings.nnodes}"
    )


def check_nodes(settings: InstanceSettings, role: Role) -> None:
    """Raise `StartFailed` if the settings of several hosts contradict each other, are unsafe or do not fit the role."""
    nnodes, node_rank = settings.nnodes, settings.node_rank
    if node_rank >= nnodes:
        raise StartFailed(
            f"--node-rank {node_rank} is not among the hosts of --nnodes {nnodes}: the last one is {nnodes - 1}"
        )
    if nnodes == 1:
        return
    if role == "encode":
        raise StartFailed("--nnodes divides a model that generates text: encode instances run on one host")
    if settings.num_devices % nnodes:
        raise StartFailed(
            f"--tensor-parallel-size times --pipeline-parallel-size is {settings.num_devices}, which cannot be divided"
            f" equally over --nnodes {nnodes}: choose a product that is a multiple of {nnodes}"
        )
    # Ranks execute what arrives, and rank 0 puts into the KV cache what they answer.
    if not settings.cluster_key_file:
        raise StartFailed(
            f"--nnodes {nnodes} needs --cluster-key-file, a secret that all hosts have: without it anybody who reaches"
            f" port {settings.master_port} could join the instance. Make one with `openssl rand -hex 32`"
        )


def notice_silence(connection: socket.socket) -> None:
    """Let the kernel end a connection if the other host does not answer for `SILENCE_S` seconds: it was switched off,
    or its network was lost, so that it could not close the connection.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S // _PROBE_INTERVAL_S - 1)
    # The same limit for bytes that are sent and not acknowledged, during which the kernel sends no probes.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)
