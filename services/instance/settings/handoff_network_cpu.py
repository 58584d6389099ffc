"""Define the settings of an instance for its name, addresses, KV transfer, draining and CPU cores, with their
defaults.
"""

from typing import Annotated, Literal

from msgspec import Meta

from baton_serve.services.common.settings.shared_settings import Host, Port, ProcessSettings

Transport = Literal["auto", "memory", "usm", "zeromq", "oneccl"]
Checksum = Literal["full", "sampled", "off"]
Fallback = Literal["fail", "local"]


class CpuSettings(ProcessSettings, frozen=True, kw_only=True):
    """The settings of the CPU threads that compute the model of an instance (their number, cores, priority, turns and
    watchdog), and of the log of its load.
    """

    disable_log_stats: Annotated[
        bool,
        Meta(
            description="do not log the throughput and the load of this instance, which it does every 10 seconds while"
            " it works",
            extra={"group": "logs"},
        ),
    ] = False
    threads: Annotated[
        int | None,
        Meta(
            description="number of CPU threads that compute the model (default: see --omp-threads-bind)",
            ge=1,
            extra={"group": "cpu"},
        ),
    ] = None
    omp_threads_bind: Annotated[
        str,
        Meta(
            description="CPU cores to which the threads that compute the model are bound, as a list such as"
            " 0-3,8. auto: bind nothing, use one thread for each physical core that this process may"
            " use; nobind: bind nothing, and torch chooses the number of threads",
            pattern=r"^(auto|nobind|\d+(-\d+)?(,\d+(-\d+)?)*)$",
        ),
    ] = "auto"
    engine_nice: Annotated[
        int,
        Meta(
            description="number that is added to the nice value of the threads that compute the model, from 0"
            " (same priority as other processes) to 19 (lowest priority). baton serve sets it for"
            " prefill workers that share CPU cores with decode workers, so that decode steps run first",
            ge=0,
            le=19,
        ),
    ] = 0
    core_turns: Annotated[
        str | None,
        Meta(
            description="path of a file in shared memory by which instances on the same CPU cores take turns:"
            " prefill instances pause while another instance computes a step, which keeps the ITL"
            " short. Give all of them the same path, such as /dev/shm/baton-turns; baton serve does"
            " this by itself if each instance would have few cores (default: no turns)"
        ),
    ] = None
    core_turns_share: Annotated[
        float,
        Meta(
            description="with --core-turns: fraction of the time that the steps of this instance may take while"
            " prompts wait on a prefill instance. Raise it for a shorter ITL, lower it for a shorter"
            " TTFT; 1 sets no limit, and prefill instances ignore it",
            gt=0,
            le=1,
        ),
    ] = 0.2
    engine_step_timeout_s: Annotated[
        float | None,
        Meta(
            description="longest time of one engine step. If a step takes longer, the instance reports itself as"
            " failed, writes the stacks of all threads to its log and exits; 0 sets no limit."
            " Compiling kernels during a step counts, the start of the instance does not (default: 20"
            " times the longest recent step of the same size and at least 60 s, or 180 s for the first"
            " step of a size)",
            ge=0,
        ),
    ] = None


class HandoffSettings(CpuSettings, frozen=True, kw_only=True):
    """The settings of an instance for transfers of KV blocks and for draining."""

    kv_transport: Annotated[
        Transport,
        Meta(
            description="how KV blocks move between instances. usm: shared memory on one machine; zeromq: TCP;"
            " oneccl: from device to device with a collective library (xccl, nccl; on CPUs gloo or"
            " oneCCL); memory: within one process, for unified instances, which hand nothing off."
            " auto: usm on one machine, else zeromq, and oneccl between devices once a probe has"
            " measured that it is faster (environment variable CCL_TOPO_P2P_ACCESS=1: use oneccl"
            " without a probe, =0: never use it)",
            extra={"group": "handoff"},
        ),
    ] = "auto"
    kv_checksum: Annotated[
        Checksum,
        Meta(
            description="which received KV blocks are compared with the sender's checksum: all (full), a sample,"
            " or none (off). After a wrong checksum the block is fetched again over another transport"
        ),
    ] = "full"
    kv_rank_transfers: Annotated[
        Literal["auto", "never"],
        Meta(
            description="auto: each device of an instance with several sends its part of a block directly to the"
            " device with the same part of the other instance, if both instances divide blocks in the same way."
            " never: whole blocks move through host memory"
        ),
    ] = "auto"
    kv_tail_parts: Annotated[
        int | None,
        Meta(
            description="send the KV of a prompt's last chunk in up to this many groups of layers, each group as"
            " soon as its layers are computed, so that the decode worker waits less after prefill. The"
            " number is lowered to a divisor of the number of layers; 1 sends all layers together"
            " (default: 8, with groups of at least 4 MiB, on devices that copy while they compute,"
            " else 1)",
            ge=1,
            le=256,
        ),
    ] = None
    kv_zeromq_connections: Annotated[
        int,
        Meta(
            description="number of TCP connections to each peer with --kv-transport zeromq; both peers use the"
            " smaller of their values. Raise it if the network is faster than one CPU core can send or"
            " encrypt",
            ge=1,
            le=16,
        ),
    ] = 1
    kv_run_dir: Annotated[
        str,
        Meta(
            description="folder for the sockets through which instances on one machine share memory for usm."
            " Instances in different containers need a volume that both mount (default: none, abstract"
            " sockets)"
        ),
    ] = ""
    kv_lease_s: Annotated[
        float,
        Meta(
            description="time for which a prefill instance keeps KV blocks for a handoff without hearing from the"
            " decode instance, which normally renews this lease; then it frees them",
            gt=0,
        ),
    ] = 10.0
    handoff_fallback: Annotated[
        Fallback,
        Meta(
            description="what a decode instance does if a handoff fails. fail: it reports the failure and the"
            " router repeats the request on other instances; local: it computes the missing part of"
            " the prompt itself, which delays its other sequences"
        ),
    ] = "fail"
    max_waiting: Annotated[
        int,
        Meta(
            description="maximum number of handoffs that wait on this instance for free KV blocks. It refuses"
            " further ones, and the router tries another instance",
            ge=0,
        ),
    ] = 1024
    drain_timeout_s: Annotated[
        float,
        Meta(
            description="seconds that running requests get to finish after SIGTERM or POST /admin/drain",
            ge=0,
            extra={"group": "shutdown"},
        ),
    ] = 30.0

    drain_handover_s: Annotated[
        float,
        Meta(
            description="time that a drained instance stays after its last request, so that another instance of"
            " its pool can fetch its most used KV blocks (drain migration); 0 disables it",
            ge=0,
        ),
    ] = 5.0
    drain_handover_gb: Annotated[
        float, Meta(description="maximum size in GiB of the KV blocks that drain migration moves", ge=0)
    ] = 4.0


class NetworkSettings(HandoffSettings, frozen=True, kw_only=True):
    """The settings of an instance as a member of the cluster: its name, its addresses and its registry."""

    instance_id: Annotated[
        str,
        Meta(
            description="name of this instance; must be unique in the cluster and should not change over restarts"
            " (default: ROLE-HOSTNAME-PID)",
            max_length=200,
            extra={"group": "network"},
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
            " processes is not encrypted and the ports accept any client",
            extra={"group": "security"},
        ),
    ] = None
    registry_ttl_s: Annotated[
        float,
        Meta(
            description="seconds after which the registry record of this instance expires if it is not renewed",
            gt=0,
            extra={"group": "network"},
        ),
    ] = 10.0
