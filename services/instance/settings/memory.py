"""Define the settings of an instance's memory, with their defaults: LoRA adapters, weights, KV cache, host tier,
embeddings.
"""

from typing import Annotated, Literal

from msgspec import Meta

from baton_serve.services.instance.settings.parallel import ParallelSettings

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Other names of data types."""


class AdapterSettings(ParallelSettings, frozen=True, kw_only=True):
    """The settings of an instance for LoRA adapters."""

    enable_lora: Annotated[
        bool, Meta(description="serve LoRA adapters (PEFT format) in addition to the model", extra={"group": "lora"})
    ] = False
    lora_modules: Annotated[
        list[str],
        Meta(
            description="LoRA adapters to load at start, as NAME=FOLDER or as JSON:"
            ' {"name": "poet", "path": "/a/poet", "base_model_name": "llama"}, whose base_model_name is the parent'
            " in /v1/models; requests select one by NAME, as their model",
            extra={"objects": True},
        ),
    ] = []
    lora_dtype: Annotated[
        Dtype,
        Meta(
            description="data type of the weights of LoRA adapters, and of their products; auto: as the model",
            extra={"synonyms": DTYPES},
        ),
    ] = "auto"
    max_loras: Annotated[
        int,
        Meta(
            description="maximum number of different LoRA adapters among the sequences of one step; sequences"
            " with other adapters wait. Raise it if requests use several adapters at the same time",
            ge=1,
        ),
    ] = 1
    max_lora_rank: Annotated[int, Meta(description="maximum rank of a LoRA adapter", ge=1)] = 16
    max_cpu_loras: Annotated[
        int | None,
        Meta(
            description="maximum number of LoRA adapters whose weights are kept; the least recently used one makes"
            " room for another, and is read from its folder again when a request names it. Unlike in vLLM the"
            " weights are in device memory, so raise it only if requests use more adapters (default: 16, or"
            " --max-loras or the number of --lora-modules if that is greater)",
            ge=1,
        ),
    ] = None


class MemorySettings(AdapterSettings, frozen=True, kw_only=True):
    """Holds the sizes of what an instance keeps in the memory of its devices and of the host."""

    gpu_memory_utilization: Annotated[
        float,
        Meta(
            description="fraction of the device memory that this instance uses for weights, work space and KV"
            " cache together. Lower it if other processes use the same device",
            gt=0,
            le=1,
            extra={"group": "memory"},
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        int | None,
        Meta(
            description="size of the KV cache in bytes (4G, 512M, …); overrides --gpu-memory-utilization",
            ge=1,
            extra={"aliases": ["--kv-cache-memory"]},
        ),
    ] = None
    cpu_offload_gb: Annotated[
        float,
        Meta(
            description="memory of each device, in GiB, to save by keeping weights of some layers in pinned host"
            " memory; every step copies them to the device, layer by layer beside the computation. For models that"
            " do not fit otherwise; 0: all weights stay on the device",
            ge=0,
        ),
    ] = 0.0
    host_kv_gb: Annotated[
        float,
        Meta(
            description="GiB of host memory, pinned if possible, that keep KV blocks which the device evicts, so"
            " that prompts with the same prefix can load them again; 0 keeps none. Unlike vLLM's swap"
            " space it holds no preempted sequences",
            ge=0,
            extra={"aliases": ["--swap-space"]},
        ),
    ] = 0.0
    embedding_cache_gb: Annotated[
        float,
        Meta(
            description="GiB of host memory for embeddings of images: of encode instances to keep them for later"
            " requests, of prefill and unified instances for what arrives from encode instances at the same time",
            gt=0,
        ),
    ] = 1.0
    block_size: Annotated[
        int | None, Meta(description="tokens per KV block (default: 16 on cpu, 64 on other devices)", ge=1)
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None,
        Meta(
            description="allocate this number of KV blocks instead of the number that fits the memory; for tests", ge=1
        ),
    ] = None
