"""Compute the rates of a model on a card from data sheets (docs/reference/sizing.md). Nothing was measured."""

from dataclasses import dataclass

PREFILL_EFFICIENCY = 0.4
DECODE_EFFICIENCY = 0.6
MAX_UTILIZATION = 0.7
MEMORY_UTILIZATION = 0.9
WORKSPACE_BYTES = 0.25e9
WEIGHT_BYTES = 2
MAX_NUM_SEQS = 256


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
    ModelSpec("R1-Distill-Qwen-1.5B", 1.5e9, 28 * 1024),
    ModelSpec("Qwen3-4B", 4.0e9, 144 * 1024),
    ModelSpec("Qwen2.5-7B", 7.6e9, 56 * 1024),
    ModelSpec("Llama-3.1-8B", 8.0e9, 128 * 1024),
    ModelSpec("Qwen3-8B", 8.2e9, 144 * 1024),
]


def kv_tokens(card: GpuSpec, model: ModelSpec) -> int:
    """Tokens that fit beside the weights; 0 if these do not fit."""
    free = MEMORY_UTILIZATION * card.memory_bytes - WEIGHT_BYTES * model.parameters - WORKSPACE_BYTES
    return max(0, int(free / model.kv_bytes_per_token))


def prefill_tokens_per_s(card: GpuSpec, model: ModelSpec) -> float:
    return PREFILL_EFFICIENCY * card.flops / (2 * model.parameters)


def step_s(card: GpuSpec, model: ModelSpec, batch: int, context: float) -> float:
    """A decode step reads all weights once and each sequence's KV."""
    read = WEIGHT_BYTES * model.parameters + batch * context * model.kv_bytes_per_token
    return read / (DECODE_EFFICIENCY * card.bytes_per_s)


def batch_size(card: GpuSpec, model: ModelSpec, load: TargetLoad) -> int:
    """The largest that fits the cache and keeps the time between tokens; 0 if none does."""
    context = load.prompt_tokens + load.answer_tokens
    fitting = min(MAX_NUM_SEQS, kv_tokens(card, model) // context)
    return max((n for n in range(1, fitting + 1) if step_s(card, model, n, context) <= load.inter_token_s), default=0)


def num_prefill(card: GpuSpec, model: ModelSpec, load: TargetLoad) -> float:
    """Before rounding up."""
    return load.requests_per_s * load.prompt_tokens / (MAX_UTILIZATION * prefill_tokens_per_s(card, model))


def num_decode(card: GpuSpec, model: ModelSpec, load: TargetLoad) -> float:
    batch = batch_size(card, model, load)
    rate = batch / step_s(card, model, batch, load.prompt_tokens + load.answer_tokens / 2)
    return load.requests_per_s * load.answer_tokens / (MAX_UTILIZATION * rate)
