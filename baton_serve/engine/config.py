"""The settings of one engine, checked before any weight is read. Names are vLLM's."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from baton_serve.contracts.device import DeviceName, DtypeName
from baton_serve.engine.errors import ConfigError

RunnerType = Literal["auto", "generate", "pooling"]
Task = Literal["auto", "generate", "embed", "classify", "score"]
LoadFormat = Literal["auto", "dummy", "gguf"]
Quantization = Literal[
    "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4",
    "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf",
]  # fmt: skip
CHECKPOINT_ONLY = ("gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf")
"""Name what a checkpoint must be; the others round weights, `fp8` and `mxfp4` where the checkpoint has not."""
Fp8Dtype = Literal["e4m3", "e5m2"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`None` means: chosen by the device or by the model's config."""

    model: str
    """A folder in Hugging Face's format, or a GGUF file in one."""
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    """Devices over which the model is split."""
    disable_custom_all_reduce: bool = False
    """Sums over ranks through the collective library alone; devices do not write into each other's memory."""
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    host_kv_bytes: int = 0
    """Host memory for blocks that the device evicts; 0: they are forgotten."""
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    seed: int = 0
    enable_prefix_caching: bool = True
    load_format: LoadFormat = "auto"
    enforce_eager: bool = False
    max_step_stretch: float = inf
    """So many times as long as a step without prompts may one with prompts be beside sequences that were promised no
    time between tokens."""
    async_scheduling: bool | None = None
    """Launch a step before the tokens of the one before it are known. `None`: on accelerators."""
    trust_remote_code: bool = False
    max_logprobs: int = 20
    runner: RunnerType = "auto"
    task: Task = "auto"
    quantization: Quantization | None = None
    """Round the weights of linear layers to this format while they are loaded; a quantized checkpoint must be in it."""
    fp8_dtype: Fp8Dtype = "e4m3"
    """What `fp8` means, for weights and for the KV cache."""
    quantization_group_size: int = 128
    """Inputs that share a scale, in formats of four and six bits."""
    quantization_skip: tuple[str, ...] = ()
    """Modules that keep their dtype, by name or last part of it, such as `lm_head`."""
    tail_parts: int | None = None
    """Groups of layers in which a prompt's last blocks are told of. A divisor of the layers is taken; 1: whole; None:
    as the device's copies allow, and fewer for few blocks."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """`auto`: as the model computes."""
    enable_lora: bool = False
    """Adapters may be loaded beside the model."""
    lora_modules: tuple[str, ...] = ()
    """Adapters to begin with: `name=folder`."""
    max_loras: int = 1
    """Adapters that one step may mix."""
    max_lora_rank: int = 16
    reads_images: bool = False
    """Load the model's vision tower, where it has one: prompts may have images. Not with several ranks."""
    max_cpu_loras: int | None = None
    """Adapters kept loaded; here their weights lie on the device. None: 16, or as many as other settings ask for."""

    def check(self) -> None:
        """Raises `ConfigError` for the first value that cannot be."""
        at_least_one = {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_bytes": self.kv_cache_bytes,
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_gpu_blocks_override,
            "tensor_parallel_size": self.tensor_parallel_size,
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
        if self.quantization is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"quantization ({self.quantization}) rounds whole weights, and tensor_parallel_size"
                f" ({self.tensor_parallel_size}) splits them: use one of the two"
            )
        if self.host_kv_bytes < 0:
            raise ConfigError(f"host_kv_bytes is {self.host_kv_bytes}; it must not be negative")
        if self.host_kv_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                "host_kv_bytes keeps cached prefixes, and enable_prefix_caching is off: use one of the two"
            )
        self._check_adapters()
        if self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs is {self.max_logprobs}; it must not be negative")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs"
                f" ({self.max_num_seqs}): a step could not hold one token of every sequence; raise the"
                " one or lower the other"
            )

    @property
    def max_adapters(self) -> int:
        """Most adapters whose weights are kept."""
        return self.max_cpu_loras or max(16, self.max_loras, len(self.lora_modules))

    def runs_ahead(self, *, is_host: bool) -> bool:
        """`async_scheduling`, decided."""
        return not is_host if self.async_scheduling is None else self.async_scheduling

    def _check_adapters(self) -> None:
        if self.max_adapters < max(self.max_loras, len(self.lora_modules)):
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}; it must be at least max_loras ({self.max_loras}) and the"
                f" number of lora_modules ({len(self.lora_modules)})"
            )
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora")
        if any(not all(entry.partition("=")[::2]) for entry in self.lora_modules):
            raise ConfigError(f"lora_modules: each entry is name=folder, not {self.lora_modules}")
        if self.enable_lora and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"enable_lora keeps adapters whole, and tensor_parallel_size ({self.tensor_parallel_size}) splits the"
                " layers that they change: use one of the two"
            )
