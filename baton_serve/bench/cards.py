"""Compute the prefill and decode rates of a model on a card from data sheets (docs/reference/sizing.md).
`tools/sizing.py` and the simulation use them; nothing here was measured.
"""

from dataclasses import dataclass

PREFILL_EFFICIENCY = 0.4
"""Fraction of a card's peak FLOPS that prefill is assumed to reach."""
DECODE_EFFICIENCY = 0.6
"""Fraction of a card's memory bandwidth that a decode step is assumed to reach."""
MAX_UTILIZATION = 0.7
"""Fraction of its time that an instance is planned to be busy; queues grow without bound near 1."""
MEMORY_UTILIZATION = 0.9
"""Fraction of a card's memory that the engine uses, as `--gpu-memory-utilization`."""
WORKSPACE_BYTES = 0.25e9
"""Memory for activations and workspaces beside weights and KV cache."""
WEIGHT_BYTES = 2
"""Bytes of one parameter in bfloat16."""
MAX_NUM_SEQS = 256
"""Most sequences in one decode step, as the default of `--max-num-seqs`."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    name: str
    parameters: float
    kv_bytes_per_token: int
    table_parameters: float
    """Parameters of the embedding table: vocabulary times hidden size."""
    is_tied: bool = False
    """True if the head is the embedding table, False if it has weights of its own."""


@dataclass(frozen=True, slots=True)
class TargetLoad:
    requests_per_s: float
    prompt_tokens: int
    answer_tokens: int
    inter_token_s: float


CARDS = [
    GpuSpec("B580 12 GB", 12e9, 456e9, 117e12),
    GpuSpec("A770 16 GB", 16e9, 560e9, 131e12),
    GpuSpec("B60 24 GB", 24e9, 456e9, 98.3e12),
    GpuSpec("B70 32 GB", 32e9, 608e9, 183e12),
]
MODELS = [
    ModelSpec("R1-Distill-Qwen-1.5B", 1.5e9, 28 * 1024, 151_936 * 1536),
    ModelSpec("Qwen3-4B", 4.0e9, 144 * 1024, 151_936 * 2560, is_tied=True),
    ModelSpec("Qwen2.5-7B", 7.6e9, 56 * 1024, 152_064 * 3584),
    ModelSpec("Llama-3.1-8B", 8.0e9, 128 * 1024, 128_256 * 4096),
    ModelSpec("Qwen3-8B", 8.2e9, 144 * 1024, 151_936 * 4096),
]
WEIGHT_BITS = {"16": 16.0, "8": 8.0, "4": 4.125}
"""Bits of a weight with its scales: unquantized, `--quantization int8` or `fp8`, and `sym_int4` in groups of 128."""


def weight_bytes(model: ModelSpec, bits: float = 16.0) -> float:
    """Return the bytes of all weights if those of linear layers have `bits`.

    In few bits the head keeps eight. An embedding table that is not the head keeps the model's dtype.
    """
    if bits >= 16:
        return WEIGHT_BYTES * model.parameters
    tables = model.table_parameters * (1 if model.is_tied else 1 + WEIGHT_BYTES)
    layers = model.parameters - model.table_parameters * (1 if model.is_tied else 2)
    return tables + layers * bits / 8


def kv_tokens(card: GpuSpec, model: ModelSpec, bits: float = 16.0) -> int:
    """Return the number of tokens whose 16-bit KV fits beside the weights, or 0 if the weights alone do not fit."""
    free = MEMORY_UTILIZATION * card.memory_bytes - weight_bytes(model, bits) - WORKSPACE_BYTES
    return max(0, int(free / model.kv_bytes_per_token))


def prefill_tokens_per_s(card: GpuSpec, model: ModelSpec) -> float:
    """Return prompt tokens per second. A token takes two floating point operations per parameter."""
    return PREFILL_EFFICIENCY * card.flops / (2 * model.parameters)


def step_s(card: GpuSpec, model: ModelSpec, batch: int, context: float) -> float:
    """Return the seconds of one decode step, which reads all weights once and the KV of each sequence."""
    read = WEIGHT_BYTES * model.parameters + batch * context * model.kv_bytes_per_token
    return read / (DECODE_EFFICIENCY * card.bytes_per_s)


def batch_size(card: GpuSpec, model: ModelSpec, load: TargetLoad) -> int:
    """Return the largest batch that fits in the cache and meets the ITL target, or 0 if not even one sequence does."""
    context = load.prompt_tokens + load.answer_tokens
    fitting = min(MAX_NUM_SEQS, kv_tokens(card, model) // context)
    return max((n for n in range(1, fitting + 1) if step_s(card, model, n, context) <= load.inter_token_s), default=0)


def num_prefill(card: GpuSpec, model: ModelSpec, load: TargetLoad) -> float:
    """Return the number of prefill instances that the load needs, not yet rounded up."""
    return load.requests_per_s * load.prompt_tokens / (MAX_UTILIZATION * prefill_tokens_per_s(card, model))


def num_decode(card: GpuSpec, model: ModelSpec, load: TargetLoad) -> float:
    """Return the number of decode instances that the load needs, not yet rounded up."""
    batch = batch_size(card, model, load)
    # On average half of each answer is in the cache.
    rate = batch / step_s(card, model, batch, load.prompt_tokens + load.answer_tokens / 2)
    return load.requests_per_s * load.answer_tokens / (MAX_UTILIZATION * rate)
