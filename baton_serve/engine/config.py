"""Defines the settings of one engine (vLLM: engine arguments) and refuses combinations that exclude each other. They
are checked before any weight is read, and have vLLM's names where vLLM has them.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Literal

import msgspec

from baton_serve.contracts.flag_choices import DeviceName, DtypeName, LoadFormat
from baton_serve.contracts.loader_options import LoaderOptions, loader_options
from baton_serve.engine.errors import ConfigError

RunnerType = Literal["auto", "generate", "pooling"]
Task = Literal["auto", "generate", "embed", "classify", "score"]
Quantization = Literal[
    "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4",
    "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf",
]  # fmt: skip
"""Formats of quantized weights that `quantization` may name."""
CHECKPOINT_ONLY = ("gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf")
"""Formats that only describe how a checkpoint is stored.

With all other formats the engine quantizes while it loads; `fp8` and `mxfp4` also name checkpoints that are stored so.
"""
Fp8Dtype = Literal["e4m3", "e5m2"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs per scale that the kernels for four and six bits support."""


class LoRAModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter that the engine loads at its start, as an entry of `--lora-modules` states it. `/v1/models` shows
    `base_model_name` as the adapter's parent; None: the name of the served model."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    path: Annotated[str, msgspec.Meta(min_length=1)]
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine, like vLLM's engine arguments. None in an optional field lets the device or the model's
    config.json decide."""

    model: str
    """Folder in Hugging Face format, or a GGUF file in such a folder."""
    device: DeviceName = "auto"
    """Device to compute on; `auto` takes xpu, then cuda, then the CPU."""
    dtype: DtypeName = "auto"
    """Dtype of weights and activations; `auto`: the model's own, but bfloat16 for float16 models on CPUs."""
    max_model_len: int | None = None
    """Longest prompt plus answer, in tokens; None: the longest that the model's config allows."""
    allow_long_max_model_len: bool = False
    """Accept a `max_model_len` beyond the model's own limit, where its answers may be wrong."""
    disable_sliding_window: bool = False
    """Limit prompt plus answer to the sliding window of the model, within which each token sees all earlier ones."""
    disable_hybrid_kv_cache_manager: bool = False
    """Keep the KV of all layers in one block, instead of freeing the blocks of layers with a sliding window that no
    token sees any more."""
    max_num_seqs: int = 256
    """Largest number of sequences in one step."""
    max_num_batched_tokens: int | None = None
    """Largest number of tokens in one step, prompts and decoding sequences together; None: depends on the device."""
    tensor_parallel_size: int = 1
    """Number of devices over which the layers are split (tensor parallelism); each holds a part of every KV block."""
    pipeline_parallel_size: int = 1
    """Number of stages into which the layers are divided; each stage has `tensor_parallel_size` devices."""
    pipeline_layer_partition: str | None = None
    """Number of layers of each stage, such as "10,12,10"; None: in proportion to the memory of the devices."""
    nnodes: int = 1
    """Number of hosts over which the devices are spread, equally and in the order of ranks."""
    enable_expert_parallel: bool = False
    """Give each rank whole experts of a mixture, instead of a part of each."""
    disable_custom_all_reduce: bool = False
    """Sum over ranks with the collective library alone, without kernels that access other devices' memory."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the device's memory, from 0 to 1, that this process may use in all, the KV cache included."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache in bytes, for each device (on CPUs for all ranks); it overrides `gpu_memory_utilization`."""
    cpu_offload_gb: float = 0.0
    """Memory in GiB of each device that is saved by keeping weights of some layers in host memory; each step copies
    them to the device."""
    host_kv_bytes: int = 0
    """Size of the host tier in bytes: host memory for KV blocks that the device evicts; 0: evicted blocks are lost."""
    block_size: int | None = None
    """Tokens per KV block; None: 16 on CPUs, 64 on accelerators."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks, instead of as many as fit into memory."""
    seed: int = 0
    """Seed of random weights (`load_format` dummy), and of requests of the offline API that state none."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of earlier requests with the same beginning."""
    weights_version: str = ""
    """Part of the block hashes; each update of the weights gives another one. Files need not differ in it."""
    load_format: LoadFormat = "auto"
    """Kind of weight files. `auto`: safetensors, else GGUF, else PyTorch's; `npcache` is `pt`, whose files are mapped
    without a cache; `bitsandbytes` rounds to NF4; `dummy` draws random weights, for tests and benchmarks.
    """
    model_loader_extra_config: dict[str, object] = field(default_factory=dict)
    """Settings of the load format, with vLLM's keys; see `loader_options`."""
    plugins: tuple[str, ...] | None = None
    """Names of the plug-ins that may be loaded; None: all that are installed."""
    enforce_eager: bool = False
    """Launch every kernel separately instead of replaying captured graphs."""
    max_step_stretch: float = inf
    """Longest duration of a step with prompt tokens, as a multiple of a decode-only step.

    It protects decoding sequences that have no ITL SLO.
    """
    async_scheduling: bool | None = None
    """Launch a step before the tokens of the previous one are known to the host. `None`: on accelerators only."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's folder. Only for folders whose author is trusted."""
    max_logprobs: int = 20
    """Largest number of logprobs per token that a request may ask for."""
    runner: RunnerType = "auto"
    """`pooling` loads the model for embeddings and scores, `generate` for text; `auto`: by the model's folder."""
    task: Task = "auto"
    """Task of the model; `embed`, `classify` and `score` load it as a pooling model."""
    quantization: Quantization | None = None
    """Format to which the weights of linear layers are rounded while they load.

    A quantized checkpoint must be in this format.
    """
    fp8_dtype: Fp8Dtype = "e4m3"
    """Number format that the name `fp8` stands for, for weights and for the KV cache."""
    quantization_group_size: int = 128
    """Number of consecutive inputs that share one scale, in formats of four and six bits."""
    quantization_skip: tuple[str, ...] = ()
    """Modules that keep their dtype, by full name or its last part, such as `lm_head`."""
    tail_parts: int | None = None
    """Number of layer groups in which the KV blocks of a prompt's last chunk are reported, so that their transfer
    overlaps with the computation of later layers. The largest divisor of the number of layers up to this is taken. 1:
    report whole blocks; None: decide by the device, and use fewer groups for few blocks.
    """
    kv_cache_dtype: KvCacheDtype = "auto"
    """Dtype of the KV cache; `auto`: the dtype in which the model computes."""
    enable_lora: bool = False
    """Allow LoRA adapters to be loaded beside the model."""
    lora_modules: tuple[str, ...] = ()
    """Adapters that are loaded at the start, as `name=folder` or as a JSON object with the fields of `LoRAModule`."""
    lora_dtype: DtypeName = "auto"
    """Dtype of the weights of adapters, in which their products are computed; `auto`: as the model."""
    max_loras: int = 1
    """Largest number of different adapters in one step."""
    max_lora_rank: int = 16
    """Largest rank of an adapter; loading a larger one fails."""
    reads_images: bool = False
    """Load the model's vision tower if it has one, so that prompts may contain images."""
    max_cpu_loras: int | None = None
    """Largest number of adapters that stay loaded.

    The name is vLLM's, but the weights are kept on the device. None means 16, or more if `max_loras` or `lora_modules`
    need more.
    """

    def check(self) -> None:
        """Check every value and combination of values. Raises `ConfigError` for the first one that is not supported."""
        at_least_one = {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_bytes": self.kv_cache_bytes,
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_gpu_blocks_override,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "nnodes": self.nnodes,
            "max_loras": self.max_loras,
            "max_lora_rank": self.max_lora_rank,
            "max_cpu_loras": self.max_cpu_loras,
            "tail_parts": self.tail_parts,
        }
        for name, value in at_least_one.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie in (0, 1]")
        if self.quantization_group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"quantization_group_size is {self.quantization_group_size}; it must be one of {sizes}")
        self._check_rounding()
        if self.host_kv_bytes < 0:
            raise ConfigError(f"host_kv_bytes is {self.host_kv_bytes}; it must not be negative")
        if self.host_kv_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                "host_kv_bytes keeps cached prefixes, but enable_prefix_caching is off: set only one of them"
            )
        self._check_offload()
        self._check_adapters()
        self._check_stages()
        if self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs is {self.max_logprobs}; it must not be negative")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs"
                f" ({self.max_num_seqs}): a step could not hold one token of every sequence; raise the"
                " one or lower the other"
            )

    @property
    def num_ranks(self) -> int:
        """Number of processes of this engine, one for each device: tensor parallel size times pipeline parallel
        size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Number of devices, and of processes, of the engine on each host."""
        return self.num_ranks // self.nnodes

    @property
    def rounding(self) -> Quantization | None:
        """The quantization to apply to the weights while loading: `quantization`, or "bitsandbytes" if `load_format`
        says so; None: keep the weights as they are stored."""
        return "bitsandbytes" if self.load_format == "bitsandbytes" else self.quantization

    @property
    def loader(self) -> LoaderOptions:
        """The checked entries of `model_loader_extra_config`. Raises `ConfigError` for an entry that `load_format` does
        not have."""
        try:
            return loader_options(self.load_format, self.model_loader_extra_config)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc

    @property
    def max_adapters(self) -> int:
        """Largest number of LoRA adapters whose weights are kept in device memory at the same time."""
        return self.max_cpu_loras or max(16, self.max_loras, len(self.lora_modules))

    @property
    def adapters_at_start(self) -> list[LoRAModule]:
        """The entries of `lora_modules`, parsed. Raises `ConfigError` if one is malformed."""
        return [_lora_module(entry) for entry in self.lora_modules]

    def runs_ahead(self, *, is_host: bool) -> bool:
        """Return whether a step is launched before the previous step's tokens are known: `async_scheduling`, or if that
        is None, True for every device but the CPU. `is_host` says that the device is the CPU."""
        return not is_host if self.async_scheduling is None else self.async_scheduling

    def _check_rounding(self) -> None:
        """Check that `load_format`, its extra config and `quantization` fit each other. Raises `ConfigError`
        otherwise."""
        # Reading the options checks them.
        _ = self.loader
        if self.load_format == "bitsandbytes" and self.quantization not in (None, "bitsandbytes"):
            raise ConfigError(
                f"load_format bitsandbytes rounds weights to NF4, and quantization is {self.quantization}: use one of"
                " the two"
            )

    def _check_offload(self) -> None:
        """Check `cpu_offload_gb`. Raises `ConfigError` if it is negative, or set together with adapters."""
        if self.cpu_offload_gb < 0:
            raise ConfigError(f"cpu_offload_gb is {self.cpu_offload_gb}; it must not be negative")
        if self.cpu_offload_gb and self.enable_lora:
            raise ConfigError("cpu_offload_gb moves weights that enable_lora adds to: use one of the two")

    def _check_stages(self) -> None:
        """Check the settings of pipeline parallelism and of several hosts. Raises `ConfigError` if they contradict each
        other or other settings."""
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"tensor_parallel_size ({self.tensor_parallel_size}) times pipeline_parallel_size"
                f" ({self.pipeline_parallel_size}) is {self.num_ranks}, which cannot be divided equally over nnodes"
                f" ({self.nnodes}): choose a product that is a multiple of {self.nnodes}"
            )
        if self.pipeline_parallel_size == 1 and self.pipeline_layer_partition is not None:
            raise ConfigError("pipeline_layer_partition divides layers into stages: set pipeline_parallel_size too")
        if self.pipeline_parallel_size > 1 and self.enable_lora:
            raise ConfigError(
                f"enable_lora keeps adapters whole, and pipeline_parallel_size ({self.pipeline_parallel_size}) divides"
                " the layers that they change: use one of the two"
            )

    def _check_adapters(self) -> None:
        """Check the settings of LoRA adapters. Raises `ConfigError` if they contradict each other, or if two entries of
        `lora_modules` have the same name."""
        # The adapters of one step must all be on the device.
        if self.max_adapters < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, less than max_loras ({self.max_loras}): raise it"
            )
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora")
        names = [adapter.name for adapter in self.adapters_at_start]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"lora_modules: several adapters are named {sorted(repeated)[0]}")


def _lora_module(entry: str) -> LoRAModule:
    """Parse one entry of `lora_modules`, `NAME=PATH` or JSON. Raises `ConfigError` if it is malformed."""
    try:
        if entry.lstrip().startswith("{"):
            return msgspec.json.decode(entry, type=LoRAModule)
        name, _, path = entry.partition("=")
        return msgspec.convert({"name": name, "path": path}, LoRAModule)
    except msgspec.DecodeError as exc:
        raise ConfigError(
            f'lora_modules: each entry is name=folder or {{"name": ..., "path": ...}}, not {entry!r}: {exc}'
        ) from exc
