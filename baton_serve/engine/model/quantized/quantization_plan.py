"""Decides which layers `--quantization` rounds to which format (the head gets eight bits), and replaces them one at a
time.

The head always gets eight bits: it is a large part of a small model, and fewer bits cost most quality there. An
embedding that shares the head's weight shares the rounded weight.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baton_serve.engine.model.quantized.formats import Scheme, quantize
from baton_serve.engine.model.quantized.modules import EmptyEmbedding, EmptyLinear, QuantizedEmbedding, QuantizedLinear

HEAD_SCHEME = Scheme("int8", None)


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """How a model's weights are quantized while it is loaded (--quantization): the format, and in `skip` the modules
    that stay unquantized, by full name or a part of it.
    """

    scheme: Scheme
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    """If not None, the only modules that are quantized, by full name or its last part."""

    def scheme_of(self, name: str) -> Scheme | None:
        """Return how the weight of the module `name` is quantized; None if it stays unquantized. A quantized output
        head always gets int8.
        """
        if any(name == skip or name.endswith(f".{skip}") or f".{skip}." in f".{name}." for skip in self.skip):
            return None
        if self.only is not None and not any(f".{name}".endswith(f".{only}") for only in self.only):
            return None
        return HEAD_SCHEME if re.fullmatch(r"(.*\.)?lm_head", name) else self.scheme

    @property
    def label(self) -> str:
        """Text that describes this plan in the model's fingerprint: weights that are rounded in another way compute
        other KV.
        """
        only = "" if self.only is None else f",only {sorted(self.only)}"
        return f"{self.scheme.label},head {HEAD_SCHEME.label},skip {sorted(self.skip)}{only}"


def linear_names(module: nn.Module) -> Iterable[str]:
    """Return the names of a model's linear layers that can be quantized.

    Latent attention (MLA) reads the weight of `kv_b_proj` without calling the layer, so this one stays unquantized.
    """
    linears = (name for name, part in module.named_modules() if type(part) in (nn.Linear, EmptyLinear))
    return [name for name in linears if not name.endswith("kv_b_proj")]


def quantize_layer(module: nn.Module, name: str, weight: Tensor, plan: QuantizationPlan) -> bool:
    """Replace the linear layer `name` by a quantized one with the rounded `weight`, which is on its final device.

    Return False if the layer stays as it is, because the plan skips it or its rows cannot be divided into groups.
    """
    scheme = plan.scheme_of(name)
    old = module.get_submodule(name)
    made = None if scheme is None else quantize(weight, scheme)
    if made is None:
        return False
    bias = getattr(old, "bias", None)
    module.set_submodule(name, QuantizedLinear(made, None if bias is None else bias.detach().to(weight.device)))
    return True


def tied_embedding(module: nn.Module) -> str | None:
    """Return the name of the embedding that shares its weight with the output head; None if they are not tied."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    head = getattr(module, "lm_head", None)
    if not getattr(text, "tie_word_embeddings", False) or type(head) not in (nn.Linear, EmptyLinear):
        return None
    kinds = (nn.Embedding, EmptyEmbedding)
    found = [n for n, part in module.named_modules() if n.endswith("embed_tokens") and type(part) in kinds]
    return found[0] if len(found) == 1 else None


def share_head(module: nn.Module, embedding: str, dtype: torch.dtype) -> None:
    """Replace the embedding named `embedding` by one that reads the rows of the quantized output head and returns
    `dtype`.
    """
    head = module.get_submodule("lm_head")
    assert isinstance(head, QuantizedLinear)
    module.set_submodule(embedding, QuantizedEmbedding(head, dtype))
