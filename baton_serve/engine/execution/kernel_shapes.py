"""Derives the shapes with which a model's kernels are compared; which kernel is used is decided in
`kernels/proved_kernels.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from baton_serve.contracts.block_layout import KVLayout, KVShape
from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.kernels.interfaces import AttentionSpec
from baton_serve.engine.kernels.mixers import NO_MIXERS, MixerShapes
from baton_serve.engine.kernels.operations import WHOLE_ROW, ProofShapes, WeightFormat, different_specs
from baton_serve.engine.kernels.proved_kernels import ProvedKernels, proof_folder, prove_kernels
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.selection import kernel_candidates
from baton_serve.engine.kv.kv_cache import DTYPES
from baton_serve.engine.model.batched_mixers import packed_shapes
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.quantized.modules import quantized_layers

DEFAULT_HIDDEN_SIZE = 512
"""Size of the norms that are proved if a config does not state one by a known name."""


def choose_kernels(config: EngineConfig, model: LoadedModel, layout: KVLayout, device: torch.device) -> ProvedKernels:
    """Return the kernels that serve a model on `device`. At the first start on a machine, all candidate kernels are
    compared with plain torch; later starts read the stored result.
    """
    candidates = kernel_candidates(device, model.dtype)
    shapes = shapes_of(model, layout, config.tensor_parallel_size)
    if not devices.is_host(device):
        # CPUs compute these layers by other kernels, for single tokens, inside of transformers' forward.
        shapes = replace(shapes, mixers=packed_shapes(model.module, shapes.mixers))
    return prove_kernels(candidates, shapes, device, folder=proof_folder())


def shapes_of(model: LoadedModel, layout: KVLayout, num_ranks: int) -> ProofShapes:
    """Return the shapes with which kernels are compared for this model: those of the part that one of `num_ranks`
    tensor-parallel ranks holds.
    """
    stated: Any = cast(Any, model.module).config
    get_text_config = getattr(stated, "get_text_config", None)
    # Configs of this project's own loader have no parts.
    text = stated if get_text_config is None else get_text_config()
    stated_heads = getattr(text, "num_attention_heads", None) or getattr(text, "num_heads", None)
    num_heads = stated_heads // num_ranks if isinstance(stated_heads, int) else 0

    def shapes(kv: KVShape) -> ProofShapes:
        specs = [spec for spec, own in zip(model.specs, model.kv_shapes, strict=True) if own == kv]
        specs = specs or [AttentionSpec(kv.head_dim**-0.5)]
        return ProofShapes(
            dtype=model.dtype,
            hidden=_stated_size(text, "hidden_size", "n_embd", "d_model") or DEFAULT_HIDDEN_SIZE,
            num_heads=_num_heads(specs, num_heads, kv.num_kv_heads),
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            num_planes=kv.num_planes,
            block_tokens=layout.block_tokens,
            scale_rows=kv.scale_rows(layout),
            cache_dtype=DTYPES[layout.dtype],
            vocab_size=model.vocab_size,
            specs=different_specs(specs),
            formats=_formats(model),
            has_experts=bool(_stated_size(text, "num_local_experts", "num_experts", "n_routed_experts")),
            mixers=_mixer_shapes(lambda name: _stated_size(text, name)),
        )

    # A stage of a pipeline may have no attention.
    first, *others = map(shapes, dict.fromkeys(model.kv_shapes or model.block_shapes[:1]))
    return replace(first, others=tuple(others))


def shapes_of_config(folder: Path, device_dtype: torch.dtype, block_tokens: int) -> ProofShapes:
    """Return the shapes with which kernels are compared for the model in a folder, as far as its config.json states
    them. The model is not loaded. Raises `OSError` or `ValueError` if the config cannot be read.
    """
    stated: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    text = stated.get("text_config") or stated
    hidden, num_heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or hidden // num_heads)
    window = text.get("sliding_window")
    specs = [AttentionSpec(head_dim**-0.5)]
    if isinstance(window, int) and window > 0 and text.get("use_sliding_window", True):
        specs.append(AttentionSpec(head_dim**-0.5, sliding_window=window))
    return ProofShapes(
        dtype=device_dtype,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        num_planes=2,
        block_tokens=block_tokens,
        scale_rows=0,
        cache_dtype=device_dtype,
        vocab_size=int(text.get("vocab_size") or DEFAULT_HIDDEN_SIZE),
        specs=different_specs(specs),
        has_experts=any(text.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")),
        mixers=_mixer_shapes(lambda name: int(text.get(name) or 0)),
    )


def _mixer_shapes(size: Callable[[str], int]) -> MixerShapes:
    """Return the shapes of a model's linear attention and latent attention (MLA); 0 for what it does not have. `size`
    returns a number of the config by its name, or 0.
    """
    found = MixerShapes(
        num_key_heads=size("linear_num_key_heads"),
        num_heads=size("linear_num_value_heads"),
        key_size=size("linear_key_head_dim"),
        value_size=size("linear_value_head_dim"),
        taps=size("linear_conv_kernel_dim"),
    )
    if not all((found.num_key_heads, found.num_heads, found.key_size, found.value_size, found.taps)):
        found = NO_MIXERS
    heads, rank, rotary = size("num_attention_heads"), size("kv_lora_rank"), size("qk_rope_head_dim")
    return replace(found, rank=rank, rotary_size=rotary, num_latent_heads=heads) if rank and rotary else found


def _stated_size(config: object, *names: str) -> int:
    """Return the value of the first of the fields `names` of a config that is an integer; 0 if none is."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def _num_heads(specs: Sequence[AttentionSpec], stated: int, num_kv_heads: int) -> int:
    """Return the number of query heads of a rank: that of the sinks or ALiBi slopes in `specs`, otherwise `stated`. If
    it is not a multiple of `num_kv_heads`, return `num_kv_heads`.
    """
    sinks = next((spec.sinks for spec in specs if spec.sinks is not None), None)
    slopes = next((spec.alibi for spec in specs if spec.alibi is not None), None)
    own = sinks if sinks is not None else slopes
    count = stated if own is None else len(own)
    return count if count and count % num_kv_heads == 0 else num_kv_heads


def _formats(model: LoadedModel) -> tuple[WeightFormat, ...]:
    """Return the different formats of quantized weights in a model, such as 4 bits in groups of 128; () if none is
    quantized.
    """
    weights = [layer.weight for layer in quantized_layers(model.module)]
    found = {
        WeightFormat(
            weight.codebook,
            weight.group if weight.group < weight.inputs else WHOLE_ROW,
            weight.scales.dtype,
            weight.zeros is not None,
        )
        for weight in weights
        if isinstance(weight, QuantizedWeight)
    }
    return tuple(sorted(found, key=repr))
