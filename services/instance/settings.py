"""Settings of an instance process, whatever its role. Engine settings carry vLLM's names.

Read once in `main` by `services.common.settings.configuration`; nobody changes them afterwards.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import Role
from baton_serve.services.instance.errors import StartFailed

Device = Literal["auto", "cpu", "cuda", "xpu"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Transport = Literal["auto", "memory", "usm", "zeromq", "oneccl"]
Quantization = Literal[
    "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4",
    "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf",
]  # fmt: skip
Fp8Dtype = Literal["e4m3", "e5m2"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
Checksum = Literal["full", "sampled", "off"]
Fallback = Literal["fail", "local"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

Port = Annotated[int, Meta(ge=0, le=65535)]


class InstanceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One field, one flag: `max_model_len` is `--max-model-len`."""

    model: Annotated[
        str,
        Meta(
            description="folder of a Hugging Face model (config.json, safetensors)",
            min_length=1,
            extra={"group": "model"},
        ),
    ]
    served_model_name: Annotated[
        list[str],
        Meta(description="names under which clients may ask for the model; the first is reported (default: the model)"),
    ] = []
    device: Annotated[Device, Meta(description="where the model runs; auto takes xpu, then cuda, then cpu")] = "auto"
    device_index: Annotated[
        int | None,
        Meta(description="which device of the machine, or the first of several; the process sees no other", ge=0),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Meta(
            description="devices over which the model is split, a process each",
            ge=1,
            extra={"aliases": ["-tp"]},
        ),
    ] = 1
    disable_custom_all_reduce: Annotated[
        bool, Meta(description="sums over devices by the collective library alone, never through mapped memory")
    ] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(description="whether the model writes text or answers with vectors; auto sees it in its folder"),
    ] = "auto"
    task: Annotated[
        Literal["auto", "generate", "embed", "classify", "score"],
        Meta(description="what the model is used for, more exactly than --runner; auto sees it in its folder"),
    ] = "auto"
    dtype: Annotated[Dtype, Meta(description="of weights and KV; auto takes the model's own")] = "auto"
    quantization: Annotated[
        Quantization | None,
        Meta(description="round weights to this format while loading, or require it of the checkpoint (default: none)"),
    ] = None
    fp8_dtype: Annotated[Fp8Dtype, Meta(description="what fp8 means, for weights and for the KV cache")] = "e4m3"
    quantization_group_size: Annotated[
        int,
        Meta(description="inputs that share a scale, in formats of four and six bits: 128, 64 or 32", ge=32, le=128),
    ] = 128
    quantization_skip: Annotated[
        str, Meta(description="modules that keep their dtype, by name or last part of it: lm_head,down_proj")
    ] = ""
    kv_cache_dtype: Annotated[
        KvCacheDtype, Meta(description="of the KV cache; auto: as the model computes. Those of others are converted")
    ] = "auto"
    enable_lora: Annotated[bool, Meta(description="serve low-rank adapters (LoRA, PEFT's format) beside the model")] = (
        False
    )
    lora_modules: Annotated[
        list[str], Meta(description="adapters: name=folder; clients ask for them by name, as for a model")
    ] = []
    max_loras: Annotated[int, Meta(description="adapters that one step may mix; others wait", ge=1)] = 1
    max_lora_rank: Annotated[int, Meta(description="greatest rank of an adapter", ge=1)] = 16
    max_cpu_loras: Annotated[
        int | None,
        Meta(description="adapters kept loaded, on the device (default: 16, or as many as the flags before ask)", ge=1),
    ] = None
    max_model_len: Annotated[
        int | None, Meta(description="greatest number of tokens of prompt and answer (default: the model's own)", ge=1)
    ] = None
    max_num_seqs: Annotated[
        int | None, Meta(description="sequences that run at once (default: 256, or all tokens of a step)", ge=1)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Meta(description="tokens of one step; longer prompts are computed in chunks", ge=1)
    ] = None
    gpu_memory_utilization: Annotated[
        float, Meta(description="fraction of the device's memory for weights, work space and KV", gt=0, le=1)
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        int | None,
        Meta(
            description="size of the KV cache (4G, 512M, …); overrides --gpu-memory-utilization",
            ge=1,
            extra={"aliases": ["--kv-cache-memory"]},
        ),
    ] = None
    host_kv_gb: Annotated[
        float,
        Meta(
            description="GiB of host memory for blocks that the device evicts, pinned where that can be; 0: none",
            ge=0,
            extra={"aliases": ["--swap-space"]},
        ),
    ] = 0.0
    block_size: Annotated[
        int | None, Meta(description="tokens of a KV block (default: 16 on cpu, 64 elsewhere)", ge=1)
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None, Meta(description="number of KV blocks, whatever memory there is", ge=1)
    ] = None
    seed: Annotated[int, Meta(description="of dummy weights")] = 0
    enable_prefix_caching: Annotated[bool, Meta(description="keep blocks of ended requests for equal prefixes")] = True
    load_format: Annotated[
        Literal["auto", "dummy", "gguf"],
        Meta(description="dummy takes random weights, without files; gguf the folder's GGUF file"),
    ] = "auto"
    enforce_eager: Annotated[bool, Meta(description="never capture graphs")] = False
    async_scheduling: Annotated[
        bool | None,
        Meta(description="launch a step before the tokens of the one before it are known (default: on accelerators)"),
    ] = None
    trust_remote_code: Annotated[bool, Meta(description="run Python code that comes with the model")] = False
    max_logprobs: Annotated[int, Meta(description="most alternatives that a request may ask for", ge=0)] = 20

    instance_id: Annotated[
        str,
        Meta(
            description="unique in the cluster and stable over restarts (default: role-host-pid)",
            max_length=200,
            extra={"group": "process"},
        ),
    ] = ""
    host: Annotated[str, Meta(description="address that all ports are bound to", min_length=1)] = "127.0.0.1"
    advertise_host: Annotated[
        str, Meta(description="address under which others reach this instance (default: --host, or this host's own)")
    ] = ""
    rpc_port: Annotated[Port, Meta(description="for routers; 0 takes a free one")] = 0
    rpc_socket: Annotated[
        bool,
        Meta(
            description="take requests at a Unix socket, to which only routers of this user or root can connect, not at"
            " --rpc-port"
        ),
    ] = False
    transfer_port: Annotated[Port, Meta(description="for block transfers; 0 takes a free one")] = 0
    events_port: Annotated[Port, Meta(description="for events of the cache; 0 takes a free one")] = 0
    http_port: Annotated[Port, Meta(description="for /health and /metrics; 0 takes a free one")] = 0
    registry: Annotated[
        str, Meta(description="memory://HOST:PORT (a router), redis://…, rediss://… or unix:///…; empty: none")
    ] = ""
    cluster_key_file: Annotated[
        str | None,
        Meta(
            description="file with the secret that the cluster shares; without it ZeroMQ is not encrypted, and whoever"
            " reaches the ports is served"
        ),
    ] = None
    registry_ttl_s: Annotated[float, Meta(description="a record that is not renewed for so long expires", gt=0)] = 10.0

    kv_transport: Annotated[
        Transport,
        Meta(
            description="how blocks travel: usm in shared memory of one machine, zeromq over TCP, oneccl from device to"
            " device (xccl, nccl; gloo or oneCCL on CPUs), memory inside one process: only where nothing is handed"
            " off (unified instances); auto: host memory's first, oneccl between devices once a probe has proved it"
            " faster (CCL_TOPO_P2P_ACCESS=1 without one, =0 never)",
            extra={"group": "handoff"},
        ),
    ] = "auto"
    kv_checksum: Annotated[Checksum, Meta(description="verify blocks that arrive, a sample, or none")] = "full"
    kv_tail_parts: Annotated[
        int | None,
        Meta(
            description="a prompt's last chunk leaves in so many groups of layers while later ones are computed"
            " (at most: a divisor of the layers is taken; 1: when all of it is computed; default: where the device"
            " copies while it computes 8, of 4 MiB or more each, else 1)",
            ge=1,
            le=256,
        ),
    ] = None
    kv_zeromq_connections: Annotated[
        int,
        Meta(
            description="ZeroMQ connections to one peer, which blocks take in turns, for networks that are faster than"
            " one core sends or encrypts; the smaller number of the two ends counts",
            ge=1,
            le=16,
        ),
    ] = 1
    kv_run_dir: Annotated[
        str,
        Meta(description="folder shared with instances in other containers of this machine, for usm (default: none)"),
    ] = ""
    kv_lease_s: Annotated[
        float, Meta(description="blocks held for an instance that has fallen silent are freed after this", gt=0)
    ] = 10.0
    handoff_fallback: Annotated[
        Fallback,
        Meta(description="when a handoff fails: fail lets the router replay, local computes what is missing here"),
    ] = "fail"
    max_waiting: Annotated[
        int, Meta(description="handoffs that may wait for free blocks before others are refused", ge=0)
    ] = 1024
    drain_timeout_s: Annotated[
        float, Meta(description="time for running requests to end after SIGTERM or POST /admin/drain", ge=0)
    ] = 30.0

    drain_handover_s: Annotated[
        float, Meta(description="time after that for another instance to fetch the hottest blocks; 0: none", ge=0)
    ] = 5.0
    drain_handover_gb: Annotated[float, Meta(description="GiB of blocks that are handed on at most", ge=0)] = 4.0

    threads: Annotated[
        int | None,
        Meta(description="CPU threads for the model (default: torch's choice)", ge=1, extra={"group": "process"}),
    ] = None
    omp_threads_bind: Annotated[
        str,
        Meta(
            description="cores that the model's threads run on: 0-3,8; auto: as many threads as this process has cores,"
            " or of its cgroup; nobind: torch's choice",
            pattern=r"^(auto|nobind|\d+(-\d+)?(,\d+(-\d+)?)*)$",
        ),
    ] = "auto"
    engine_nice: Annotated[
        int,
        Meta(description="how far the model's threads stand back for others on the same cores", ge=0, le=19),
    ] = 0
    core_turns: Annotated[
        str | None,
        Meta(
            description="a file in shared memory that instances on the same cores of one host name alike: prefill then"
            " pauses while another one computes a step"
        ),
    ] = None
    core_turns_share: Annotated[
        float,
        Meta(
            description="with --core-turns, while prompts wait: the part of the time that steps of this instance take"
            " at most (not prefill's); 1: all of it",
            gt=0,
            le=1,
        ),
    ] = 0.2
    log_level: Annotated[LogLevel, Meta(description="least level that is logged")] = "info"
    log_format: Annotated[LogFormat, Meta(description="of log lines")] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(description="collector of traces (OTLP over HTTP): http://HOST:4318/v1/traces; needs baton-serve[otel]"),
    ] = None


