"""A step that stores a sequence's states in the middle computes the bits of two steps that are cut there."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.engine.kernels import MixerKernels
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.mixers import CpuMixers
from baton_serve.engine.kernels.mixers import InnerCheckpoints, PackedSequences
from baton_serve.engine.kernels.reference import mixers as twin
from baton_serve.engine.kernels.triton import mixers
from tests.contract.kernels.mixer_batches import (
    PADDING,
    channel_delta_heads,
    delta_heads,
    draw,
    lightning_heads,
    packed,
    random_states,
    scan_channels,
    state_space_heads,
)
from tests.contract.kernels.triton_batches import DEVICE

LENGTHS, SLOTS = [131, 3, 200, 2, 129], [2, 5, 0, PADDING, 3]
INNER = {0: (1, 128), 2: (4, 64)}
"""By sequence: the row for its inner checkpoint, and after how many tokens it lies."""


@dataclass(frozen=True, slots=True)
class Convolved:
    """The inputs of a convolution."""

    x: Tensor
    weight: Tensor
    bias: Tensor


Run = Callable[[Any, Any, Tensor, PackedSequences], Tensor]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One kind of layer: makes its inputs for a number of tokens, computes them, and has states of a shape."""

    inputs: Callable[[int, torch.dtype], Any]
    run: Run
    shape: tuple[int, ...]
    has_short_states: bool = False


RECURRENCES = {
    "convolution": Recurrence(
        lambda count, dtype: Convolved(draw(count, 40, dtype=dtype), draw(40, 4, dtype=dtype), draw(40, dtype=dtype)),
        lambda kernels, own, states, step: kernels.convolve(own.x, own.weight, own.bias, states, step, has_silu=True),
        (40, 4),
        has_short_states=True,
    ),
    "delta": Recurrence(
        lambda count, dtype: delta_heads(count, 1, 2, 16, 72, dtype),
        lambda kernels, own, states, step: kernels.delta_rule(own, states, step),
        (2, 16, 72),
    ),
    "channel delta": Recurrence(
        lambda count, dtype: channel_delta_heads(count, 2, 20, 24, dtype),
        lambda kernels, own, states, step: kernels.channel_delta_rule(own, states, step),
        (2, 20, 24),
    ),
    "lightning": Recurrence(
        lambda count, dtype: lightning_heads(count, 2, 20, dtype),
        lambda kernels, own, states, step: kernels.lightning(own, states, step),
        (2, 20, 20),
    ),
    "mamba 2": Recurrence(
        lambda count, dtype: state_space_heads(count, 2, 16, 1, 20, dtype),
        lambda kernels, own, states, step: kernels.state_space(own, states, step),
        (2, 16, 20),
    ),
    "mamba 1": Recurrence(
        lambda count, dtype: scan_channels(count, 40, 16, dtype),
        lambda kernels, own, states, step: kernels.selective_scan(own, states, step),
        (40, 16),
    ),
}


def rows_of(inputs: Any, rows: slice, count: int) -> Any:
    """Return the inputs of some of the `count` tokens."""
    own = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{k: v[rows] for k, v in own.items() if isinstance(v, Tensor) and len(v) == count})


def with_checkpoints(inner: dict[int, tuple[int, int]]) -> PackedSequences:
    pairs = [inner.get(number, (-1, 0)) for number in range(len(LENGTHS))]
    slots, tokens = (torch.tensor(part, device=DEVICE) for part in zip(*pairs, strict=True))
    return replace(packed(LENGTHS, SLOTS), checkpoints=InnerCheckpoints(slots, tokens.int()))


def c_plus_plus() -> CpuMixers:
    try:
        return CpuMixers(load_kernels())
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


KERNELS: dict[str, Callable[[], MixerKernels]] = {"twin": lambda: twin, "triton": lambda: mixers, "c++": c_plus_plus}


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("kind", RECURRENCES)
def test_states_inside_a_step_are_those_of_a_step_that_ends_there(kind: str, implementation: str) -> None:
    if implementation == "c++" and DEVICE.type != "cpu":
        pytest.skip("it computes on CPUs")
    torch.manual_seed(11)
    # float16 cannot hide an error of rounding in the checkpoint, which lies in float32.
    own, kernels, count = RECURRENCES[kind], KERNELS[implementation](), sum(LENGTHS)
    dtype = torch.float32 if implementation == "c++" else torch.float16
    inputs = own.inputs(count, dtype)
    before = random_states(*own.shape, dtype=dtype if own.has_short_states else torch.float32)
    states = before.clone()
    output = own.run(kernels, inputs, states, with_checkpoints(INNER))
    expected = before.clone()
    same = own.run(kernels, inputs, expected, packed(LENGTHS, SLOTS))
    for number, (row, tokens) in INNER.items():
        start, end = sum(LENGTHS[:number]), sum(LENGTHS[: number + 1])
        slot, cut = SLOTS[number], before.clone()
        parts = []
        for rows in (slice(start, start + tokens), slice(start + tokens, end)):
            chosen = rows_of(inputs, rows, count)
            parts.append(own.run(kernels, chosen, cut, packed([rows.stop - rows.start], [slot])))
            if rows.start == start:
                assert_same(states[row], cut[slot], kind, implementation)
        assert_same(states[slot], cut[slot], kind, implementation)
        assert_same(output[start:end], torch.cat(parts), kind, implementation)
        expected[row], expected[slot], same[start:end] = states[row], states[slot], output[start:end]
    # Other sequences, and other rows of states, are as without checkpoints.
    live = torch.ones(count, dtype=torch.bool, device=DEVICE)
    live[sum(LENGTHS[:3]) : sum(LENGTHS[:4])] = False
    assert torch.equal(states, expected) and torch.equal(output[live], same[live])


def assert_same(found: Tensor, expected: Tensor, kind: str, implementation: str) -> None:
    """Assert equal bits, or equal numbers where the kernels sum up a step's tokens in another order."""
    if kind == "mamba 1" and implementation == "triton":
        torch.testing.assert_close(found, expected, rtol=1e-5 if found.dtype == torch.float32 else 2e-3, atol=1e-5)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [1, 2, 5, 63, 130])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_plain_torch_stores_states_behind_any_token(kind: str, tokens: int) -> None:
    own, count = RECURRENCES[kind], sum(LENGTHS)
    inputs = own.inputs(count, torch.float32)
    before = random_states(*own.shape)
    states, cut = before.clone(), before.clone()
    own.run(twin, inputs, states, with_checkpoints({0: (1, tokens)}))
    own.run(twin, rows_of(inputs, slice(0, tokens), count), cut, packed([tokens], SLOTS[:1]))
    torch.testing.assert_close(states[1], cut[SLOTS[0]])


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_convolution_in_triton_keeps_old_inputs(tokens: int) -> None:
    own, count = RECURRENCES["convolution"], sum(LENGTHS)
    inputs = own.inputs(count, torch.float32)
    states = random_states(*own.shape)
    expected = states.clone()
    found = own.run(mixers, inputs, states, with_checkpoints({0: (1, tokens)}))
    torch.testing.assert_close(found, own.run(twin, inputs, expected, with_checkpoints({0: (1, tokens)})))
    assert torch.equal(states, expected)
