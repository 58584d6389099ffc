"""Replaces linear layers of transformers' modules by packed products on CPUs, for models without fused layers.

torch multiplies a few rows by a bf16 matrix several times more slowly than memory delivers the matrix. Here each matrix
is packed once at load (kernels/cpu/linear.py), and transformers' copy is freed, so that it is in memory only once.
Layers that read the same input become one product. Only models in bf16 are changed: float32 keeps torch's products.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_serve.engine.kernels.cpu.linear import PANEL, Matrix, PackedLinear, has_packed_linear, pack

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes
_Key: TypeAlias = tuple[tuple[int, int], ...]

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Names of layers in one module that read the same input."""
EXPERTS = frozenset({"has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate", "act_fn"})
"""Attributes of transformers' modules of experts whose weights are stacked in the parameters of `_stacks`."""


class JointProduct:
    """Several linear layers with the same input, whose weights are packed into one matrix for the C++ library.

    The first layer that is called with an input computes the outputs of all layers. They are kept until each layer has
    taken its part.
    """

    def __init__(self, library: ctypes.CDLL, layers: Sequence[nn.Linear]) -> None:
        """Pack the weights of `layers`, which read the same input, into one matrix. The caller frees the layers' own
        weights.
        """
        self._linear = PackedLinear(library)
        sizes = [layer.out_features for layer in layers]
        self._columns = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        biases = [_bias_of(layer) for layer in layers] if any(layer.bias is not None for layer in layers) else None
        self.matrix = pack(
            library, [layer.weight.data for layer in layers], None if biases is None else torch.cat(biases)
        )
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def part(self, x: Tensor, number: int) -> Tensor:
        """Return the output [..., outputs] of layer `number` for `x`, bf16 [..., inputs]."""
        if len(self._columns) == 1:
            return self._product(x)
        # The same tensor object, since memory may be used again for another input.
        if x is not self._input or self._outputs[number] is None:
            whole = self._product(x)
            self._input, self._outputs = x, [whole[..., columns] for columns in self._columns]
        taken, self._outputs[number] = self._outputs[number], None
        if not any(output is not None for output in self._outputs):
            self._input = None
        assert taken is not None
        return taken

    def weight(self, number: int) -> Tensor:
        """Return a copy of the weight of layer `number` in its ordinary order, [outputs, inputs]."""
        columns = self._columns[number]
        return rows_of(self.matrix, torch.arange(columns.start, columns.stop))

    def _product(self, x: Tensor) -> Tensor:
        return self._linear(x.reshape(-1, x.shape[-1]), self.matrix).view(*x.shape[:-1], self.matrix.outputs)


