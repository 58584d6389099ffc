"""Rounds a model's linear layers to few bits, one at a time, while or after its weights are loaded.

The head is kept in eight bits whatever the format: it is a large part of a small model, and rounding it further costs
most. An embedding that shares its weight shares the rounded one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton_serve.engine.model.quantized.formats import Scheme, quantize
from baton_serve.engine.model.quantized.modules import QuantizedEmbedding, QuantizedLinear

HEAD_SCHEME = Scheme("int8", None)


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """`skip`: names of modules, or the last parts of names, that keep their dtype."""

    scheme: Scheme
    skip: tuple[str, ...] = ()

    def scheme_of(self, name: str) -> Scheme | None:
        if any(name == skip or name.endswith(f".{skip}") or f".{skip}." in f".{name}." for skip in self.skip):
            return None
        return HEAD_SCHEME if re.fullmatch(r"(.*\.)?lm_head", name) else self.scheme

    @property
    def label(self) -> str:
        """For the fingerprint."""
        return f"{self.scheme.label},head {HEAD_SCHEME.label},skip {sorted(self.skip)}"


def linear_names(module: nn.Module) -> Iterable[str]:
    """Of the layers that can be quantized. Latent attention multiplies by the parts of `kv_b_proj` itself."""
    linears = (name for name, part in module.named_modules() if type(part) is nn.Linear)
    return [name for name in linears if not name.endswith("kv_b_proj")]


def quantize_layer(module: nn.Module, name: str, weight: Tensor, plan: QuantizationPlan) -> bool:
    """Puts a quantized layer in the place of the linear layer `name`, whose weight is given, on whichever device it
    is to stay. False: it was left alone."""
    scheme = plan.scheme_of(name)
    old = module.get_submodule(name)
    made = None if scheme is None else quantize(weight, scheme)
    if made is None:
        return False
    bias = getattr(old, "bias", None)
    module.set_submodule(name, QuantizedLinear(made, None if bias is None else bias.detach().to(weight.device)))
    return True


def tied_embedding(module: nn.Module) -> str | None:
    """The name of the embedding whose weight is the head's."""
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None else None
    head = getattr(module, "lm_head", None)
    if not getattr(text, "tie_word_embeddings", False) or type(head) is not nn.Linear:
        return None
    found = [n for n, part in module.named_modules() if n.endswith("embed_tokens") and type(part) is nn.Embedding]
    return found[0] if len(found) == 1 else None


def share_head(module: nn.Module, embedding: str, dtype: torch.dtype) -> None:
    """The embedding reads the head's quantized rows from now on."""
    head = module.get_submodule("lm_head")
    assert isinstance(head, QuantizedLinear)
    module.set_submodule(embedding, QuantizedEmbedding(head, dtype))
