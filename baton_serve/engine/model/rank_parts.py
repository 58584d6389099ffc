"""Finds out which part of each weight of a decoder a tensor-parallel rank holds.

The modules of a layer show it: attention is divided by heads, an MLP and every expert by its width, or a mixture by
whole experts, the head by vocabulary. The last product of each has a part of the inputs, so its outputs are summed over
the ranks. A module of an unknown kind stays whole on each rank.
"""

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.collectives.shard import UNSHARDED, Shard, step_of_width
from baton_serve.engine.collectives.stage import WHOLE_PIPELINE, Stage
from baton_serve.engine.errors import ConfigError, UnsupportedModelError
from baton_serve.engine.model.quantized.experts import TRANSPOSED, WEIGHTS
from baton_serve.engine.model.quantized.modules import ReorderedLinear

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes

GROUP_STEP = 32
"""Smallest group of inputs that shares a scale. Quantized weights are cut at multiples of it where that is possible."""
OUTPUTS = ("o_proj", "dense", "out_proj")
"""Names of the product after attention."""
MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("up_proj",), "down_proj"),
)
"""Names of the products of an MLP: first the products that read its input, then the product of its output."""
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a tensor that a rank holds: ranges along one dimension, one after another."""

    dim: int
    ranges: tuple[slice, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor; a view if it is one range."""
        pieces = [whole.narrow(self.dim, part.start, part.stop - part.start) for part in self.ranges]
        if len(pieces) == 1:
            return pieces[0]
        # As bytes where torch cannot concatenate: float8.
        if whole.dtype.itemsize == 1 and self.dim < whole.dim() - 1:
            return torch.cat([piece.view(torch.uint8) for piece in pieces], self.dim).view(whole.dtype)
        return torch.cat(pieces, self.dim)

    @property
    def size(self) -> int:
        """Return the number of rows or columns."""
        return sum(int(part.stop - part.start) for part in self.ranges)


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The KV heads of a layer that a rank holds, and the number of all."""

    total: int
    part: slice

    @property
    def count(self) -> int:
        """Return the number of this rank's heads."""
        return int(self.part.stop - self.part.start)


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts of a decoder's weights that a rank holds. All other weights are whole."""

    shard: Shard = UNSHARDED
    stage: Stage = WHOLE_PIPELINE
    """The layers that this rank holds. The other fields describe these layers."""
    tensors: dict[str, TensorPart] = field(default_factory=dict)
    """The parts of parameters by name."""
    zeros: frozenset[str] = frozenset()
    """Parameters that are zeros on this rank: a sum over ranks would add them several times."""
    sums: tuple[str, ...] = ()
    """Modules whose outputs are to be summed over the ranks."""
    kv_heads: dict[int, HeadRange] = field(default_factory=dict)
    """The KV heads by the model's number of the layer."""
    widths: dict[str, int] = field(default_factory=dict)
    """The numbers of inputs of all ranks, by linear layer that has a part of them."""
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By attention module that is divided: this rank's numbers of heads and of KV heads."""

    @property
    def is_whole(self) -> bool:
        """Return whether this rank holds whole layers."""
        return self.shard.is_whole

    def rows(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of a parameter of dimension 0; the tensor itself if it is divided otherwise."""
        part = self.tensors.get(name)
        return whole if part is None or part.dim != 0 else part.of(whole)

    def columns(self, name: str, own_rows: Tensor) -> Tensor:
        """Return this rank's part of a result of `rows`."""
        part = self.tensors.get(name)
        return own_rows if part is None or part.dim == 0 else part.of(own_rows).contiguous()

    def of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter."""
        if name in self.zeros:
            return torch.zeros_like(whole)
        part = self.tensors.get(name)
        return whole if part is None else part.of(whole)


WHOLE = RankParts()
"""The parts of a single rank."""


def split(module: nn.Module, name: str, shard: Shard, *, has_groups: bool, keeps_head: bool) -> RankParts:
    """Return the parts of a decoder `name` for one rank. The module may be on torch's meta device.

    `has_groups` says that groups of inputs may share scales; `keeps_head` keeps the head whole. Raises
    `UnsupportedModelError`, or `ConfigError` with the largest number of ranks that works.
    """
    if shard.is_whole:
        return WHOLE
    splitter = _Splitter(module, shard, GROUP_STEP if has_groups else 1)
    splitter.split_layers()
    if not splitter.parts.sums:
        raise UnsupportedModelError(
            f"tensor_parallel_size is {shard.size}, but no part of {name} can be split over devices; the largest"
            " number that works is 1"
        )
    splitter.check(name)
    if not keeps_head:
        splitter.split_head()
    return replace(splitter.parts, zeros=frozenset(splitter.zeros))


class _Splitter:
    """Collects the parts of one rank from the modules of a decoder."""

    def __init__(self, module: nn.Module, shard: Shard, least_step: int) -> None:
        self._module = cast(Module, module)
        config = self._module.config
        self._config: Module = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._shard, self._least_step = shard, least_step
        self._counts: list[tuple[str, int, int]] = []  # what is divided, its number, and the number that may be less
        self.parts = RankParts(shard)
        self.zeros: set[str] = set()

    def split_layers(self) -> None:
        """Divide all attention modules, MLPs and mixtures."""
        sums: list[str] = []
        for name, part in self._module.named_modules():
            if (found := _attention_output(part)) is not None:
                self._split_attention(name, part, found)
            elif (found := self._split_mlp(name, part)) is None:
                found = self._split_experts(name, part)
            if found is not None:
                sums.append(f"{name}.{found}" if found else name)
        self.parts = replace(self.parts, sums=tuple(sums))

    def split_head(self) -> None:
        """Divide the columns of the logits, if the ranks get equal numbers of them."""
        head = getattr(self._module, "lm_head", None)
        if isinstance(head, nn.Linear) and head.out_features % self._shard.size == 0:
            self._cut("lm_head", head, 0, self._shard.part(head.out_features))

    def check(self, name: str) -> None:
        """Raise `ConfigError` if a number of heads or a width cannot be divided."""
        size = self._shard.size
        if (wrong := self._indivisible(size)) is not None:
            what, count = wrong
            largest = next(n for n in range(size - 1, 0, -1) if self._indivisible(n) is None)
            raise ConfigError(
                f"tensor_parallel_size is {size}, which does not divide {what} ({count}) of {name}; the largest number"
                f" below it that works is {largest}"
            )

    def _indivisible(self, size: int) -> tuple[str, int] | None:
        """Return what cannot be divided over `size` ranks and its number, or None."""
        for what, count, step in self._counts:
            if what == "the width of an MLP":
                is_divided = bool(step_of_width(count, size, step))
            else:
                is_divided = count % size == 0 or (what == "the KV heads" and size % count == 0)
            if not is_divided:
                return what, count
        return None

    def _split_attention(self, name: str, module: Module, output: str) -> None:
        """Divide an attention module by heads. KV heads that are fewer than the ranks are on several of them."""
        head_dim = int(module.head_dim)
        num_heads = int(self._config.num_attention_heads)
        packed = getattr(module, "qkv_proj", None)
        if packed is None:
            num_kv = int(module.k_proj.out_features) // head_dim
        else:
            num_kv = (packed.out_features - num_heads * head_dim) // 2 // head_dim
        self._counts += [("the attention heads", num_heads, 1), ("the KV heads", num_kv, 1)]
        own, kv = self._shard.part(num_heads), _kv_part(num_kv, self._shard)
        self.parts.kv_heads[int(module.layer_idx)] = HeadRange(num_kv, kv)
        self.parts.heads[name] = (own.stop - own.start, kv.stop - kv.start)
        if packed is None:
            self._cut(f"{name}.q_proj", module.q_proj, 0, _scaled(own, module.q_proj.out_features // num_heads))
            for leaf in ("k_proj", "v_proj"):
                if isinstance(linear := getattr(module, leaf, None), nn.Linear):
                    self._cut(f"{name}.{leaf}", linear, 0, _scaled(kv, linear.out_features // num_kv))
        else:
            starts = (0, num_heads, num_heads + num_kv)
            ranges = [_moved(part, start) for part, start in zip((own, kv, kv), starts, strict=True)]
            self._cut(f"{name}.qkv_proj", packed, 0, *(_scaled(part, head_dim) for part in ranges))
        last = getattr(module, output)
        self._cut(f"{name}.{output}", last, 1, _scaled(own, last.in_features // num_heads))
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            self.parts.tensors[f"{name}.sinks"] = TensorPart(0, (own,))
        self._split_norms(name, module, {"q_norm": own, "k_norm": kv}, head_dim)

    def _split_norms(self, name: str, module: Module, heads: dict[str, slice], head_dim: int) -> None:
        """Divide norms that have weights of their own for each head."""
        for leaf, part in heads.items():
            norm: Module = getattr(module, leaf, nn.Identity())
            for full, weight in norm.named_parameters(prefix=f"{name}.{leaf}"):
                if weight.numel() > head_dim:
                    # [num_heads, head_dim], or all in one row.
                    self.parts.tensors[full] = TensorPart(0, (part if weight.dim() > 1 else _scaled(part, head_dim),))

    def _split_mlp(self, name: str, module: Module) -> str | None:
        """Divide an MLP by its width. Return the name of its last product, or None for another module."""
        for firsts, last in MLPS:
            if not all(isinstance(getattr(module, leaf, None), nn.Linear) for leaf in (*firsts, last)):
                continue
            width = getattr(module, last).in_features
            # Gate and up may be one product, with the gate's outputs first.
            outputs = getattr(module, firsts[0]).out_features
            if outputs not in (width, 2 * width):
                return None
            part = self._width(width)
            ranges = (part,) if outputs == width else (part, _moved(part, width))
            for leaf in firsts:
                self._cut(f"{name}.{leaf}", getattr(module, leaf), 0, *ranges)
            self._cut(f"{name}.{last}", getattr(module, last), 1, part)
            return last
        return None

    def _split_experts(self, name: str, module: Module) -> str | None:
        """Divide the width of all experts. Return "" if this is a module with stacked experts, or None."""
        first, last = (getattr(module, leaf, None) for leaf in WEIGHTS)
        if not isinstance(first, nn.Parameter) or not isinstance(last, nn.Parameter) or first.dim() != 3:
            return None
        is_transposed = type(module).__name__ in TRANSPOSED
        outputs, inputs = (2, 1) if is_transposed else (1, 2)
        width = last.shape[inputs]
        part = self._width(width)
        ranges = (_scaled(part, 2),) if is_transposed else (part, _moved(part, width))
        self.parts.tensors[f"{name}.{WEIGHTS[0]}"] = TensorPart(outputs, ranges)
        self.parts.tensors[f"{name}.{WEIGHTS[1]}"] = TensorPart(inputs, (part,))
        if hasattr(module, "gate_up_proj_bias"):
            self.parts.tensors[f"{name}.gate_up_proj_bias"] = TensorPart(1, ranges)
            self._add_once(f"{name}.down_proj_bias")
        return ""

    def _width(self, width: int) -> slice:
        step = self._least_step if width % self._least_step == 0 else 1
        self._counts.append(("the width of an MLP", width, step))
        return self._shard.part_of_width(width, step) if step_of_width(width, self._shard.size, step) else slice(0, 0)

    def _cut(self, name: str, linear: nn.Linear, dim: int, *ranges: slice) -> None:
        """Note the part of a linear layer: of its outputs (`dim` 0) or its inputs (1)."""
        self.parts.tensors[f"{name}.weight"] = TensorPart(dim, ranges)
        if linear.bias is not None and dim == 0:
            self.parts.tensors[f"{name}.bias"] = TensorPart(0, ranges)
        elif dim == 1:
            self.parts.widths[name] = linear.in_features
            self._add_once(f"{name}.bias")

    def _add_once(self, name: str) -> None:
        if self._shard.rank > 0:
            self.zeros.add(name)


def sum_outputs(module: nn.Module, parts: RankParts, collectives: Collectives) -> None:
    """Let the modules whose outputs are this rank's parts of sums add up those of all ranks."""

    def summed(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return collectives.all_reduce(output.contiguous())

    for name in parts.sums:
        layer = module.get_submodule(name)
        layer.register_forward_hook(summed)
        if isinstance(layer, ReorderedLinear):
            ((own,),) = (parts.tensors[f"{name}.weight"].ranges,)
            layer.gather = partial(_gathered, own, parts.widths[name], collectives)


def _gathered(own: slice, width: int, collectives: Collectives, x: Tensor) -> Tensor:
    """Return the columns of all ranks [..., width], of which `x` has this rank's `own`."""
    # A sum with zeros, since ranks may have different numbers of columns.
    whole = x.new_zeros(*x.shape[:-1], width)
    whole[..., own] = x
    return collectives.all_reduce(whole)


def narrow(module: nn.Module, parts: RankParts) -> None:
    """Change the numbers of heads that attention modules have noted to those of this rank."""
    for name, (num_heads, num_kv_heads) in parts.heads.items():
        attention: Module = module.get_submodule(name)
        for names, count in ((_HEAD_COUNTS, num_heads), (_KV_HEAD_COUNTS, num_kv_heads)):
            for attribute in names:
                if isinstance(getattr(attention, attribute, None), int):
                    setattr(attention, attribute, count)
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = num_heads // num_kv_heads
        if (config := getattr(attention, "config", None)) is not None:
            own = copy.deepcopy(config)
            # Before the number of heads, from which some configs compute it.
            own.head_dim = attention.head_dim
            own.num_attention_heads, own.num_key_value_heads = num_heads, num_kv_heads
            attention.config = own


def _attention_output(module: Module) -> str | None:
    """Return the name of the last product of an attention module, or None if it is none or of an unknown kind."""
    has_parts = all(isinstance(getattr(module, leaf, None), nn.Linear) for leaf in ("q_proj", "k_proj"))
    is_packed = isinstance(getattr(module, "qkv_proj", None), nn.Linear)
    if not (has_parts or is_packed) or not hasattr(module, "head_dim") or not hasattr(module, "layer_idx"):
        return None
    return next((leaf for leaf in OUTPUTS if isinstance(getattr(module, leaf, None), nn.Linear)), None)


def _kv_part(total: int, shard: Shard) -> slice:
    """Return the KV heads of a rank: an equal share, or one that several ranks have."""
    if total >= shard.size:
        return shard.part(total)
    own = shard.rank * total // shard.size
    return slice(own, own + 1)


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
