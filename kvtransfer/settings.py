"""Settings of a transfer node: one frozen Struct, embedded in the settings of each instance process."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

TransportName = Literal["auto", "memory", "usm", "zeromq", "oneccl"]
OneCclBackend = Literal[
    "auto", "libccl", "gloo", "libnccl", "nccl", "nccl+staging", "xccl+staging", "ccl+staging", "gloo+staging"
]
ChecksumMode = Literal["full", "sampled", "off"]

PeerAccess = Literal["", "0", "1"]

LADDER: tuple[str, ...] = ("memory", "usm", "zeromq")
"""What `auto` uses without a proof, best first."""
PROBED = "oneccl"
"""What `auto` uses between devices once a probe has proved it."""

MAX_CONNECTIONS = 16
"""Of one link."""

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    bind: Annotated[str, Meta(description="ZeroMQ address of this node; port * picks a free one")] = "tcp://127.0.0.1:*"
    advertise_host: Annotated[str, Meta(description="host that peers use; empty: the bound one")] = ""
    transports: Annotated[
        tuple[TransportName, ...], Meta(min_length=1, description="allowed transports, best first; auto: all")
    ] = ("auto",)
    oneccl_backend: Annotated[
        OneCclBackend, Meta(description="of oneccl; auto: the device's, on hosts oneCCL's own library or gloo")
    ] = "auto"
    oneccl_library: Annotated[str, Meta(description="folder of libccl.so.2; empty: this Python's lib")] = ""
    peer_access: Annotated[
        PeerAccess, Meta(description="CCL_TOPO_P2P_ACCESS, for auto: 1 takes oneccl unproved, 0 leaves it out")
    ] = ""
    probe: Annotated[bool, Meta(description="try what needs a proof, and what was demoted, between two processes")] = (
        True
    )
    probe_timeout_s: Annotated[float, Meta(gt=0, description="longest life of such a process")] = 60.0
    probe_retry_s: Annotated[float, Meta(gt=0, description="first interval until what failed is tried again")] = 30.0
    stall_timeout_s: Annotated[float, Meta(gt=0, description="an oneccl pair that stands still is given up")] = 10.0
    run_dir: Annotated[
        str,
        Meta(description="folder of the socket that hands out shared memory; empty: a name of this host's network"),
    ] = ""
    parts: Annotated[
        int, Meta(ge=1, le=4096, description="a block can be published in so many, and then travels as such")
    ] = 1
    checksum: Annotated[
        ChecksumMode, Meta(description="of each block, of a sample (one block in eight, or words of each), or none")
    ] = "full"

    curve_secret_key: Annotated[bytes, Meta(description="Z85, of all nodes; empty: ZeroMQ is not encrypted")] = b""
    curve_public_key: Annotated[bytes, Meta(description="Z85, of the secret one; never sent")] = b""

    heartbeat_interval_s: Seconds = 0.2
    heartbeat_timeout_s: Seconds = 0.6
    connect_timeout_s: Annotated[float, Meta(gt=0, description="first connection to a peer")] = 5.0
    relink_timeout_s: Annotated[float, Meta(gt=0, description="answer to a second hello after a connection broke")] = (
        0.3
    )
    answer_timeout_s: Annotated[
        float, Meta(gt=0, description="a fetch that nobody acknowledges, or whose ticket nobody opens")
    ] = 10.0
    attach_timeout_s: Annotated[float, Meta(gt=0, description="both ends of a transport must be ready by then")] = 10.0
    lease_s: Annotated[float, Meta(gt=0, description="a silent consumer loses its claim after this")] = 10.0
    tick_s: Annotated[float, Meta(gt=0, description="granularity of all deadlines")] = 0.05

    max_attempts: Annotated[int, Meta(ge=1, description="fetches of one transfer, the first included")] = 4
    max_mismatches: Annotated[int, Meta(ge=1, description="checksum errors before a transport is demoted")] = 2
    max_fetches: Annotated[int, Meta(ge=1, description="running fetches of this node")] = 4096
    max_fetches_per_peer: Annotated[int, Meta(ge=1, description="fetches one peer may have here")] = 1024
    max_tombstones: Count = 4096

    frame_bytes: Annotated[int, Meta(ge=4096, description="largest ZeroMQ frame of blocks")] = 8 << 20
    window_bytes: Annotated[int, Meta(ge=1, description="bytes on their way, of each connection")] = 32 << 20
    batch_bytes: Annotated[
        int, Meta(ge=1, description="bytes announced by one message, at most; and at most half a window")
    ] = 32 << 20
    device_batch_bytes: Annotated[
        int,
        Meta(
            ge=1, description="as batch_bytes, of a device's blocks; of oneccl, a quarter where all messages are staged"
        ),
    ] = 256 << 20
    device_window_bytes: Annotated[int, Meta(ge=1, description="as window_bytes, of a device's blocks")] = 1 << 30
    ring_bytes: Annotated[int, Meta(ge=1, description="pinned memory of one connection between devices")] = 256 << 20
    inline_bytes: Annotated[int, Meta(ge=0, description="up to here no thread is woken for a copy")] = 1 << 20
    copy_threads: Count = 2
    io_threads: Count = 1
    zeromq_connections: Annotated[
        int, Meta(ge=1, le=MAX_CONNECTIONS, description="to one peer, which blocks take in turns; a thread for each")
    ] = 1

    def ladder(self, *, is_device: bool) -> tuple[str, ...]:
        """Transport names in order of preference. On hosts nothing beats shared memory, and no probe need tell."""
        if "auto" not in self.transports:
            return self.transports
        if not is_device or self.peer_access == "0":
            return LADDER
        return (LADDER[0], PROBED, *LADDER[1:]) if self.peer_access == "1" else (*LADDER, PROBED)

    def unproved(self) -> tuple[str, ...]:
        """Of these, what needs a proof."""
        return (PROBED,) if "auto" in self.transports and self.peer_access != "1" else ()

    def forced(self) -> dict[str, str]:
        """What told to use a transport, by its name."""
        if "auto" in self.transports:
            return {PROBED: "CCL_TOPO_P2P_ACCESS=1"} if self.peer_access == "1" else {}
        return {name: f"--kv-transport {name}" for name in self.transports} if len(self.transports) == 1 else {}