class PackedLayer(nn.Module):
    """Replaces a linear layer in a transformers model; it takes its outputs from a `JointProduct` of several layers."""

    def __init__(self, product: JointProduct, number: int, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self._product, self._number = product, number
        self._plain: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Return the weight in its ordinary order, [outputs, inputs].

        A module that reads it instead of calling the layer does so in every step. So it is unpacked once and kept.
        """
        if self._plain is None:
            self._plain = self._product.weight(self._number)
        return self._plain

    def forward(self, x: Tensor) -> Tensor:
        if self._plain is not None or x.dtype != torch.bfloat16:
            return functional.linear(x, self.weight, self.bias)
        return self._product.part(x, self._number)


class PackedEmbedding(nn.Module):
    """Replaces an embedding whose weight is also that of the output head, and reads its rows from the head's packed
    weight.
    """

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self._matrix = matrix

    @property
    def weight(self) -> Tensor:
        """Return a copy of the embedding table, [tokens, size]."""
        return rows_of(self._matrix, torch.arange(self._matrix.outputs))

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = rows_of(self._matrix, token_ids.reshape(-1))
        return rows.view(*token_ids.shape, self._matrix.inputs)


class PackedExperts(nn.Module):
    """Replaces transformers' module of experts: it computes one packed product for each expert that some token has
    chosen.
    """

    def __init__(self, library: ctypes.CDLL, experts: Module) -> None:
        """Pack the weights of all experts of a transformers module, and free the module's own weights."""
        super().__init__()
        self._linear = PackedLinear(library)
        self._experts = [experts]  # in a list, or torch would register the module as a child
        # A tensor-parallel rank may hold some of the experts only.
        self._first: int = getattr(experts, "baton_first", 0)
        stacks = [getattr(experts, name) for name in _stacks(experts)]
        self._up, self._down = ([pack(library, [weight], None) for weight in stack.data] for stack in stacks)
        for stack in stacks:
            stack.data = torch.empty(0, dtype=stack.dtype)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts for `hidden` [num_tokens, size]. `top_k_index` and
        `top_k_weights`, the chosen experts and their weights, are [num_tokens, top_k]. Experts of other ranks add
        nothing.
        """
        num_tokens, top_k = top_k_index.shape
        own, num_experts = top_k_index.reshape(-1) - self._first, len(self._up)
        # Those of other ranks are last.
        chosen, order = torch.sort(torch.where((own >= 0) & (own < num_experts), own, num_experts))
        counts = torch.bincount(chosen, minlength=num_experts).tolist()
        rows, start = hidden[order // top_k], 0
        outputs = torch.empty_like(rows)
        for number, count in enumerate(counts[:num_experts]):
            if count:
                inner = self._activated(self._linear(rows[start : start + count], self._up[number]))
                outputs[start : start + count] = self._linear(inner, self._down[number])
                start += count
        outputs[start:] = 0
        # In the order of tokens again. Each expert's output counts with the weight that its token gives it.
        weighted = torch.empty_like(outputs)
        weighted[order] = (outputs * top_k_weights.reshape(-1)[order, None]).to(outputs.dtype)
        return weighted.view(num_tokens, top_k, -1).sum(dim=1)

    def _activated(self, product: Tensor) -> Tensor:
        experts = self._experts[0]
        activated: Tensor = experts._apply_gate(product) if experts.has_gate else experts.act_fn(product)
        return activated


def pack_modules(module: nn.Module, dtype: torch.dtype, library: ctypes.CDLL) -> None:
    """Replace linear layers and experts of a transformers model by packed ones of the C++ library. Do nothing if
    `dtype` is not bf16, or if the CPU lacks the instructions. Call it once, before LoRA adapters are added.
    """
    if dtype != torch.bfloat16 or not has_packed_linear(library):
        return
    _pack_head(module, library)
    groups = [(parent, names) for parent in module.modules() for names in _groups(parent)]
    # Some models use one weight in several layers. It is packed once, if all of them join it with the same ones.
    keys = [tuple(_identity(getattr(parent, name)) for name in names) for parent, names in groups]
    num_equal, num_grouped = Counter(keys), Counter(layer for key in keys for layer in key)
    num_uses, products = _count_uses(module), dict[_Key, JointProduct]()
    for key, (parent, names) in zip(keys, groups, strict=True):
        if any(not num_equal[key] == num_grouped[layer] == num_uses[layer[0]] for layer in key):
            continue
        layers = [getattr(parent, name) for name in names]
        product = products[key] = products.get(key) or JointProduct(library, layers)
        for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
            layer.weight.data = torch.empty(0, dtype=dtype)
            setattr(parent, name, PackedLayer(product, number, layer))
    for name, part in list(module.named_modules()):
        if _are_stacked_experts(part):
            module.set_submodule(name, PackedExperts(library, part))


def rows_of(matrix: Matrix, rows: Tensor) -> Tensor:
    """Return the rows `rows` of a packed bf16 matrix in their ordinary order, [len(rows), inputs]."""
    return matrix.words[rows // PANEL, :, rows % PANEL].contiguous().view(torch.bfloat16)


def _pack_head(module: Module, library: ctypes.CDLL) -> None:
    """Pack the output head of a transformers model if it is tied to the embedding, and let the embedding read the
    packed weight.
    """
    head: Module = getattr(module, "lm_head", None)
    embedding = module.get_input_embeddings()
    is_tied = getattr(head, "weight", None) is getattr(embedding, "weight", None)
    # Another class of embedding may change what it looks up; a second copy of its table stays.
    if not is_tied or not _can_pack(head) or type(embedding) is not nn.Embedding:
        return
    product = JointProduct(library, [head])
    head.weight.data = torch.empty(0, dtype=torch.bfloat16)
    module.lm_head = PackedLayer(product, 0, head)
    module.set_input_embeddings(PackedEmbedding(product.matrix))


def _groups(parent: Module) -> Iterator[list[str]]:
    """Iterate over groups of names of a module's linear layers that can be packed. Layers that read the same input,
    such as q_proj, k_proj and v_proj, are one group.
    """
    names = [name for name, part in parent.named_children() if _can_pack(part)]
    if hasattr(parent, "baton_latent"):  # latent attention uses views of this weight
        names = [name for name in names if name != "kv_b_proj"]
    for siblings in SIBLINGS:
        inputs = {getattr(parent, name).in_features for name in siblings if name in names}
        if set(siblings) <= set(names) and len(inputs) == 1:
            yield list(siblings)
            names = [name for name in names if name not in siblings]
    yield from ([name] for name in names)


def _identity(layer: nn.Linear) -> tuple[int, int]:
    """Return a value that is equal for two linear layers if they share the same weight and bias in memory."""
    return id(layer.weight), id(layer.bias)


def _count_uses(module: nn.Module) -> Counter[int]:
    """Return how many modules within `module` use each parameter, by the parameter's `id`."""
    children = (child for parent in module.modules() for child in parent._modules.values() if child is not None)
    return Counter(id(weight) for child in children for weight in child._parameters.values())


def _can_pack(part: Module) -> bool:
    """Return whether a module is a linear layer that the C++ library can pack: bf16 on the CPU, with an even number of
    inputs.
    """
    if type(part) is not nn.Linear or part.weight.dtype != torch.bfloat16:
        return False
    return part.in_features % 2 == 0 and part.weight.dim() == 2 and part.weight.device.type == "cpu"


def _are_stacked_experts(part: Module) -> bool:
    """Return whether a module is a transformers module of stacked bf16 experts of the form that `PackedExperts` can
    replace.
    """
    if not all(hasattr(part, name) for name in EXPERTS):
        return False
    if part.has_bias or part.is_transposed or part.has_post_expert_norm or getattr(part, "_is_expert_parallel", False):
        return False
    stacks = [getattr(part, name, None) for name in _stacks(part)]
    return all(
        isinstance(stack, nn.Parameter)
        and stack.dim() == 3
        and stack.dtype == torch.bfloat16
        and stack.shape[2] % 2 == 0
        for stack in stacks
    )


def _stacks(experts: Module) -> tuple[str, str]:
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def _bias_of(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data
