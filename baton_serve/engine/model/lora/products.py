"""What adapters add to a step's products. Several adapters, and rows without any, may stand in one step.

One adapter after another: two thin products for its rows. The base product is computed once for all rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from baton_serve.engine.model.lora.store import AdapterRows, AdapterStore
from baton_serve.engine.model.quantized.modules import QuantizedLinear, ReorderedLinear

NOT_ADAPTED = ("lm_head", "kv_b_proj")
"""Logits are computed for some rows alone; latent attention multiplies by the parts of the other itself."""


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """Columns `start` to `end` of a product's output are those of this module."""

    module: str
    start: int
    end: int


def add_products(output: Tensor, x: Tensor, parts: Sequence[OutputSlice], step: Sequence[AdapterRows]) -> None:
    """output [num_tokens, outputs] is changed in place; x [num_tokens, inputs]."""
    for adapted in step:
        changed = [
            (part, adapted.adapter.products[part.module]) for part in parts if part.module in adapted.adapter.products
        ]
        taken = x if adapted.rows is None or not changed else x[adapted.rows]
        for part, product in changed:
            added = functional.linear(functional.linear(taken, product.down), product.up)
            columns = output[:, part.start : part.end]
            if adapted.rows is None:
                columns += added
            else:
                columns.index_add_(0, adapted.rows, added)


def output_slices(prefix: str, modules: Sequence[tuple[str, nn.Module]]) -> tuple[OutputSlice, ...]:
    """Of linear layers whose outputs lie side by side."""
    parts: list[OutputSlice] = []
    start = 0
    for name, module in modules:
        end = start + int(module.out_features)  # type: ignore[arg-type]
        parts.append(OutputSlice(f"{prefix}{name}", start, end))
        start = end
    return tuple(parts)


class StepAdapters:
    """Those of the step that is being computed, for modules that transformers calls."""

    def __init__(self) -> None:
        self.rows: Sequence[AdapterRows] = ()


class AdaptedLinear(nn.Module):
    """Stands in a model for a linear layer to which adapters may add."""

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
    """Every linear layer of a model that transformers calls."""
    step = StepAdapters()
    for name, base in list(_linear_layers(module)):
        inputs, outputs = int(base.in_features), int(base.out_features)  # type: ignore[arg-type]
        store.offer(name, inputs=inputs, outputs=outputs)
        module.set_submodule(name, AdaptedLinear(base, OutputSlice(name, 0, outputs), step))
    return step


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inner: set[str] = set()
    for name, part in module.named_modules():
        if isinstance(part, ReorderedLinear):
            inner.add(f"{name}.linear")
        is_linear = type(part) is nn.Linear or isinstance(part, QuantizedLinear | ReorderedLinear)
        if is_linear and name not in inner and name.rsplit(".", 1)[-1] not in NOT_ADAPTED:
            yield name, part
