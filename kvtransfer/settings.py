"""Defines the settings of a transfer node, with the defaults of its timeouts, retries and limits."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

TransportName = Literal["auto", "memory", "usm", "zeromq", "oneccl"]
OneCclBackend = Literal[
    "auto", "libccl", "gloo", "libnccl", "nccl", "nccl+staging", "xccl+staging", "ccl+staging", "gloo+staging"
]
ChecksumMode = Literal["full", "sampled", "off"]

PeerAccess = Literal["", "0", "1"]
"""Value of CCL_TOPO_P2P_ACCESS; empty if it is not set."""

LADDER: tuple[str, ...] = ("memory", "usm", "zeromq")
"""Transports that `auto` uses without a probe, best first."""
PROBED = "oneccl"
"""Transport that `auto` uses between devices after a probe has proved it."""

MAX_CONNECTIONS = 16
"""Largest number of ZeroMQ connections of one link."""

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one `TransferNode`. Times are in seconds, sizes in bytes."""

    bind: Annotated[str, Meta(description="ZeroMQ address on which this node listens; port * picks a free port")] = (
        "tcp://127.0.0.1:*"
    )
    advertise_host: Annotated[
        str, Meta(description="host name that peers connect to; empty: the host of the bound address")
    ] = ""
    transports: Annotated[
        tuple[TransportName, ...], Meta(min_length=1, description="allowed transports, best first; auto allows all")
    ] = ("auto",)
    oneccl_backend: Annotated[
        OneCclBackend,
        Meta(description="backend of oneccl; auto: the device's backend, or libccl, else gloo, for host memory"),
    ] = "auto"
    oneccl_library: Annotated[str, Meta(description="folder of libccl.so.2; empty: the lib folder of this Python")] = ""
    peer_access: Annotated[
        PeerAccess, Meta(description="CCL_TOPO_P2P_ACCESS, for auto: 1 uses oneccl without a probe, 0 never uses it")
    ] = ""
    probe: Annotated[
        bool, Meta(description="probe unproved and demoted transports between two throw-away processes")
    ] = True
    probe_timeout_s: Annotated[float, Meta(gt=0, description="longest life of a probe process")] = 60.0
    probe_retry_s: Annotated[
        float, Meta(gt=0, description="first interval until a failed transport is probed again")
    ] = 30.0
    stall_timeout_s: Annotated[float, Meta(gt=0, description="an oneccl pair that stands still is given up")] = 10.0
    run_dir: Annotated[
        str,
        Meta(description="folder of the socket that hands out shared memory; empty: an abstract socket"),
    ] = ""
    parts: Annotated[
        int, Meta(ge=1, le=4096, description="number of parts in which a block can be published and sent")
    ] = 1
    checksum: Annotated[
        ChecksumMode,
        Meta(description="check each block, a sample (one block in eight; words of each on devices), or none"),
    ] = "full"

    curve_secret_key: Annotated[
        bytes, Meta(description="CURVE secret key (Z85) of all nodes; empty: no encryption")
    ] = b""
    curve_public_key: Annotated[bytes, Meta(description="CURVE public key (Z85) that belongs to the secret key")] = b""

    heartbeat_interval_s: Seconds = 0.2
    heartbeat_timeout_s: Seconds = 0.6
    connect_timeout_s: Annotated[float, Meta(gt=0, description="time for the first connection to a peer")] = 5.0
    relink_timeout_s: Annotated[float, Meta(gt=0, description="time to connect again after a connection broke")] = 0.3
    answer_timeout_s: Annotated[
        float, Meta(gt=0, description="time for a peer to acknowledge a fetch, or to open its ticket")
    ] = 10.0
    attach_timeout_s: Annotated[float, Meta(gt=0, description="time until both ends of a transport are ready")] = 10.0
    lease_s: Annotated[
        float, Meta(gt=0, description="time without a renewal after which the producer frees the blocks of a consumer")
    ] = 10.0
    tick_s: Annotated[float, Meta(gt=0, description="interval at which deadlines are checked")] = 0.05

    max_attempts: Annotated[int, Meta(ge=1, description="attempts of one transfer, including the first")] = 4
    max_mismatches: Annotated[
        int, Meta(ge=1, description="checksum errors of one transfer before the transport is demoted")
    ] = 2
    max_fetches: Annotated[int, Meta(ge=1, description="fetches that this node may run at once")] = 4096
    max_fetches_per_peer: Annotated[int, Meta(ge=1, description="fetches that one peer may run here at once")] = 1024
    max_tombstones: Count = 4096

    frame_bytes: Annotated[int, Meta(ge=4096, description="largest ZeroMQ frame that carries blocks")] = 8 << 20
    window_bytes: Annotated[int, Meta(ge=1, description="bytes in flight on each connection")] = 32 << 20
    batch_bytes: Annotated[
        int, Meta(ge=1, description="bytes that one message announces at most; never more than half a window")
    ] = 32 << 20
    device_batch_bytes: Annotated[
        int,
        Meta(
            ge=1, description="as batch_bytes, for blocks of a device; oneccl uses a quarter if it stages all messages"
        ),
    ] = 256 << 20
    device_window_bytes: Annotated[int, Meta(ge=1, description="as window_bytes, for blocks of a device")] = 1 << 30
    ring_bytes: Annotated[int, Meta(ge=1, description="pinned shared memory of one connection between devices")] = (
        256 << 20
    )
    inline_bytes: Annotated[
        int, Meta(ge=0, description="copies up to this size run on the event loop, not in a thread")
    ] = 1 << 20
    copy_threads: Count = 2
    io_threads: Count = 1
    zeromq_connections: Annotated[
        int,
        Meta(ge=1, le=MAX_CONNECTIONS, description="connections to one peer, used alternately; each has an I/O thread"),
    ] = 1

    def ladder(self, *, is_device: bool) -> tuple[str, ...]:
        """Return the names of the transports that this node may use, in order of preference. `is_device` says whether
        its blocks lie in memory of a device.

        For blocks in host memory, `oneccl` is left out unless the settings name it, because shared memory is always the
        fastest way between two processes of a host.
        """
        if "auto" not in self.transports:
            return self.transports
        if not is_device or self.peer_access == "0":
            return LADDER
        return (LADDER[0], PROBED, *LADDER[1:]) if self.peer_access == "1" else (*LADDER, PROBED)

    def unproved(self) -> tuple[str, ...]:
        """Return the names of the transports that must pass a probe before their first use."""
        return (PROBED,) if "auto" in self.transports and self.peer_access != "1" else ()

    def forced(self) -> dict[str, str]:
        """Return the transports that the operator's settings demand, each mapped to the setting that demands it (as
        text for logs).
        """
        if "auto" in self.transports:
            return {PROBED: "CCL_TOPO_P2P_ACCESS=1"} if self.peer_access == "1" else {}
        return {name: f"--kv-transport {name}" for name in self.transports} if len(self.transports) == 1 else {}
