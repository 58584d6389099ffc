"""Adds the LoRA products of each row's adapter to a layer's output in torch; with captured graphs, `fused_lora.py` uses
kernels. One step may have several adapters, and rows without any.

The base product is computed once for all rows. Then each adapter adds two thin products for its own rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from baton_serve.engine.model.lora.store import AdapterRows, AdapterStore
from baton_serve.engine.model.packed_modules import PackedLayer
from baton_serve.engine.model.quantized.modules import QuantizedLinear, ReorderedLinear

NOT_ADAPTED = ("lm_head", "kv_b_proj")
"""Linear layers that adapters cannot change.

Logits are computed for some rows only, and latent attention uses the parts of `kv_b_proj` without calling the module.
"""


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """The name of a linear layer whose outputs are the columns `start` to `end` of a fused product, such as q_proj in
    qkv.
    """

    module: str
    start: int
    end: int


def add_products(output: Tensor, x: Tensor, parts: Sequence[OutputSlice], step: Sequence[AdapterRows]) -> None:
    """Add the products of a step's LoRA adapters with `x` [num_tokens, inputs] to `output` [num_tokens, outputs], in
    place. `parts` are the linear layers whose outputs `output` joins.
    """
    for adapted in step:
        changed = [
            (part, adapted.adapter.products[part.module]) for part in parts if part.module in adapted.adapter.products
        ]
        taken = x if adapted.rows is None or not changed else x[adapted.rows]  # [rows, inputs]
        for part, product in changed:
            # `--lora-dtype` may differ from the dtype of the model; otherwise the conversions return the same tensors.
            added = functional.linear(functional.linear(taken.to(product.down.dtype), product.down), product.up)
            added = added.to(output.dtype)
            columns = output[:, part.start : part.end]
            if adapted.rows is None:
                columns += added
            else:
                columns.index_add_(0, adapted.rows, added)


def output_slices(prefix: str, modules: Sequence[tuple[str, nn.Module]]) -> tuple[OutputSlice, ...]:
    """Return the columns of each of these linear layers if their outputs are joined in this order. `prefix` is put
    before their names.
    """
    parts: list[OutputSlice] = []
    start = 0
    for name, module in modules:
        end = start + int(module.out_features)  # type: ignore[arg-type]
        parts.append(OutputSlice(f"{prefix}{name}", start, end))
        start = end
    return tuple(parts)


class StepAdapters:
    """Holds the LoRA adapters of the current step, where the `AdaptedLinear` layers of a transformers model read
    them.
    """

    def __init__(self) -> None:
        self.rows: Sequence[AdapterRows] = ()


class AdaptedLinear(nn.Module):
    """Replaces a linear layer of a transformers model, and adds the products of the current step's LoRA adapters to its
    output.
    """

    def __init__(self, base: nn.Module, part: OutputSlice, step: StepAdapters) -> None:
        super().__init__()
        self.base = base
        self._parts = (part,)
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x)
        if self._step.rows:
            add_products(output.view(-1, output.shape[-1]), x.reshape(-1, x.shape[-1]), self._parts, self._step.rows)
        return output


def adapt_modules(module: nn.Module, store: AdapterStore) -> StepAdapters:
    """Replace every linear layer of a transformers model that LoRA adapters may change by an `AdaptedLinear`, and
    register it in `store`. Return the object to which each step's adapters must be assigned.
    """
    step = StepAdapters()
    for name, base in list(_linear_layers(module)):
        inputs, outputs = int(base.in_features), int(base.out_features)  # type: ignore[arg-type]
        store.offer(name, inputs=inputs, outputs=outputs)
        module.set_submodule(name, AdaptedLinear(base, OutputSlice(name, 0, outputs), step))
    return step


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the names and modules of a model's linear layers that LoRA adapters may change.

    Layers with recurrent states are left out: they run for some sequences of a step at a time, so that their rows are
    not the step's tokens.
    """
    inner: set[str] = set()
    mixers = tuple(f"{name}." for name, part in module.named_modules() if hasattr(part, "baton_mixer"))
    for name, part in module.named_modules():
        if name.startswith(mixers):
            continue
        if isinstance(part, ReorderedLinear):
            # Adapters act on the outer module, whose inputs are in the model's order.
            inner.add(f"{name}.linear")
        is_linear = type(part) is nn.Linear or isinstance(part, PackedLayer | QuantizedLinear | ReorderedLinear)
        if is_linear and name not in inner and name.rsplit(".", 1)[-1] not in NOT_ADAPTED:
            yield name, part
