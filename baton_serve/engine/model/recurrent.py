"""Runs transformers' layers of linear attention and state spaces on a step, sequences of equal length together.

A mixer keeps a state per sequence and takes sequences of equal length as a batch. A step has the tokens of several
sequences one after another, and their states lie in batch slots. So each mixer's forward is replaced: it splits the
tokens by sequence, runs the module's own forward with the states of these sequences, and stores the new states. All
sequences with one token are one batch; every longer chunk of a prompt is a batch of its own. On accelerators, state
spaces (Mamba), lightning attention and Kimi Delta Attention are computed for the whole step at once instead
(`batched_mixers.py`).

A sequence that starts has states of zeros instead of none. The modules compute the same from both: their convolutions
pad with zeros, and their recurrences start at zero.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels import MixerKernels, PackedSequences
from baton_serve.engine.kernels.cpu.recurrent import CpuRecurrentSteps, SlotState
from baton_serve.engine.kv.state_memory import StateKind, StatePart, StateViews
from baton_serve.engine.model.batch_inputs import StepStates
from baton_serve.engine.model.batched_mixers import packed_forward
from baton_serve.engine.model.mixer_adapters import OWN_FORWARDS, SequenceStates, is_mixer, number_layers
from baton_serve.engine.model.paged_attention import Mixer, StepHolder
from baton_serve.engine.model.recurrent_steps import step_forward

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""The names of a mixer's argument for the cache: the first since transformers 5.24."""


class StateProbe:
    """Records which recurrent states a model's layers keep, while the model runs once at load. It also checks that one
    layer of each class gives the same result in chunks. Implements `MixerContext` and `SequenceStates`.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[int, StateKind, int], StatePart] = {}
        self._checked: set[str] = set()

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The shape and dtype of each recurrent state that was recorded, in the order of layers."""
        return tuple(self._parts[key] for key in sorted(self._parts))

    def run(self, mixer: Mixer, arguments: dict[str, object]) -> Any:
        known = set(self._parts)
        output = _call(mixer, arguments, self)
        if mixer.kind not in self._checked:
            self._checked.add(mixer.kind)
            new = [part for key, part in self._parts.items() if key not in known]
            _check_continues(mixer, arguments, new, output)
        return output

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        if conv_kernel_size is None:
            raise UnsupportedModelError(f"layer {layer_idx} does not state the length of its convolution")
        shape = (*conv_states.shape[1:-1], conv_kernel_size)
        self._record(StatePart(layer_idx, "conv", state_idx, shape, conv_states.dtype))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        shape = tuple(recurrent_states.shape[1:])
        self._record(StatePart(layer_idx, "recurrent", state_idx, shape, recurrent_states.dtype))
        return recurrent_states

    def _record(self, part: StatePart) -> None:
        self._parts[part.layer, part.kind, part.index] = part