def instance_id(settings: InstanceSettings, role: Role) -> InstanceId:
    return InstanceId(settings.instance_id or f"{role}-{socket.gethostname()}-{os.getpid()}")


def advertised_host(settings: InstanceSettings) -> str:
    """The address for the registry: a wildcard is of no use to others."""
    if settings.advertise_host:
        return settings.advertise_host
    wildcard = settings.host in ("0.0.0.0", "::", "*")
    return socket.gethostname() if wildcard else settings.host


def model_names(settings: InstanceSettings) -> list[str]:
    """The name that is reported, then its aliases."""
    if settings.served_model_name:
        return list(settings.served_model_name)
    folder = Path(settings.model).name
    return [settings.model] if folder in ("", settings.model) else [settings.model, folder]


def visible_device(settings: InstanceSettings) -> dict[str, str]:
    """Variables that show a process its own devices alone; they must be set before torch looks for devices.

    ZE_AFFINITY_MASK also spares the copy of all device memory in host memory that a second visible Arc card costs
    (https://github.com/intel/compute-runtime/issues/953).
    """
    if settings.device_index is None:
        return {}
    first = settings.device_index
    mask = ",".join(map(str, range(first, first + settings.tensor_parallel_size)))
    return {"ZE_AFFINITY_MASK": mask, "CUDA_VISIBLE_DEVICES": mask}


def short_waits(environ: Mapping[str, str]) -> dict[str, str]:
    """A variable that lets threads of a product give up their core soon after waiting for one another in vain.

    Otherwise they spin for milliseconds while another process has the core they wait for. It must be set before torch
    is imported, and gives way to what the operator has set.
    """
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environ) else {"GOMP_SPINCOUNT": "2000"}


def peer_access(environ: Mapping[str, str]) -> Literal["", "0", "1"]:
    """oneCCL's own variable, which forces the choice of `--kv-transport auto` too. Raises `StartFailed`."""
    match environ.get("CCL_TOPO_P2P_ACCESS", ""):
        case "" | "0" | "1" as said:
            return said
        case said:
            raise StartFailed(
                f"CCL_TOPO_P2P_ACCESS={said}: 1 takes oneccl between devices without a probe, 0 never does,"
                " unset lets a probe decide"
            )
