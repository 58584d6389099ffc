"""The kernels of state spaces against their plain-torch twins, and the twins against transformers' functions."""

import pytest
import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from baton_serve.engine.kernels import PackedSequences
from baton_serve.engine.kernels.reference import mixers as twin
from baton_serve.engine.kernels.triton import mixers, selective_scan
from tests.contract.kernels.mixer_batches import NUM_SLOTS, packed, random_states, scan_channels, state_space_heads
from tests.contract.kernels.test_triton_mixers import DTYPES, SINGLE, check

PROMPTS = ([70, 1, 3, 130], [2, 5, 0, 1])
STEPS = pytest.mark.parametrize("step", [SINGLE, PROMPTS], ids=["tokens", "prompts"])


def unused(sequences: PackedSequences) -> list[int]:
    return [slot for slot in range(NUM_SLOTS) if slot not in sequences.slots.tolist()]


@STEPS
@DTYPES
@pytest.mark.parametrize(("heads", "head_dim", "groups", "state_size"), [(4, 16, 2, 20), (1, 72, 1, 128)])
def test_mamba_2_equals_its_twin(
    step: tuple[list[int], list[int]], dtype: torch.dtype, heads: int, head_dim: int, groups: int, state_size: int
) -> None:
    torch.manual_seed(1)
    sequences = packed(*step)
    inputs = state_space_heads(sum(step[0]), heads, head_dim, groups, state_size, dtype)
    states = random_states(heads, head_dim, state_size)
    expected_states = states.clone()
    expected = twin.state_space(inputs, expected_states, sequences)
    check(mixers.state_space(inputs, states, sequences), expected)
    check(states.to(dtype), expected_states.to(dtype))
    assert torch.equal(states[unused(sequences)], expected_states[unused(sequences)])


@STEPS
@DTYPES
@pytest.mark.parametrize(("channels", "state_size"), [(40, 16), (20, 5)])
def test_mamba_1_equals_its_twin(
    step: tuple[list[int], list[int]],
    dtype: torch.dtype,
    channels: int,
    state_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(selective_scan, "CHUNK_TOKENS", 16)
    lengths = step[0] if max(step[0]) == 1 else [20, 1, 3, 40]
    sequences = packed(lengths, step[1])
    inputs = scan_channels(sum(lengths), channels, state_size, dtype)
    states = random_states(channels, state_size)
    expected_states = states.clone()
    expected = twin.selective_scan(inputs, expected_states, sequences)
    check(mixers.selective_scan(inputs, states, sequences), expected)
    check(states.to(dtype), expected_states.to(dtype))
    assert torch.equal(states[unused(sequences)], expected_states[unused(sequences)])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [70, 1, 3]], ids=["tokens", "prompts"])
def test_the_twin_of_mamba_2_equals_the_functions_of_transformers(lengths: list[int]) -> None:
    torch.manual_seed(3)
    heads, head_dim, groups, size = 4, 8, 2, 12
    sequences = packed(lengths, [4, 1, 0])
    inputs, states = state_space_heads(sum(lengths), heads, head_dim, groups, size, torch.float32), None
    states = random_states(heads, head_dim, size)
    before, start, rate = states.clone(), 0, -inputs.log_rate.exp()
    found = twin.state_space(inputs, states, sequences)
    for length, slot in zip(lengths, sequences.slots.tolist(), strict=True):
        rows, state = slice(start, start + length), before[slot : slot + 1]
        x, b, c = torch.split(inputs.xbc[rows], [heads * head_dim, groups * size, groups * size], dim=1)
        x, b, c = (part.view(length, count, -1) for part, count in ((x, heads), (b, groups), (c, groups)))
        if length == 1:
            step, bias, skip = (
                part[..., None].expand(*part.shape, head_dim)
                for part in (inputs.step[rows], inputs.step_bias, inputs.skip)
            )
            wide = rate[:, None, None].expand(-1, head_dim, size)
            expected = mamba2_selective_state_update(state, x, step, wide, b, c, skip, dt_bias=bias, dt_softplus=True)
        else:
            expected, state = mamba2_chunk_scan(
                x[None],
                inputs.step[rows][None],
                rate,
                b[None],
                c[None],
                chunk_size=16,
                D=inputs.skip,
                dt_bias=inputs.step_bias,
                dt_softplus=True,
                dt_limit=inputs.step_limits,
                initial_states=state,
                return_final_states=True,
            )
            expected = expected[0]
        check(found[rows], expected)
        check(states[slot], state[0])
        start += length


def test_the_twin_of_mamba_1_equals_the_function_of_transformers() -> None:
    torch.manual_seed(4)
    inputs, states = scan_channels(9, 20, 5, torch.float32), torch.zeros(NUM_SLOTS, 20, 5)
    found = twin.selective_scan(inputs, states, packed([9], [1]))
    parts = (part.T[None] for part in (inputs.x, inputs.step))
    expected, state = mamba_selective_scan(
        *parts,
        -inputs.log_rate.exp(),
        inputs.b.T[None],
        inputs.c.T[None],
        D=inputs.skip,
        z=inputs.gate.T[None],
        delta_softplus=True,
        return_last_state=True,
    )
    check(found, expected[0].T)
    check(states[1], state[0])