@dataclass(slots=True)
class SlotStates:
    """The recurrent states of a batch of sequences during the forward of one layer. Implements `SequenceStates`.

    They are copies of the sequences' states in their slots, because modules change them in place; `store` copies them
    back.
    """

    views: StateViews
    slots: Tensor  # int64 [batch]
    _states: dict[tuple[int, StateKind, int], Tensor] = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._load(layer_idx, "conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._load(layer_idx, "recurrent", state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        past = self._load(layer_idx, "conv", state_idx)
        joined = torch.cat([past, conv_states.to(past.dtype)], dim=-1)
        self._states[layer_idx, "conv", state_idx] = joined[..., -past.shape[-1] :]
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._states[layer_idx, "recurrent", state_idx] = recurrent_states
        return recurrent_states

    def store(self, checkpoints: Tensor | None) -> None:
        """Copy the states that the layer has changed back to the slots of their sequences, and to the rows
        `checkpoints`, int64 [batch], if they are given."""
        for (layer, kind, index), state in self._states.items():
            view = self.views[layer][kind, index]
            for rows in (self.slots,) if checkpoints is None else (self.slots, checkpoints):
                view.index_copy_(0, rows, state.to(view.dtype))

    def _load(self, layer: int, kind: StateKind, index: int) -> Tensor:
        key = (layer, kind, index)
        if key not in self._states:
            self._states[key] = self.views[layer][kind, index].index_select(0, self.slots)
        return self._states[key]


@dataclass(frozen=True, slots=True)
class InPlaceStates:
    """The recurrent states of a batch of sequences for kernels that compute one token of each and change the states in
    their slots. It has the methods of transformers' cache that such a step calls.
    """

    views: StateViews
    slots: Tensor  # int64 [batch]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> SlotState:
        return SlotState(self.views[layer_idx]["conv", state_idx], self.slots)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> SlotState:
        return SlotState(self.views[layer_idx]["recurrent", state_idx], self.slots)

    def update_recurrent_state(self, recurrent_states: SlotState, layer_idx: int, state_idx: int = 0) -> SlotState:
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of a step that run as one batch, because they have equally many tokens. `rows` are these tokens in the
    step.
    """

    rows: Tensor | slice
    slots: Tensor
    length: int
    """Tokens of each sequence."""
    checkpoints: Tensor | None = None
    """The rows in which the states are stored too; None: nowhere."""


class PackedMixers:
    """Implements `MixerContext`: runs layers with recurrent states, which expect [batch, length], on a step whose
    tokens lie one after another.
    """

    def __init__(self, states: StepStates, sequences: PackedSequences | None = None) -> None:
        """`sequences` are the same sequences as `states` for layers that compute a step at once; None: none does."""
        self._states = states
        self._views = states.views
        self._sequences = sequences
        self._num_tokens = sum(states.lengths)
        self._groups: list[_Group] = []

    def run(self, mixer: Mixer, arguments: dict[str, object]) -> Any:
        if mixer.packed is not None and self._sequences is not None:
            return mixer.packed(arguments[mixer.names[0]], self._views, self._sequences)
        # Most models have no layer that needs the groups, or need them in each layer.
        self._groups = self._groups or _groups(self._states)
        if len(self._groups) == 1:
            return self._run_group(mixer, arguments, self._groups[0])
        joined: Tensor | None = None
        rest: tuple[object, ...] | None = None
        for group in self._groups:
            output = self._run_group(mixer, arguments, group)
            part, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
            if joined is None:
                joined = part.new_empty(1, self._num_tokens, *part.shape[2:])
            joined[:, group.rows] = part
        return joined if rest is None else (joined, *rest)

    def _run_group(self, mixer: Mixer, arguments: dict[str, object], group: _Group) -> Any:
        """Run a layer with recurrent states on the sequences of a group, update their states, and return its output
        with their tokens one after another, [1, tokens, ...].
        """
        parts = {name: _rows(value, group.rows, self._num_tokens, group.length) for name, value in arguments.items()}
        if group.length == 1 and mixer.step is not None and group.checkpoints is None:
            output = mixer.step(**parts, **{mixer.cache_name: InPlaceStates(self._views, group.slots)})
        else:
            cache = SlotStates(self._views, group.slots)
            output = _call(mixer, parts, cache)
            cache.store(group.checkpoints)
        if isinstance(output, tuple):
            return (output[0].flatten(0, 1)[None], *output[1:])
        return output.flatten(0, 1)[None]


def _rows(value: object, rows: Tensor | slice, num_tokens: int, length: int) -> object:
    """Return the rows `rows` (tokens) of an argument as [sequences, length, ...]. Arguments that do not have one row
    for each of the `num_tokens` tokens are returned unchanged.
    """
    if isinstance(value, tuple):
        return tuple(_rows(one, rows, num_tokens, length) for one in value)
    if not isinstance(value, Tensor) or value.shape[:2] != (1, num_tokens):
        return value
    chosen = value[0, rows]
    return chosen.view(-1, length, *chosen.shape[1:])


def _call(mixer: Mixer, arguments: Mapping[str, object], cache: SequenceStates) -> Any:
    """Call the own forward of a module with recurrent states, for sequences of equal length, with `cache` as its
    cache.
    """
    return mixer.forward(**arguments, **{mixer.cache_name: cache})


def _check_continues(mixer: Mixer, arguments: Mapping[str, object], parts: Sequence[StatePart], whole: Any) -> None:
    """Raise `UnsupportedModelError` if a layer with recurrent states computes something else for a sequence in chunks
    than `whole`, its output for the whole sequence. `parts` are its states.

    Some modules ignore their state if they get several tokens, which would make wrong answers without an error.
    """
    expected: Tensor = whole[0] if isinstance(whole, tuple) else whole
    views: dict[int, dict[tuple[StateKind, int], Tensor]] = {}
    for part in parts:
        state = torch.zeros(1, *part.shape, dtype=part.dtype, device=expected.device)
        views.setdefault(part.layer, {})[part.kind, part.index] = state
    slots = torch.zeros(1, dtype=torch.int64, device=expected.device)
    num_tokens, start, found = expected.shape[1], 0, []
    for length in (num_tokens // 2, num_tokens - num_tokens // 2 - 1, 1):
        rows = slice(start, start + length)
        chunk = {name: _rows(value, rows, num_tokens, length) for name, value in arguments.items()}
        output = PackedMixers(StepStates(slots, [length], views)).run(mixer, chunk)
        found.append(output[0] if isinstance(output, tuple) else output)
        start += length
    tolerance = 1e-3 if expected.dtype == torch.float32 else 0.05
    difference = (torch.cat(found, dim=1) - expected).abs().max()
    if bool(difference > tolerance * expected.abs().max()):
        raise UnsupportedModelError(f"{mixer.kind} does not continue from its states with several tokens")


def _groups(states: StepStates) -> list[_Group]:
    """Divide a step's sequences into batches of equal length: one for all sequences with one token, and one for each
    longer sequence, or two if it has an inner checkpoint.
    """
    starts, total = [], 0
    for length in states.lengths:
        starts.append(total)
        total += length
    single = [number for number, length in enumerate(states.lengths) if length == 1]
    if len(single) == len(states.lengths):
        return [_Group(slice(None), states.slots, 1)]
    groups = []
    for number, (start, length) in enumerate(zip(starts, states.lengths, strict=True)):
        if length > 1:
            own, middle, end = slice(number, number + 1), start, start + length
            if states.checkpoints is not None and states.inner_lengths[number]:
                # A part of its own for each of the states that are stored.
                middle += states.inner_lengths[number]
                rows = states.checkpoints.slots[own]
                groups.append(_Group(slice(start, middle), states.slots[own], middle - start, rows))
            groups.append(_Group(slice(middle, end), states.slots[own], end - middle))
    if single:
        device = states.slots.device
        rows = torch.tensor([starts[number] for number in single], device=device)
        groups.append(_Group(rows, states.slots[torch.tensor(single, device=device)], 1))
    return groups


def adapt_mixers(module: nn.Module) -> None:
    """Replace the forward of a transformers model's layers with recurrent states, such as Mamba, so that they run by
    the `MixerContext` of the current step.
    """
    number_layers(module)
    for part in module.modules():
        if (mixer := _mixer_of(part)) is not None:
            _replace_forward(part, mixer)


def install_steps(module: nn.Module, steps: CpuRecurrentSteps) -> None:
    """Let the layers with recurrent states compute steps of one token by C++ kernels, where these support them. Call it
    after `adapt_mixers`.
    """
    for part in cast(Iterable[Module], module.modules()):
        mixer = getattr(part, "baton_mixer", None)
        if isinstance(mixer, Mixer):
            mixer.step = step_forward(part, steps)


def install_packed(module: nn.Module, kernels: MixerKernels) -> None:
    """Let layers with recurrent states compute a step at once by `kernels`, where these support them. Call it after
    `adapt_mixers`.
    """
    for part in cast(Iterable[Module], module.modules()):
        mixer = getattr(part, "baton_mixer", None)
        if isinstance(mixer, Mixer):
            mixer.packed = packed_forward(part, kernels)


def _replace_forward(part: Module, mixer: Mixer) -> None:
    ignored = {*CACHE_NAMES, "baton", "use_cache"}

    def forward(*args: object, **kwargs: object) -> Any:
        holder: StepHolder = part.baton_step
        assert holder.context is not None and holder.context.mixers is not None, "the step has no states"
        named = dict(zip(mixer.names, args, strict=False)) | kwargs
        return holder.context.mixers.run(mixer, {k: v for k, v in named.items() if k not in ignored})

    part.forward = forward
    part.baton_mixer = mixer


def _mixer_of(part: Module) -> Mixer | None:
    """Return how to call a module that keeps recurrent states; None for all other modules. Raises
    `UnsupportedModelError` if the name of its cache argument is unknown.
    """
    if not is_mixer(part):
        return None
    function = inspect.unwrap(type(part).forward)
    own = OWN_FORWARDS.get(type(part).__name__)
    names = tuple(inspect.signature(function).parameters)[1:]  # without self
    if own is not None:
        return Mixer(type(part).__name__, _bound(own, part, names[0]), names, "cache")
    cache_name = next((name for name in CACHE_NAMES if name in names), None)
    if cache_name is None:
        raise UnsupportedModelError(f"{type(part).__name__} takes its cache by a name that is not known")
    return Mixer(type(part).__name__, part.forward, names, cache_name)


def _bound(own: Callable[..., Any], part: Module, input_name: str) -> Callable[..., Any]:
    """Return a function that calls `own` with the module `part`, the argument named `input_name`, the cache and the
    rest.
    """

    def forward(cache: SequenceStates, **arguments: Any) -> Any:
        return own(part, arguments.pop(input_name), cache, **arguments)

    return forward
