"""LoRA adapters with random weights, for `baton-bench engine --adapters`."""

from collections.abc import Iterator

import torch

from baton_serve.bench.micro.engine_shapes import SHAPES
from baton_serve.engine import Engine
from baton_serve.engine.model.lora.adapter_files import Adapter, LowRank


def load_random_adapters(engine: Engine, shape: str, target: torch.device, *, count: int, rank: int) -> list[str]:
    """Load `count` adapters of all linear layers, and return their fingerprints. `shape` is a dense decoder."""
    found: list[str] = []
    for number in range(count):
        name = f"adapter-{number}"
        generator = torch.Generator(target).manual_seed(number)
        products = {
            module: _random_product(inputs, outputs, rank, generator) for module, inputs, outputs in _modules(shape)
        }
        engine.adapters.put(Adapter(name, name, f"{number:032x}", rank, products))
        found.append(f"{number:032x}")
    return found


def _random_product(inputs: int, outputs: int, rank: int, generator: torch.Generator) -> LowRank:
    """Return matrices whose product is about a tenth as large as that of a layer's own weights."""
    target = generator.device
    down = torch.randn((rank, inputs), generator=generator, device=target) * inputs**-0.5
    up = torch.randn((outputs, rank), generator=generator, device=target) * (0.1 * rank**-0.5)
    return LowRank(down.to(torch.bfloat16), up.to(torch.bfloat16))


def _modules(name: str) -> Iterator[tuple[str, int, int]]:
    """Iterate over the linear layers of a shape: name, inputs, outputs."""
    shape = SHAPES[name]

    def number(key: str) -> int:
        value = shape[key]
        assert isinstance(value, int)
        return value

    hidden, width, head_dim = number("hidden_size"), number("intermediate_size"), number("head_dim")
    query, key_value = number("num_attention_heads") * head_dim, number("num_key_value_heads") * head_dim
    for layer in range(number("num_hidden_layers")):
        for module, inputs, outputs in (
            ("self_attn.q_proj", hidden, query),
            ("self_attn.k_proj", hidden, key_value),
            ("self_attn.v_proj", hidden, key_value),
            ("self_attn.o_proj", query, hidden),
            ("mlp.gate_proj", hidden, width),
            ("mlp.up_proj", hidden, width),
            ("mlp.down_proj", width, hidden),
        ):
            yield f"model.layers.{layer}.{module}", inputs, outputs
