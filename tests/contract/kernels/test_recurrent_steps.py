"""The C++ steps of recurrent layers, against transformers' functions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.bamba.modeling_bamba import causal_conv1d_update, mamba2_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.recurrent import CpuRecurrentSteps, SlotState, time_steps

NUM_SLOTS = 6
SLOTS = torch.tensor([4, 0, 3])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def steps() -> CpuRecurrentSteps:
    try:
        return CpuRecurrentSteps(load_kernels())
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


def slots_of(*shape: int, dtype: torch.dtype = torch.float32) -> SlotState:
    """Return random states in rows that are longer than the states, as in `StateMemory`."""
    size = torch.Size(shape).numel()
    rows = torch.randn(NUM_SLOTS, size + 64).to(dtype)
    return SlotState(rows[:, :size].view(NUM_SLOTS, *shape), SLOTS)


def check(
    state: SlotState, run: Callable[[], Tensor | None], expect: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Check output and states of a step. `expect` gets the old states, and returns the output and the new states."""
    before = state.states.clone()
    expected, states = expect(state.load())
    output = run()
    assert output is not None
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[output.dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    torch.testing.assert_close(state.load(), states, rtol=tolerance, atol=tolerance)
    others = [slot for slot in range(NUM_SLOTS) if slot not in SLOTS.tolist()]
    assert torch.equal(state.states[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_size", "value_size"), [(2, 4, 16, 24), (1, 1, 128, 128), (3, 3, 20, 72)]
)
@pytest.mark.parametrize("has_channel_decay", [False, True])
def test_the_delta_rule_equals_that_of_transformers(
    steps: CpuRecurrentSteps,
    dtype: torch.dtype,
    key_heads: int,
    heads: int,
    key_size: int,
    value_size: int,
    has_channel_decay: bool,
) -> None:
    torch.manual_seed(1)
    key_heads = heads if has_channel_decay else key_heads
    query, key = torch.randn(2, 3, 1, key_heads, key_size).to(dtype)
    value = torch.randn(3, 1, heads, value_size).to(dtype)
    decay = -torch.rand(3, 1, heads, key_size) if has_channel_decay else -torch.rand(3, 1, heads)
    beta = torch.rand(3, 1, heads).to(dtype)
    state = slots_of(heads, key_size, value_size)
    function = recurrent_kimi_delta_attention if has_channel_decay else torch_recurrent_gated_delta_rule

    def expect(states: Tensor) -> tuple[Tensor, Tensor]:
        given = {"initial_state": states, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        output, new = function(query, key, value, g=decay, beta=beta, **given)
        return output[:, 0], new

    parts = query[:, 0], key[:, 0], value[:, 0], decay[:, 0], beta[:, 0]
    check(state, lambda: steps.delta_rule(*parts, state, True), expect)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("groups", "heads", "head_dim", "state_size"), [(2, 8, 16, 16), (1, 4, 64, 128), (1, 2, 20, 24)]
)
def test_the_state_space_step_equals_that_of_transformers(
    steps: CpuRecurrentSteps, dtype: torch.dtype, groups: int, heads: int, head_dim: int, state_size: int
) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, heads, head_dim).to(dtype)
    dt, bias = torch.randn(3, heads).to(dtype), torch.randn(heads).to(dtype)
    b, c = torch.randn(2, 3, groups, state_size).to(dtype)
    a, d = -torch.rand(heads), torch.randn(heads).to(dtype)
    state = slots_of(heads, head_dim, state_size)

    def expect(states: Tensor) -> tuple[Tensor, Tensor]:
        wide = [one[..., None].expand(*one.shape, head_dim) for one in (dt, d, bias)]
        a_wide = a[:, None, None].expand(-1, head_dim, state_size)
        output = mamba2_selective_state_update(
            states, x, wide[0], a_wide, b, c, wide[1], dt_bias=wide[2], dt_softplus=True
        )
        return output, states

    check(state, lambda: steps.state_space(x, time_steps(dt, bias), a, b, c, d, state), expect)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_channels", "taps"), [(40, 4), (64, 3), (9, 7)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_convolution_equals_that_of_transformers(
    steps: CpuRecurrentSteps, dtype: torch.dtype, num_channels: int, taps: int, activation: str | None
) -> None:
    torch.manual_seed(3)
    x = torch.randn(3, num_channels).to(dtype)
    weight = torch.randn(num_channels, taps).to(dtype)
    bias = None if activation is None else torch.randn(num_channels).to(dtype)
    state = slots_of(num_channels, taps, dtype=dtype)

    def expect(states: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv1d_update(x[..., None], states, weight, bias, activation)[..., 0], states

    check(state, lambda: steps.convolution(x, weight, bias, state, has_silu=activation is not None), expect)


def test_states_of_another_type_are_left_to_transformers(steps: CpuRecurrentSteps) -> None:
    state = slots_of(8, 4, dtype=torch.bfloat16)
    before = state.states.clone()
    assert steps.convolution(torch.randn(3, 8), torch.randn(8, 4), None, state, has_silu=True) is None
    assert torch.equal(state.states, before)
