"""The bytes and operations of a step of a given model, from its config: the limits of `baton-bench engine --model`.

The weights are counted in a copy of the model without memory, so that every architecture is counted as it is built.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from baton_serve.bench.micro.engine_shapes import DTYPE_BYTES, WEIGHT_BITS, Costs
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.model_path import model_folder
from baton_serve.engine import EngineConfig
from baton_serve.engine.model.vision.text_part import decoder_config
from baton_serve.engine.model_folder import read_config, weight_files

_EXPERT = re.compile(r"\.experts\.(\d+\.)?")
"""Matches names of experts' parameters, with a number if each expert has parameters of its own."""
_TAIL = re.compile(r"\.layers\.(\d+)\.(?:\w+\.)*?(?:o_proj|mlp|feed_forward|block_sparse_moe)\.")
"""Matches names of parameters behind attention, with the number of their layer."""


def model_costs(config: EngineConfig, layout: KVLayout) -> Costs:
    """Return the costs of a model's decoder. `layout` is that of its KV cache."""
    folder = model_folder(config.model)
    text = decoder_config(read_config(folder, config))
    stated = getattr(text, "quantization_config", None)
    if stated is not None:
        del text.quantization_config  # transformers would ask for the libraries of the format
    module = empty_model(text)
    experts, num_experts = _experts(module)
    head = module.get_output_embeddings()
    head_parameters = 0 if head is None else head.weight.numel()
    embedding = module.get_input_embeddings().weight
    total = sum(weight.numel() for _, weight in _matrices(module))
    layers = total - embedding.numel() - (0 if head is None or head.weight is embedding else head_parameters)
    layer_bytes = head_bytes = float(DTYPE_BYTES)
    if config.rounding in WEIGHT_BITS:
        layer_bytes, head_bytes = WEIGHT_BITS[config.rounding] / 8, 1.0
    elif stated is not None and config.load_format != "dummy":
        stored = sum(path.stat().st_size for path in weight_files(folder, config.load_format, config.loader.pattern))
        layer_bytes = (stored - DTYPE_BYTES * (total - layers)) / layers
    top_k = _top_k(text) if num_experts else 0
    return Costs(
        dense_parameters=layers - num_experts * experts,
        expert_parameters=experts,
        num_experts=num_experts,
        top_k=top_k,
        head_parameters=head_parameters,
        layer_bytes=layer_bytes,
        head_bytes=head_bytes,
        num_layers=layout.num_layers,
        num_heads=text.num_attention_heads,
        head_dim=layout.head_dim,
        kv_bytes_per_token=layout.token_bytes,
        state_bytes=layout.state_bytes,
        tail_parameters=_tail(module, text.num_hidden_layers - 1, top_k / num_experts if num_experts else 0.0),
    )


def empty_model(config: Any) -> Any:
    """Return transformers' model of a config without memory for its weights."""
    from transformers import AutoModelForCausalLM  # takes seconds: benchmarks of a named shape do not need it

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the parameters that tokens are multiplied with; shared ones count once."""
    return ((name, weight) for name, weight in module.named_parameters() if weight.dim() > 1)


def _experts(module: nn.Module) -> tuple[int, int]:
    """Return the parameters of one expert, summed over the layers, and the number of experts of a layer."""
    parameters, count = 0, 0
    for name, weight in _matrices(module):
        if (found := _EXPERT.search(name)) is None:
            continue
        if found[1] is None:  # all experts of a layer in one parameter
            count = weight.shape[0]
            parameters += weight.numel() // count
        else:
            count = max(count, int(found[1][:-1]) + 1)
            parameters += weight.numel() if found[1] == "0." else 0
    return parameters, count


def _tail(module: nn.Module, last_layer: int, active_experts: float) -> int:
    """Return the parameters behind the attention of the last layer, of whose experts a token has a part."""
    count = 0.0
    for name, weight in _matrices(module):
        if (found := _TAIL.search(name)) is not None and int(found[1]) == last_layer:
            count += weight.numel() * (active_experts if _EXPERT.search(name) else 1.0)
    return round(count)


def _top_k(config: Any) -> int:
    """Return how many experts a token is multiplied with."""
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
    value = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    return int(max(value) if isinstance(value, list) else value)
