"""The settings of an instance that its engine does not see: name, addresses, transfer of KV blocks, and CPU cores."""

from typing import Annotated, Literal

from msgspec import Meta

from baton_serve.services.common.settings.process import Host, Port, ProcessSettings

Transport = Literal["auto", "memory", "usm", "zeromq", "oneccl"]
Checksum = Literal["full", "sampled", "off"]
Fallback = Literal["fail", "local"]


class CpuSettings(ProcessSettings, frozen=True, kw_only=True):
    """Holds the settings of the threads that compute the model: their number, cores, priority, turns and watchdog."""

    threads: Annotated[
        int | None,
        Meta(
            description="number of CPU threads that compute the model (default: see --omp-threads-bind)",
            ge=1,
            extra={"group": "process"},
        ),
    ] = None
    omp_threads_bind: Annotated[
        str,
        Meta(
            description="CPU cores for the threads that compute the model: a list such as 0-3,8; auto: no binding,"
            " one thread for each physical core available to this process within its cgroup limit; nobind:"
            " no binding, torch chooses the number of threads",
            pattern=r"^(auto|nobind|\d+(-\d+)?(,\d+(-\d+)?)*)$",
        ),
    ] = "auto"
    engine_nice: Annotated[
        int,
        Meta(
            description="value added to the nice level of the threads that compute the model, so that other processes"
            " on the same CPU cores run first; 0 leaves the priority unchanged, 19 is the lowest priority",
            ge=0,
            le=19,
        ),
    ] = 0
    core_turns: Annotated[
        str | None,
        Meta(
            description="file in shared memory (for example /dev/shm/baton-turns) that coordinates instances on the"
            " same CPU cores. Give all of them the same path: a prefill instance then pauses while another"
            " instance computes a step (default: no coordination)"
        ),
    ] = None
    core_turns_share: Annotated[
        float,
        Meta(
            description="with --core-turns, on instances other than prefill: maximum fraction of the time that this"
            " instance's steps take while prompts wait on a prefill instance; 1: no limit",
            gt=0,
            le=1,
        ),
    ] = 0.2
    engine_step_timeout_s: Annotated[
        float | None,
        Meta(
            description="seconds after which a running engine step counts as hung: the instance reports itself as"
            " failed and its process ends with the stacks of all threads in its log; 0 disables it. The time must"
            " include the compilation of kernels, but not the start, which has no limit (default: 20 times the longest"
            " recent step of the same size, at least 60; for the first step of a size at least 180)",
            ge=0,
        ),
    ] = None


class HandoffSettings(CpuSettings, frozen=True, kw_only=True):
    """Holds the settings of transfers and of draining."""

    kv_transport: Annotated[
        Transport,
        Meta(
            description="transport of KV blocks between instances. usm: shared memory on one machine; zeromq: TCP;"
            " oneccl: device to device (xccl, nccl; gloo or oneCCL on CPUs); memory: within one process,"
            " only for unified instances, which hand nothing off. auto: usm on one machine, else zeromq;"
            " between devices it changes to oneccl once a probe has measured that it is faster"
            " (environment variable CCL_TOPO_P2P_ACCESS=1: use oneccl without a probe, =0: never use it)",
            extra={"group": "handoff"},
        ),
    ] = "auto"
    kv_checksum: Annotated[
        Checksum, Meta(description="checksums of received KV blocks: verify all, a sample of them, or none")
    ] = "full"
    kv_tail_parts: Annotated[
        int | None,
        Meta(
            description="maximum number of layer groups in which the KV of a prompt's last chunk is sent, so that the"
            " transfer of early layers overlaps with the computation of later ones; reduced to a divisor"
            " of the number of layers. 1 sends it after all layers are computed (default: 8 groups of at"
            " least 4 MiB each on devices that can copy while they compute, else 1)",
            ge=1,
            le=256,
        ),
    ] = None
    kv_zeromq_connections: Annotated[
        int,
        Meta(
            description="TCP connections to each peer for --kv-transport zeromq; blocks are distributed over them."
            " More than 1 helps if the network is faster than one CPU core can send or encrypt. The"
            " smaller value of the two peers is used",
            ge=1,
            le=16,
        ),
    ] = 1
    kv_run_dir: Annotated[
        str, Meta(description="folder shared with other containers of this machine, for usm transfers (default: none)")
    ] = ""
    kv_lease_s: Annotated[
        float, Meta(description="seconds without a lease renewal after which blocks kept for a handoff are freed", gt=0)
    ] = 10.0
    handoff_fallback: Annotated[
        Fallback,
        Meta(
            description="action of a decode instance when a handoff fails. fail: fail the attempt, and the router"
            " replays the request; local: compute the missing part of the prompt on this instance"
        ),
    ] = "fail"
    max_waiting: Annotated[
        int, Meta(description="maximum number of handoffs that wait for free KV blocks; others are refused", ge=0)
    ] = 1024
    drain_timeout_s: Annotated[
        float, Meta(description="seconds that running requests get to finish after SIGTERM or POST /admin/drain", ge=0)
    ] = 30.0

    drain_handover_s: Annotated[
        float,
        Meta(
            description="seconds that a drained instance then waits for another instance of its pool to fetch its"
            " most used KV blocks (drain migration); 0 disables it",
            ge=0,
        ),
    ] = 5.0
    drain_handover_gb: Annotated[
        float, Meta(description="maximum size in GiB of the KV blocks that drain migration moves", ge=0)
    ] = 4.0


class NetworkSettings(HandoffSettings, frozen=True, kw_only=True):
    """Holds the settings of an instance as a member of the cluster: its name, its addresses and its registry."""

    instance_id: Annotated[
        str,
        Meta(
            description="name of this instance; must be unique in the cluster and should not change over restarts"
            " (default: ROLE-HOSTNAME-PID)",
            max_length=200,
            extra={"group": "process"},
        ),
    ] = ""
    host: Annotated[Host, Meta(description="IP address or host name that all ports of this instance are bound to")] = (
        "127.0.0.1"
    )
    advertise_host: Annotated[
        str,
        Meta(
            description="host name or IP address under which routers and other instances reach this instance"
            " (default: --host, or the host name if --host is a wildcard address)"
        ),
    ] = ""
    rpc_port: Annotated[Port, Meta(description="TCP port for requests from routers; 0 selects a free port")] = 0
    rpc_socket: Annotated[
        bool,
        Meta(
            description="accept requests on a Unix socket instead of --rpc-port; only routers of the same user or of"
            " root can connect to it"
        ),
    ] = False
    transfer_port: Annotated[
        Port, Meta(description="TCP port for KV block transfers between instances; 0 selects a free port")
    ] = 0
    events_port: Annotated[
        Port,
        Meta(description="TCP port on which changes of the KV cache are published to routers; 0 selects a free port"),
    ] = 0
    http_port: Annotated[
        Port, Meta(description="TCP port of /health, /metrics and /admin/drain; 0 selects a free port")
    ] = 0
    registry: Annotated[
        str,
        Meta(
            description="URL of the registry: memory://HOST:PORT (a router), redis://…, rediss://… or unix:///PATH;"
            " without it no router finds this instance"
        ),
    ] = ""
    cluster_key_file: Annotated[
        str | None,
        Meta(
            description="file with the secret key that all processes of the cluster share; without it traffic between"
            " processes is not encrypted and the ports accept any client"
        ),
    ] = None
    registry_ttl_s: Annotated[
        float,
        Meta(description="seconds after which the registry record of this instance expires if it is not renewed", gt=0),
    ] = 10.0
