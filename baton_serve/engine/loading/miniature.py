"""Compares a small model of the same class with transformers at load, and refuses classes whose outputs differ.

A class whose layers run through transformers may depend on more than the attention interface carries: on a mask of its
own, a window in the config alone, or values of the tokens. Such a model gives other answers without an error. So for a
class that `make sweep` has not compared, a small model of the same class is made from the config, with random weights
and short windows, and both paths compute a prompt that is longer than every window.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
import transformers
from torch import Tensor, nn

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels import AttentionMetadata
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kv.state_memory import StateKind, StatePart
from baton_serve.engine.loading.compared_classes import CLASSES, TRANSFORMERS_VERSION
from baton_serve.engine.loading.layer_probe import ProbedLayers, probe_layers
from baton_serve.engine.loading.unsupported_models import INSTEAD
from baton_serve.engine.model import fused_layers, rotary
from baton_serve.engine.model import paged_attention as attention
from baton_serve.engine.model.attention_adapters import OWN_ATTENTION, adapt_attention
from baton_serve.engine.model.batch_inputs import StepInputs, StepStates
from baton_serve.engine.model.forward import TransformersForward
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.recurrent import adapt_mixers
from baton_serve.engine.model_folder import HfConfig, first_line

logger = logging.getLogger(__name__)

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes

PROMPT_TOKENS, FIRST_CHUNK_TOKENS = 61, 37
"""Length of the prompt, and of its first chunk: both end inside of a block, and are longer than `WINDOW`."""
WINDOW = 24
"""Length of all windows in the miniature."""
NUM_LAYERS = 4
BLOCK_TOKENS = 16
VOCAB_SIZE = 320
LARGEST_DIFFERENCE = 5e-3
"""Largest difference of a logit, as a fraction of the largest logit, of which float32 explains a hundredth."""
WEIGHTS_STD = 0.15
"""Wide weights, so that the logits depend on every token of the context."""

_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "rotary_dim": 8,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "qk_head_dim": 40,
    "v_head_dim": 20,
    "max_window_layers": 2,
}
"""Small values by field of a config; a field that a config has not is left out."""
_ROUNDED = frozenset({"FalconForCausalLM"})
"""Classes whose biases (ALiBi) transformers rounds to bfloat16: their logits are not those of float32 in any case."""
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
CHUNK = 2 * BLOCK_TOKENS
"""Length of the chunks of chunked attention in the miniature: whole blocks."""


def needs_comparison(module: nn.Module) -> bool:
    """Return whether the model's class must be compared with transformers at load: its layers run through transformers,
    and the class was not compared with this version of transformers before."""
    name = type(module).__name__
    is_known = name in CLASSES and transformers.__version__ == TRANSFORMERS_VERSION
    return not is_known and name not in _ROUNDED and not fused_layers.fits(module)


def check_miniature(module: nn.Module, name: str) -> None:
    """Build a small model of the same class, with random weights. Raises `UnsupportedModelError` if this engine
    computes other logits for it than transformers does. `name` is the model's in messages.

    If no small model can be made from the config, log a warning: the model is then served without a comparison.
    """
    # The caller's random numbers, of which weights may be drawn, stay as they are.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _without_gradients():
        torch.manual_seed(3)
        try:
            expected, found = _compute_both(cast(Module, module))
        # Whatever a class of any author raises for a config that it does not expect.
        except Exception as exc:  # noqa: BLE001 - the model itself has been loaded without it
            logger.warning("%s could not be compared with transformers before it is served: %s", name, first_line(exc))
            return
    difference = float((found - expected).abs().max() / expected.abs().max())
    # Written so that NaN is a difference too.
    if not difference <= LARGEST_DIFFERENCE:
        raise UnsupportedModelError(
            f"{name} cannot be served: a small model of its class computes other logits on paged attention than in"
            f" transformers (difference {difference:.2f}), because its attention depends on more than keys, values and"
            f" a window: {INSTEAD}"
        )


def small_config(config: HfConfig) -> HfConfig:
    """Return a copy of a model's config with small sizes, few layers of each type, and short windows."""
    small = copy.deepcopy(config)
    values: dict[str, Any] = config.to_dict()
    lengths = {values[name] for name in _LAYER_COUNTS if isinstance(values.get(name), int)}
    for field, value in values.items():
        if (replaced := _small_value(field, value, lengths, values)) is not None:
            setattr(small, field, replaced)
    for field in values:
        if field.endswith("_token_id") and isinstance(values[field], int):
            setattr(small, field, min(values[field], VOCAB_SIZE - 1))
    if {"expand", "num_heads", "head_dim", "n_groups"} <= values.keys():
        # Mamba 2 checks that its heads fill the expanded width.
        small.head_dim, small.n_groups = small.hidden_size * small.expand // small.num_heads, 1
    return small


