"""Define the settings of an instance's engine (vLLM's names and defaults), and what follows: instance id, model names,
visible devices.

Each flag of the engine that vLLM has too carries vLLM's name.
"""

import os
import socket
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from baton_serve.contracts.flag_choices import REFUSED_LOAD_FORMATS, LoadFormat
from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import Role
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.local_model import local_model, names_of_model
from baton_serve.services.common.settings.configuration import stop
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings.memory import DTYPES, Dtype, MemorySettings

Device = Literal["auto", "cpu", "cuda", "xpu"]
Quantization = Literal[
    "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4",
    "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf",
]  # fmt: skip
Fp8Dtype = Literal["e4m3", "e5m2"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
QUANTIZATIONS = {"marlin": "gptq", "gptq_marlin": "gptq", "awq_marlin": "awq", "fp4": "mxfp4"}
"""Other names of formats: vLLM's kernels for CUDA have names of their own."""


class InstanceSettings(MemorySettings, frozen=True, kw_only=True):
    """The settings of one instance process. Each field is one flag: `max_model_len` is `--max-model-len`."""

    EVERYDAY: ClassVar = (
        "model", "registry", "host", "device_index", "tensor_parallel_size", "quantization", "max_model_len",
        "max_num_seqs", "gpu_memory_utilization", "kv_transport",
    )  # fmt: skip
    """The options that `--help` shows first."""
    ACCEPTS_VLLM: ClassVar = True

    model: Annotated[
        str,
        Meta(
            description="path of a Hugging Face model folder (config.json and safetensors) or of a GGUF file, or"
            " ORG/NAME of a model on the hub, which is downloaded if it is not in the cache",
            min_length=1,
            extra={"group": "model", "positional": True},
        ),
    ]
    served_model_name: Annotated[
        list[str],
        Meta(
            description="model names that clients may use in requests; the first one is reported in responses and"
            " metrics (default: the value of --model and its last path component)"
        ),
    ] = []
    device: Annotated[
        Device,
        Meta(
            description="device that computes the model; auto selects xpu if present, else cuda, else cpu",
            extra={"group": "device"},
        ),
    ] = "auto"
    device_index: Annotated[
        int | None,
        Meta(
            description="index of the device, or of the first one of several; all others are hidden from this process",
            ge=0,
        ),
    ] = None
    disable_custom_all_reduce: Annotated[
        bool, Meta(description="sum over devices with the collective library only, not with Baton's own kernel")
    ] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(
            description="generate text, or compute vectors (pooling); auto: detect it from the model folder",
            extra={"group": "model"},
        ),
    ] = "auto"
    task: Annotated[
        Literal["auto", "generate", "embed", "classify", "score"],
        Meta(description="task of the model, more specific than --runner; auto: detect it from the model folder"),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        Meta(
            description="data type of weights and activations; auto: the data type in config.json",
            extra={"synonyms": DTYPES},
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Meta(
            description="quantize weights to this format while loading, or require that the checkpoint has it"
            " (default: keep the checkpoint's format)",
            extra={"group": "quantization", "aliases": ["-q"], "synonyms": QUANTIZATIONS},
        ),
    ] = None
    fp8_dtype: Annotated[
        Fp8Dtype,
        Meta(
            description='8-bit float format that "fp8" stands for in --quantization and --kv-cache-dtype',
            extra={"synonyms": {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}},
        ),
    ] = "e4m3"
    quantization_group_size: Annotated[
        int,
        Meta(
            description="number of input values that share one scale in 4-bit and 6-bit formats: 128, 64 or 32",
            ge=32,
            le=128,
        ),
    ] = 128
    quantization_skip: Annotated[
        str,
        Meta(
            description="modules that keep their data type with --quantization, by full name or last part,"
            " separated by commas: lm_head,down_proj"
        ),
    ] = ""
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Meta(
            description="data type of the KV cache; auto: as --dtype. Blocks from an instance with another data type"
            " are converted",
            extra={"group": "memory"},
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Meta(
            description="maximum tokens of prompt and answer together (default: the model's own limit)",
            ge=1,
            extra={"group": "scheduling"},
        ),
    ] = None
    allow_long_max_model_len: Annotated[
        bool,
        Meta(
            description="accept a --max-model-len beyond the model's own limit, where answers may be wrong; also set"
            " by VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        ),
    ] = False
    disable_sliding_window: Annotated[
        bool,
        Meta(
            description="limit prompt and answer together to the sliding window of the model, within which every layer"
            " sees all tokens; without effect for a model without a window"
        ),
    ] = False
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None,
        Meta(
            description="keep the KV of all layers of every token, instead of freeing that of layers with a sliding"
            " window which no token sees any more (default: on prefill and decode instances only). With"
            " --no-disable-hybrid-kv-cache-manager handoffs need equal block sizes and data types"
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Meta(
            description="maximum number of sequences in one step, which is the largest batch; further requests"
            " wait in the queue of the instance. Raise it for more throughput while the KV cache has"
            " room, lower it for a shorter ITL (default: 256, or --max-num-batched-tokens if that is"
            " smaller)",
            ge=1,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Meta(
            description="maximum number of tokens that one step computes; longer prompts are split into chunks of"
            " this size, or smaller with a pipeline, whose stages share it. Lower values give sequences that decode in"
            " the same steps a shorter ITL, higher ones a shorter TTFT (default: 512 on cpu, 2048 on other devices)",
            ge=1,
        ),
    ] = None
    seed: Annotated[
        int, Meta(description="random seed of the weights with --load-format dummy", extra={"group": "model"})
    ] = 0
    enable_prefix_caching: Annotated[
        bool,
        Meta(
            description="keep the KV blocks of finished requests and reuse them for prompts with the same prefix",
            extra={"group": "memory"},
        ),
    ] = True
    load_format: Annotated[
        LoadFormat,
        Meta(
            description="kind of weight files. auto: safetensors, else GGUF, else pt, which is pytorch_model.bin;"
            " npcache: as pt; sharded_state: files of vLLM's save_sharded_state; bitsandbytes: round to NF4 while"
            " loading; dummy: random weights, no weight files needed",
            extra={"group": "model", "refused": REFUSED_LOAD_FORMATS},
        ),
    ] = "auto"
    model_loader_extra_config: Annotated[
        dict[str, object],
        Meta(
            description="settings of --load-format: enable_multithread_load and num_threads (threads that copy weights"
            " to devices), pattern (names of the files of sharded_state), qlora_adapter_name_or_path (bitsandbytes:"
            " only the layers of that adapter are rounded)"
        ),
    ] = {}
    enforce_eager: Annotated[
        bool,
        Meta(
            description="launch each kernel separately and capture no CUDA or XPU graphs. Decoding is slower, but"
            " errors of a device or driver are easier to find",
            extra={"group": "scheduling"},
        ),
    ] = False
    async_scheduling: Annotated[
        bool | None,
        Meta(
            description="launch the next step before the host knows the tokens of the current one, so that the"
            " device does not wait for the host (default: on accelerators, not on cpu)"
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, Meta(description="allow Python code from the model folder to run", extra={"group": "model"})
    ] = False
    max_logprobs: Annotated[
        int,
        Meta(
            description="maximum logprobs or prompt_logprobs (alternatives per token) of a request",
            ge=0,
            extra={"group": "requests"},
        ),
    ] = 20


def instance_id(settings: InstanceSettings, role: Role) -> InstanceId:
    """Return the configured instance id, or `ROLE-HOSTNAME-PID` if none is set."""
    return InstanceId(settings.instance_id or f"{role}-{socket.gethostname()}-{os.getpid()}")


def advertised_host(settings: InstanceSettings) -> str:
    """Return the host name or address by which other processes reach this instance: `--advertise-host`, or else
    `--host`. If that stands for all addresses, it is the name of this machine.
    """
    if settings.advertise_host:
        return settings.advertise_host
    # Other hosts cannot connect to a wildcard address.
    wildcard = settings.host in ("0.0.0.0", "::", "*")
    return socket.gethostname() if wildcard else settings.host


def model_names(settings: InstanceSettings) -> list[str]:
    """Return the model names that requests may use for this instance. The first is reported in answers, the others are
    aliases.
    """
    if settings.served_model_name:
        return list(settings.served_model_name)
    return names_of_model(settings.model)


def with_local_model(settings: InstanceSettings, environ: Mapping[str, str], role: Role) -> InstanceSettings:
    """Return the settings with the local path of the model, which is downloaded or unpacked first if necessary.

    The names that requests use are those of the model as it was given. The process exits if the model cannot be
    obtained.
    """
    try:
        path = local_model(settings.source(settings.model), environ)
    except ConfigurationError as exc:
        stop(f"baton {role}", str(exc))
    if path == settings.model:
        return settings
    return msgspec.structs.replace(settings, model=path, served_model_name=model_names(settings))


def visible_device(settings: InstanceSettings) -> dict[str, str]:
    """Return environment variables that hide all devices but the instance's own from this process; empty without
    `--device-index`.

    They must be set before torch initializes its devices. ZE_AFFINITY_MASK also avoids that the driver mirrors all
    device memory in host memory, which a second visible Arc card causes
    (https://github.com/intel/compute-runtime/issues/953).
    """
    if settings.device_index is None:
        return {}
    first = settings.device_index
    # Both variables are set because the device kind is not known yet: torch must not be imported before they are set.
    mask = ",".join(map(str, range(first, first + settings.devices_per_node)))
    return {"ZE_AFFINITY_MASK": mask, "CUDA_VISIBLE_DEVICES": mask}


def short_waits(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment variable that makes OpenMP threads busy-wait for a shorter time; empty if the operator has
    set such a variable in `environ`.

    By default an OpenMP thread spins for milliseconds at a barrier, and takes the core from the very thread that it
    waits for if processes share cores. The variable must be set before torch is imported.
    """
    # libgomp's default is 300,000 iterations. If the operator has set either variable, keep that choice.
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environ) else {"GOMP_SPINCOUNT": "2000"}


def peer_access(environ: Mapping[str, str]) -> Literal["", "0", "1"]:
    """Return the value of oneCCL's variable CCL_TOPO_P2P_ACCESS in `environ`, which also forces the choice of
    `--kv-transport auto`.

    Return "" if it is unset. Raises `StartFailed` for any value but "0" and "1".
    """
    match environ.get("CCL_TOPO_P2P_ACCESS", ""):
        case "" | "0" | "1" as value:
            return value
        case value:
            raise StartFailed(
                f"CCL_TOPO_P2P_ACCESS={value} is invalid; set 1 to use oneccl between devices without a probe, 0 to"
                " never use it, or unset it to let a probe decide"
            )
