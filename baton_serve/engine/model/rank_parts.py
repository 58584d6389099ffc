"""Decides which part of each weight a tensor-parallel rank holds: heads, columns of an MLP, vocabulary, experts
(`--enable-expert-parallel`).

The modules of a layer show it: attention is divided by heads, an MLP and every expert by its width, or a mixture by
whole experts, the head by vocabulary. The last product of each has a part of the inputs, so its outputs are summed over
the ranks. A module of an unknown kind stays whole on each rank.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.collectives.shard import UNSHARDED, Shard, step_of_width
from baton_serve.engine.collectives.stage_layers import WHOLE_PIPELINE, Stage
from baton_serve.engine.errors import ConfigError, UnsupportedModelError
from baton_serve.engine.model.attention_parts import (
    AttentionParts,
    HeadRange,
    attention_parts,
    child,
    input_size,
    is_linear,
    is_turned,
    narrow_attention,
    output_size,
)
from baton_serve.engine.model.mixer_adapters import is_mixer
from baton_serve.engine.model.quantized.experts import TRANSPOSED, WEIGHTS
from baton_serve.engine.model.quantized.modules import ReorderedLinear
from baton_serve.engine.model.state_parts import DeltaParts, delta_parts, narrow_delta

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes

GROUP_STEP = 32
"""Smallest group of inputs that shares a scale. Quantized weights are cut at multiples of it where that is possible."""
MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("up_proj",), "down_proj"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
    (("Wi",), "Wo"),
    (("w1", "w3"), "w2"),
)
"""Names of the products of an MLP: first the products that read its input, then the product of its output."""
HEADS, KV_HEADS = "the attention heads", "the KV heads"
LINEAR_HEADS = "the heads of linear attention"
WIDTH, EXPERTS = "the width of an MLP", "the experts"
"""Kinds of numbers that are divided."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Which part of a tensor a rank holds: some ranges of indexes along the dimension `dim`, put one after another."""

    dim: int
    ranges: tuple[slice, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of the tensor `whole`: a view if it is a single range, otherwise a copy."""
        pieces = [whole.narrow(self.dim, part.start, part.stop - part.start) for part in self.ranges]
        if len(pieces) == 1:
            return pieces[0]
        # As bytes where torch cannot concatenate: float8.
        if whole.dtype.itemsize == 1 and self.dim < whole.dim() - 1:
            return torch.cat([piece.view(torch.uint8) for piece in pieces], self.dim).view(whole.dtype)
        return torch.cat(pieces, self.dim)

    @property
    def size(self) -> int:
        """Return the number of indexes in this part along its dimension."""
        return sum(int(part.stop - part.start) for part in self.ranges)


@dataclass(frozen=True, slots=True)
class RankParts:
    """Which parts of a decoder's weights one tensor-parallel rank holds. It holds weights that are not named here
    entirely.
    """

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
    """The numbers of inputs or outputs of all ranks, by linear layer that has a part of them."""
    attention: dict[str, AttentionParts] = field(default_factory=dict)
    """The parts of attention modules by name."""
    wide_norms: dict[str, int] = field(default_factory=dict)
    """The number of columns of all ranks, by norm over columns of which each rank holds some. A KV head that several
    ranks hold counts several times."""
    delta: dict[str, DeltaParts] = field(default_factory=dict)
    """The parts of linear attention by the gated delta rule by name."""
    experts: dict[str, slice] = field(default_factory=dict)
    """The experts that this rank holds, by module with stacked experts that is not divided by width."""
    zero_outputs: list[str] = field(default_factory=list)
    """Modules whose outputs are zeros on this rank, because a sum over ranks would add them several times."""
    numbers: dict[str, int] = field(default_factory=dict)
    """This rank's values of further attributes of modules, such as "model.layers.0.mlp.width"."""

    @property
    def is_whole(self) -> bool:
        """Return True if tensor parallelism does not divide the layers, so that this rank holds all of each."""
        return self.shard.is_whole

    @property
    def is_first_rank(self) -> bool:
        """Return whether this is rank 0 of all ranks of the engine."""
        return self.shard.rank == 0 and self.stage.is_first

    def rows(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of the parameter `name` if it is divided along dimension 0; otherwise the parameter
        itself.
        """
        part = self.tensors.get(name)
        return whole if part is None or part.dim != 0 else part.of(whole)

    def columns(self, name: str, own_rows: Tensor) -> Tensor:
        """Return this rank's columns of the parameter `name`, in memory of their own; the tensor itself if it is not
        divided by columns. `own_rows` is what `rows` has returned for it.
        """
        part = self.tensors.get(name)
        # The copy is needed: a view of some columns would keep the memory of all columns.
        return own_rows if part is None or part.dim == 0 else part.of(own_rows).contiguous()

    def of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the parameter `name`, whose complete value is `whole`; zeros for a bias that only
        rank 0 adds.
        """
        # Rank 0 adds it.
        if name in self.zeros:
            return torch.zeros_like(whole)
        part = self.tensors.get(name)
        return whole if part is None else part.of(whole)


WHOLE = RankParts()
"""The parts of a single rank."""


@dataclass(frozen=True, slots=True)
class SplitRules:
    """Options that say how a decoder's weights are divided over tensor-parallel ranks."""

    has_groups: bool = False
    """Groups of inputs may share scales."""
    keeps_head: bool = False
    """The head stays whole."""
    by_expert: bool = False
    """Each rank has some of the experts, instead of a part of the width of each."""


def split(module: nn.Module, name: str, shard: Shard, rules: SplitRules) -> RankParts:
    """Return which part of each weight of a decoder the rank `shard` holds; no weight is cut yet, and the module may be
    on torch's meta device. `name` is the model's name in errors.

    Raises `UnsupportedModelError` if no weight can be divided, or `ConfigError` with the largest number of ranks that
    works.
    """
    if shard.is_whole:
        return WHOLE
    splitter = _Splitter(module, shard, rules)
    splitter.split_layers()
    if not splitter.parts.sums:
        raise UnsupportedModelError(
            f"tensor_parallel_size is {shard.size}, but each rank would hold all layers of {name}, whose kinds are not"
            " divided; the largest number that works is 1"
        )
    splitter.check(name)
    if not rules.keeps_head:
        splitter.split_head()
    return replace(splitter.parts, zeros=frozenset(splitter.zeros))


def split_pooling(module: nn.Module, rank: int, num_ranks: int) -> RankParts:
    """Return which part of each weight of a pooling model one of `num_ranks` ranks holds. Raises `ConfigError` or
    `UnsupportedModelError` as `split` does.
    """
    # The head stays whole: scores need the rows of two of its tokens alone.
    return split(module, type(module).__name__, Shard(rank, num_ranks), SplitRules(keeps_head=True))


class _Splitter:
    """Finds out which parts of a decoder's weights one rank holds, module by module."""

    def __init__(self, module: nn.Module, shard: Shard, rules: SplitRules) -> None:
        self._module = cast(Module, module)
        config = self._module.config
        self._config: Module = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._shard, self._by_expert = shard, rules.by_expert
        self._least_step = GROUP_STEP if rules.has_groups else 1
        self._counts: list[tuple[str, int, int]] = []  # what is divided, its number, and the number that may be less
        self.parts = RankParts(shard)
        self.zeros: set[str] = set()

    def split_layers(self) -> None:
        """Record this rank's parts of all attention modules, MLPs and mixtures of experts, and the modules whose
        outputs are summed.
        """
        sums: list[str] = []
        for name, part in self._module.named_modules():
            found: str | None
            if (linear := delta_parts(part, self._shard)) is not None:
                self._split_delta(name, part, linear)
                found = "out_proj"
            elif is_mixer(part):
                # It stays whole, also if its products have the names of those of attention.
                found = None
            elif (own := attention_parts(part, self._config, self._shard)) is not None:
                self._split_attention(name, part, own)
                found = own.output
            elif (found := self._split_mlp(name, part)) is None:
                found = self._split_experts(name, part)
            if found is not None:
                sums.append(f"{name}.{found}" if found else name)
        self.parts = replace(self.parts, sums=tuple(sums))

    def split_head(self) -> None:
        """Record this rank's part of the output head, if the vocabulary can be divided equally."""
        head = getattr(self._module, "lm_head", None)
        # Logits are gathered in equal parts.
        if isinstance(head, nn.Linear) and head.out_features % self._shard.size == 0:
            self._cut("lm_head", head, 0, self._shard.part(head.out_features))

    def check(self, name: str) -> None:
        """Raise `ConfigError`, with the model's `name`, if a number of heads or experts or an MLP's width cannot be
        divided over the ranks.
        """
        size = self._shard.size
        # Only now: the ranges of numbers that cannot be divided are wrong, and nothing has used them.
        if (wrong := self._indivisible(size)) is not None:
            what, count = wrong
            # The search always ends, since every number can be divided over one rank.
            largest = next(n for n in range(size - 1, 0, -1) if self._indivisible(n) is None)
            raise ConfigError(
                f"tensor_parallel_size is {size}, which does not divide {what} ({count}) of {name}; the largest number"
                f" below it that works is {largest}"
            )

    def _indivisible(self, size: int) -> tuple[str, int] | None:
        """Return the first thing that cannot be divided over `size` ranks, such as "the KV heads", and its number; None
        if all can.
        """
        for what, count, step in self._counts:
            if what in (WIDTH, EXPERTS):
                is_divided = bool(step_of_width(count, size, step))
            else:
                is_divided = count % size == 0 or (what == KV_HEADS and size % count == 0)
            if not is_divided:
                return what, count
        return None

    def _split_attention(self, name: str, module: Module, own: AttentionParts) -> None:
        """Record this rank's part of the attention module `name`: some heads. If there are fewer KV heads than ranks,
        several ranks hold the same one.
        """
        self._counts.append((HEADS, own.heads.total, own.blocks))
        # A single head, such as the latent of MLA, is on all ranks.
        if own.kv_heads.total > 1:
            self._counts.append((KV_HEADS, own.kv_heads.total, 0))
        self.parts.kv_heads[own.layer] = own.kv_heads
        self.parts.attention[name] = own
        for leaf, ranges in own.rows.items():
            self._cut(f"{name}.{leaf}", child(module, leaf), 0, *ranges)
        last = child(module, own.output)
        self._cut(f"{name}.{own.output}", last, 1, own.heads.scaled(input_size(last)))
        # One number for each head.
        for leaf in ("sinks", "gate_bias"):
            if isinstance(getattr(module, leaf, None), nn.Parameter):
                self.parts.tensors[f"{name}.{leaf}"] = TensorPart(0, (own.heads.part,))
        if type(module).__name__ == "DbrxAttention":
            # The number of columns of its queries.
            self.parts.numbers[f"{name}.hidden_size"] = own.heads.count * module.head_dim
        self._split_norms(name, module, {"q_norm": own.heads, "k_norm": own.kv_heads, "attn_sub_norm": own.heads})

    def _split_delta(self, name: str, module: Module, own: DeltaParts) -> None:
        """Record this rank's part of the linear attention `name`: some key heads, with the value heads that read
        them.
        """
        self._counts.append((LINEAR_HEADS, own.key_heads.total, 0))
        self.parts.delta[name] = own
        for leaf, ranges in own.rows.items():
            self._cut(f"{name}.{leaf}", getattr(module, leaf), 0, *ranges)
        self._cut(f"{name}.out_proj", module.out_proj, 1, own.value_heads.scaled(module.value_dim))
        for leaf in ("conv1d.weight", "conv1d.bias"):
            self.parts.tensors[f"{name}.{leaf}"] = TensorPart(0, own.channels)
        for leaf in ("A_log", "dt_bias"):
            self.parts.tensors[f"{name}.{leaf}"] = TensorPart(0, (own.value_heads.part,))

    def _split_norms(self, name: str, module: Module, heads: dict[str, HeadRange]) -> None:
        """Record this rank's part of an attention module's query and key norms, if they have weights for each head;
        `heads` are this rank's heads by the norm's name.
        """
        for leaf, own in heads.items():
            norm: Module = getattr(module, leaf, nn.Identity())
            for full, weight in norm.named_parameters(prefix=f"{name}.{leaf}"):
                # A smaller norm has the same weights for all heads, and stays whole.
                if weight.numel() > module.head_dim:
                    # [num_heads, head_dim], or all in one row.
                    part = own.part if weight.dim() > 1 else own.scaled(len(weight))
                    self.parts.tensors[full] = TensorPart(0, (part,))
                    if weight.dim() == 1:
                        self.parts.wide_norms[f"{name}.{leaf}"] = (part.stop - part.start) * self._shard.size

    def _split_mlp(self, name: str, module: Module) -> str | None:
        """Record this rank's part of the MLP `name`, a range of its width. Return the name of its last linear layer,
        whose outputs must be summed; None if the module is not an MLP that can be divided.
        """
        for firsts, last in MLPS:
            if not all(is_linear(child(module, leaf)) for leaf in (*firsts, last)):
                continue
            width = input_size(child(module, last))
            # Gate and up may be one product, with the gate's outputs first.
            outputs = output_size(child(module, firsts[0]))
            # Gemma 3n keeps the gates that are large among all of a token, so it needs them all.
            if outputs not in (width, 2 * width) or getattr(module, "activation_sparsity", 0) != 0:
                return None
            part = self._width(width)
            ranges = (part,) if outputs == width else (part, _moved(part, width))
            for leaf in firsts:
                self._cut(f"{name}.{leaf}", child(module, leaf), 0, *ranges)
            self._cut(f"{name}.{last}", child(module, last), 1, part)
            # BitNet has a norm before the last product.
            if (norm := getattr(module, "ffn_sub_norm", None)) is not None:
                for leaf, _ in norm.named_parameters():
                    self.parts.tensors[f"{name}.ffn_sub_norm.{leaf}"] = TensorPart(0, (part,))
                self.parts.wide_norms[f"{name}.ffn_sub_norm"] = width
            return last
        return None

    def _split_experts(self, name: str, module: Module) -> str | None:
        """Record this rank's part of the experts in the module `name`: a range of each one's width, or some whole
        experts. Return "" if the module has stacked experts, whose output must be summed; otherwise None.
        """
        if (kind := type(module).__name__) in ("DbrxExperts", "JetMoeMoE"):
            (self._split_flat_experts if kind == "DbrxExperts" else self._split_jetmoe)(name, module)
            return ""
        # Those of Nemotron-H have no gate.
        has_gate = hasattr(module, WEIGHTS[0]) or getattr(module, "has_gate", True)
        names = WEIGHTS if has_gate else ("up_proj", WEIGHTS[1])
        first, last = (getattr(module, leaf, None) for leaf in names)
        if not isinstance(first, nn.Parameter) or not isinstance(last, nn.Parameter) or first.dim() != 3:
            return None
        is_transposed, has_halves = kind in TRANSPOSED, kind in ("AriaExperts", "Llama4TextExperts")
        # The class also decides how gate and up lie in the weight. One that contradicts it was not compared.
        if getattr(module, "is_transposed", is_transposed or has_halves) != (is_transposed or has_halves):
            return None
        # Experts of LongCat-Flash that return their input, and have no weights.
        has_identities = isinstance(getattr(module, "identity_expert", None), nn.Identity)
        if has_identities and self._shard.rank > 0:
            self.parts.zero_outputs.append(f"{name}.identity_expert")
        if self._by_expert:
            self._split_by_expert(name, module)
            return ""
        outputs, inputs = (2, 1) if is_transposed or has_halves else (1, 2)
        width = last.shape[inputs]
        part = self._width(width)
        # gpt-oss has the gate and the other product of a column as neighbours; all others have two halves.
        ranges = (_scaled(part, 2),) if is_transposed else (part, _moved(part, width)) if has_gate else (part,)
        self.parts.tensors[f"{name}.{names[0]}"] = TensorPart(outputs, ranges)
        self.parts.tensors[f"{name}.{names[1]}"] = TensorPart(inputs, (part,))
        if hasattr(module, "gate_up_proj_bias"):
            self.parts.tensors[f"{name}.gate_up_proj_bias"] = TensorPart(1, ranges)
            self._add_once(f"{name}.down_proj_bias")
        return ""

    def _split_flat_experts(self, name: str, module: Module) -> None:
        """Record this rank's part of the experts of DBRX, whose weights have the rows of one expert after another:
        [experts * width, hidden].
        """
        total, width = int(module.num_experts), int(module.ffn_hidden_size)
        if self._by_expert:
            own = self._own_experts(name, total)
            ranges: tuple[slice, ...] = (_scaled(own, width),)
        else:
            part = self._width(width)
            ranges = tuple(_moved(part, number * width) for number in range(total))
            self.parts.numbers[f"{name}.ffn_hidden_size"] = part.stop - part.start
        for leaf in ("w1", "v1", "w2"):
            self.parts.tensors[f"{name}.mlp.{leaf}"] = TensorPart(0, ranges)

    def _split_jetmoe(self, name: str, module: Module) -> None:
        """Record this rank's part of the experts of JetMoe, which lie in two modules: some whole experts, or a range of
        each one's width.
        """
        first, last = f"{name}.input_linear", f"{name}.output_linear"
        if self._by_expert:
            own = self._own_experts(name, int(module.input_linear.num_experts))
            for leaf in (first, last):
                self.parts.tensors[f"{leaf}.weight"] = TensorPart(0, (own,))
                self.parts.numbers[f"{leaf}.num_experts"] = own.stop - own.start
        else:
            width = int(module.hidden_size)
            part = self._width(width)
            self.parts.tensors[f"{first}.weight"] = TensorPart(1, (part, _moved(part, width)))
            self.parts.tensors[f"{last}.weight"] = TensorPart(2, (part,))
        self._add_once(f"{name}.bias")

    def _split_by_expert(self, name: str, module: Module) -> None:
        """Record which experts of the module `name` this rank holds: a range of about total / ranks experts."""
        # The first weight of LongCat-Flash has unused rows for the experts that return their input.
        own = self._own_experts(name, len(getattr(module, WEIGHTS[1])))
        for leaf, _ in module.named_parameters(recurse=False):
            self.parts.tensors[f"{name}.{leaf}"] = TensorPart(0, (own,))

    def _own_experts(self, name: str, total: int) -> slice:
        """Record and return which of the `total` experts of the module `name` this rank holds."""
        self._counts.append((EXPERTS, total, 1))
        # If there are fewer experts than ranks, `check` fails later. Until then any range will do.
        own = self._shard.part_of_width(total) if total >= self._shard.size else slice(0, total)
        self.parts.experts[name] = own
        return own

    def _width(self, width: int) -> slice:
        # Other widths have groups that kernels do not support, so that they are not quantized in any case.
        step = self._least_step if width % self._least_step == 0 else 1
        self._counts.append((WIDTH, width, step))
        # The empty range stands for a width that cannot be divided, for which `check` raises an error.
        return self._shard.part_of_width(width, step) if step_of_width(width, self._shard.size, step) else slice(0, 0)

    def _cut(self, name: str, linear: Module, dim: int, *ranges: slice) -> None:
        """Record this rank's ranges of a linear layer's outputs (`dim` 0) or inputs (`dim` 1), and its part of the
        bias.
        """
        self.parts.tensors[f"{name}.weight"] = TensorPart(1 - dim if is_turned(linear) else dim, ranges)
        self.parts.widths[name] = output_size(linear) if dim == 0 else input_size(linear)
        if linear.bias is not None and dim == 0:
            self.parts.tensors[f"{name}.bias"] = TensorPart(0, ranges)
        elif dim == 1:
            self._add_once(f"{name}.bias")

    def _add_once(self, name: str) -> None:
        if self._shard.rank > 0:
            self.zeros.add(name)


def sum_outputs(module: nn.Module, parts: RankParts, collectives: Collectives) -> None:
    """Add hooks to the modules that compute only this rank's summand of their output, which sum it over all ranks, and
    to norms over columns of all ranks. Raises `UnsupportedModelError` for such a norm of an unknown kind.
    """
    for name, columns in parts.wide_norms.items():
        join_norm(module.get_submodule(name), name, columns, collectives)

    def summed(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return collectives.all_reduce(output.contiguous())

    # A hook needs no knowledge of how the module computes, with or without codes and adapters.
    for name in parts.sums:
        layer: Module = module.get_submodule(name)
        layer.register_forward_hook(summed)
        # An adapted layer has the original one inside.
        layer = getattr(layer, "base", layer)
        if isinstance(layer, ReorderedLinear):
            ((own,),) = (parts.tensors[f"{name}.weight"].ranges,)
            layer.gather = partial(_gathered, own, parts.widths[name], collectives)


def join_norm(norm: nn.Module, name: str, columns: int, collectives: Collectives) -> None:
    """Add a hook to a root-mean-square norm over columns of which each rank holds some, so that it divides by the root
    mean square of all `columns`. Raises `UnsupportedModelError` if the norm `name` is of another kind.
    """
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float) or isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None:
        raise UnsupportedModelError(
            f"{name} is a norm over the columns of all ranks, of a kind that is not computed over them; the largest"
            " tensor_parallel_size that works is 1"
        )

    def joined(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        squares = inputs[0].float().square().sum(-1, keepdim=True)
        own = squares / inputs[0].shape[-1] + eps
        # The norm has divided by the root of `own`.
        factor = (own / (collectives.all_reduce(squares) / columns + eps)).sqrt()
        return (output.float() * factor).to(output.dtype)

    norm.register_forward_hook(joined)


def _gathered(own: slice, width: int, collectives: Collectives, x: Tensor) -> Tensor:
    """Return the columns of all ranks, [..., width]. `x` holds this rank's columns, which are the range `own`."""
    # A sum with zeros, since ranks may have different numbers of columns.
    whole = x.new_zeros(*x.shape[:-1], width)
    whole[..., own] = x
    return collectives.all_reduce(whole)


def narrow(module: nn.Module, parts: RankParts) -> None:
    """Set the numbers of heads and experts in the attributes of a model's modules to those of this rank, after its
    weights were cut.
    """
    for name, own in parts.attention.items():
        narrow_attention(module.get_submodule(name), own)
    for name, linear in parts.delta.items():
        narrow_delta(module.get_submodule(name), linear)
    for name, held in parts.experts.items():
        _narrow_experts(module.get_submodule(name), held)
    for name in parts.zero_outputs:
        module.set_submodule(name, ZeroOutput())
    for path, number in parts.numbers.items():
        name, _, attribute = path.rpartition(".")
        setattr(module.get_submodule(name), attribute, number)


class ZeroOutput(nn.Module):
    """Stands for a module whose output rank 0 adds alone."""

    def forward(self, values: Tensor) -> Tensor:
        """Return zeros of the shape of `values`."""
        return torch.zeros_like(values)


def _narrow_experts(experts: Module, held: slice) -> None:
    """Change the forward of a module that holds only the experts `held`: choices of other experts contribute zero."""
    count = held.stop - held.start
    experts.baton_first = held.start
    match type(experts).__name__:
        case "JetMoeMoE":
            _narrow_router(experts.router, held)
        case "Llama4TextExperts":
            _narrow_rows(experts, held)
        case _:
            _narrow_choices(experts, held)
    if hasattr(experts, "num_experts"):
        experts.num_experts = count


def _narrow_choices(experts: Module, held: slice) -> None:
    """Change the forward of a module of experts that gets each token's choices. Numbers beyond those of all experts
    choose an expert that returns its input (LongCat-Flash).
    """
    whole, count = experts.forward, held.stop - held.start
    total = getattr(experts, "num_routed_experts", None)
    if total is not None:
        experts.num_routed_experts, experts.total_experts = count, count + 1

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor, *rest: Any) -> Any:
        own = chosen - held.start
        # Shapes must not depend on what was chosen: experts of other ranks become expert 0 with the weight 0.
        is_here = (own >= 0) & (own < count)
        own, own_weights = torch.where(is_here, own, 0), torch.where(is_here, weights, 0.0)
        if total is not None:
            own = torch.where(chosen >= total, count, own)
            own_weights = torch.where(chosen >= total, weights, own_weights)
        return whole(hidden, own, own_weights, *rest)

    experts.forward = forward


def _narrow_rows(experts: Module, held: slice) -> None:
    """Change the forward of Llama 4's experts, which gets the rows of all tokens for one expert after another,
    [experts * num_tokens, hidden]: those of other ranks become zero.
    """
    whole, total = experts.forward, int(experts.num_experts)

    def forward(hidden: Tensor) -> Tensor:
        rows = hidden.view(total, -1, hidden.shape[-1])
        output = torch.zeros_like(rows)
        own = rows[held]
        output[held] = whole(own.reshape(-1, hidden.shape[-1])).view(own.shape)
        return output.view(hidden.shape)

    experts.forward = forward


def _narrow_router(router: Module, held: slice) -> None:
    """Change the forward of JetMoe's router, which sorts the choices of all tokens by expert, so that it returns those
    of the experts `held` only.
    """
    whole = router.forward

    def forward(hidden: Tensor) -> tuple[Any, ...]:
        places, rows, weights, counts, logits = whole(hidden)
        start = sum(counts[: held.start])
        own = slice(start, start + sum(counts[held]))
        return places[own], rows[own], weights[own], counts[held], logits

    router.forward = forward


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