def _small_value(field: str, value: object, lengths: set[int], values: dict[str, Any]) -> object:
    """Return the value of a config's field in the small model, or None to keep it. `lengths` are the model's numbers of
    layers, by which lists with one entry per layer are recognized; `values` are all fields."""
    if isinstance(value, list) and len(value) in lengths:
        return _each_kind(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if "window" in field and value > WINDOW:
        return WINDOW
    if field == "attention_chunk_size":
        return CHUNK
    if field in _KV_HEADS:
        # Attention with a single KV head, with groups and without them may have different code.
        heads = values.get("num_attention_heads")
        return 1 if value == 1 else 4 if value == heads else 2
    return _SIZES.get(field)


def _each_kind(entries: list[Any]) -> list[Any]:
    """Shorten a list with one entry per layer to the number of layers of the small model, so that each kind of entry
    remains."""
    kinds = list(dict.fromkeys(map(repr, entries)))
    chosen = [next(entry for entry in entries if repr(entry) == kind) for kind in kinds[:NUM_LAYERS]]
    return [chosen[at % len(chosen)] for at in range(NUM_LAYERS)]


def widen(module: nn.Module) -> None:
    """Replace weights of a new model that many classes start at constants (norms, biases, narrow matrices) by random
    ones, so that errors show in the logits."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.1)
        elif parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif float(parameter.std()) < 0.1:
            parameter.normal_(0.0, WEIGHTS_STD)


def _compute_both(module: Module) -> tuple[Tensor, Tensor]:
    """Compute a prompt with the small model, by transformers and by this engine. Return both logits, [num_tokens,
    vocab_size], those of transformers first."""
    config = small_config(module.config)
    reference = _build(type(module), config, "eager")
    widen(reference)
    tokens = torch.randint(3, VOCAB_SIZE // 2, (PROMPT_TOKENS,))
    # With a mask of ones, as `generate` passes it: some models compute other positions without one.
    mask = torch.ones(1, PROMPT_TOKENS, dtype=torch.int64)
    expected: Tensor = reference(input_ids=tokens[None], attention_mask=mask, use_cache=False).logits[0]
    is_own = config.model_type in OWN_ATTENTION
    own = _build(type(module), config, "eager" if is_own else attention.NAME)
    own.load_state_dict(reference.state_dict())
    own.config._attn_implementation = attention.NAME
    adapt_attention(own)
    adapt_mixers(own)
    rotary.freeze(own, PROMPT_TOKENS)
    layers = probe_layers(own, type(module).__name__, config, torch.device("cpu"))
    return expected, _run_chunks(_as_model(own, layers), layers, tokens)


def _build(kind: Module, config: HfConfig, implementation: str) -> Module:
    # A config keeps the implementation with which it was used first.
    built: Module = kind._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=implementation)
    return built.eval()


def _as_model(module: nn.Module, layers: ProbedLayers) -> LoadedModel:
    return LoadedModel(
        module=module,
        name=type(module).__name__,
        dtype=torch.float32,
        vocab_size=VOCAB_SIZE,
        max_model_len=PROMPT_TOKENS,
        kv_shapes=layers.kv_shapes,
        specs=layers.specs,
        eos_token_ids=frozenset(),
        fingerprint="",
        kv_layers=layers.kv_layers,
        shared_layers=layers.shared_layers,
        states=layers.states,
    )


def _run_chunks(model: LoadedModel, layers: ProbedLayers, tokens: Tensor) -> Tensor:
    """Compute the prompt `tokens` on this engine's paged attention in two chunks, and return the logits of all
    tokens."""
    num_blocks = -(-PROMPT_TOKENS // BLOCK_TOKENS)
    shapes = [(num_blocks, kv.num_planes, kv.num_kv_heads, BLOCK_TOKENS, kv.head_dim) for kv in model.kv_shapes]
    caches = [torch.zeros(shape).expand(-1, 2, -1, -1, -1) for shape in shapes]
    views = _states(layers.states)
    forward = TransformersForward(model, ReferenceAttention())
    found = []
    for start, end in ((0, FIRST_CHUNK_TOKENS), (FIRST_CHUNK_TOKENS, PROMPT_TOKENS)):
        positions = torch.arange(start, end)
        meta = AttentionMetadata(
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            slots=positions,
            max_query_len=end - start,
            max_context_len=end,
        )
        states = StepStates(torch.zeros(1, dtype=torch.int64), [end - start], views) if views else None
        step = StepInputs(tokens[start:end], positions, None, meta, states=states)
        found.append(forward(step, caches))
    return torch.cat(found)


def _states(parts: Sequence[StatePart]) -> dict[int, dict[tuple[StateKind, int], Tensor]]:
    """Return new recurrent states for one sequence, filled with zeros: by layer, then by kind and index. `parts`
    describes them."""
    views: dict[int, dict[tuple[StateKind, int], Tensor]] = {}
    for part in parts:
        views.setdefault(part.layer, {})[part.kind, part.index] = torch.zeros(1, *part.shape, dtype=part.dtype)
    return views


@contextmanager
def _without_gradients() -> Iterator[None]:
    # Not inference mode: weights that are made in it cannot be changed outside of it.
    with torch.no_grad():
        yield
