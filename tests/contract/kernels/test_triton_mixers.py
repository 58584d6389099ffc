"""The kernels of token mixers against their plain-torch twins, and the twins against transformers' functions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from baton_serve.engine.kernels import LatentRows, Norm
from baton_serve.engine.kernels.reference import mixers as twin
from baton_serve.engine.kernels.triton import mixers
from tests.contract.kernels.mixer_batches import (
    NUM_SLOTS,
    PADDING,
    channel_delta_heads,
    delta_heads,
    draw,
    lightning_heads,
    packed,
    random_states,
)
from tests.contract.kernels.triton_batches import DEVICE

SINGLE = ([1, 1, 1, 1], [4, PADDING, 0, 3])
PROMPTS = ([70, 1, 3, 130, 64], [2, 5, 0, 1, 4])
STEPS = pytest.mark.parametrize("step", [SINGLE, PROMPTS], ids=["tokens", "prompts"])
# The interpreter multiplies the bits of bfloat16 as integers.
SHORT = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, SHORT], ids=str)


def check(found: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Check equality as far as rounding allows."""
    tolerance = factor * 2e-4 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@STEPS
@DTYPES
@pytest.mark.parametrize(("has_bias", "has_silu", "channels", "taps"), [(False, True, 300, 4), (True, False, 40, 3)])
def test_the_convolution_equals_its_twin(
    step: tuple[list[int], list[int]], dtype: torch.dtype, has_bias: bool, has_silu: bool, channels: int, taps: int
) -> None:
    torch.manual_seed(1)
    sequences = packed(*step)
    x = draw(sum(step[0]), channels + 8, dtype=dtype)[:, :channels]
    weight, bias = draw(channels, taps, dtype=dtype), draw(channels, dtype=dtype) if has_bias else None
    states = random_states(channels, taps, dtype=dtype)
    expected_states = states.clone()
    expected = twin.convolve(x, weight, bias, expected_states, sequences, has_silu=has_silu)
    check(mixers.convolve(x, weight, bias, states, sequences, has_silu=has_silu), expected)
    assert torch.equal(states, expected_states)


@STEPS
@DTYPES
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_size", "value_size"), [(1, 2, 16, 24), (2, 2, 20, 72), (1, 2, 128, 128)]
)
def test_the_delta_rule_equals_its_twin(
    step: tuple[list[int], list[int]], dtype: torch.dtype, key_heads: int, heads: int, key_size: int, value_size: int
) -> None:
    torch.manual_seed(2)
    sequences = packed(*step)
    inputs = delta_heads(sum(step[0]), key_heads, heads, key_size, value_size, dtype)
    states = random_states(heads, key_size, value_size)
    expected_states = states.clone()
    expected = twin.delta_rule(inputs, expected_states, sequences)
    check(mixers.delta_rule(inputs, states, sequences), expected)
    check(states.to(dtype), expected_states.to(dtype))
    unused = [slot for slot in range(NUM_SLOTS) if slot not in step[1]]
    assert torch.equal(states[unused], expected_states[unused])


@DTYPES
def test_equal_keys_that_nothing_decays_do_not_enlarge_errors(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    sequences = packed([70], [1])
    inputs = delta_heads(70, 1, 2, 16, 24, dtype)
    # The numbers of a chunk's system are largest where one token is repeated.
    same = replace(inputs, qkv=inputs.qkv[:1].repeat(70, 1), beta=inputs.beta + 4.0, step=inputs.step - 12.0)
    states = random_states(2, 16, 24)
    expected_states = states.clone()
    expected = twin.delta_rule(same, expected_states, sequences)
    check(mixers.delta_rule(same, states, sequences), expected)
    check(states.to(dtype), expected_states.to(dtype))


@STEPS
@DTYPES
@pytest.mark.parametrize(("heads", "key_size", "value_size"), [(2, 20, 72), (1, 128, 128)])
def test_the_delta_rule_by_channel_equals_its_twin(
    step: tuple[list[int], list[int]], dtype: torch.dtype, heads: int, key_size: int, value_size: int
) -> None:
    torch.manual_seed(6)
    sequences = packed(*step)
    inputs = channel_delta_heads(sum(step[0]), heads, key_size, value_size, dtype)
    states = random_states(heads, key_size, value_size)
    expected_states = states.clone()
    expected = twin.channel_delta_rule(inputs, expected_states, sequences)
    check(mixers.channel_delta_rule(inputs, states, sequences), expected)
    check(states.to(dtype), expected_states.to(dtype))
    unused = [slot for slot in range(NUM_SLOTS) if slot not in step[1]]
    assert torch.equal(states[unused], expected_states[unused])


@DTYPES
@pytest.mark.parametrize("steep", [[], [20], [0, 15, 16, 69]], ids=["gentle", "one steep", "several steep"])
def test_decays_whose_reciprocals_are_too_large_equal_the_twin(dtype: torch.dtype, steep: list[int]) -> None:
    """The other tokens forget little, so that what is before a steep token of a block matters to those behind it."""
    torch.manual_seed(9)
    heads, size = 2, 32
    sequences = packed([70, 1, 40], [4, 0, 2])
    inputs = channel_delta_heads(111, heads, size, size, dtype)
    decay = -(draw(111, heads, size) - 2.0).exp()
    decay[steep, :, ::2] = -300.0
    inputs = replace(inputs, decay=decay)
    states = random_states(heads, size, size)
    expected_states = states.clone()
    expected = twin.channel_delta_rule(inputs, expected_states, sequences)
    found = mixers.channel_delta_rule(inputs, states, sequences)
    assert found.isfinite().all()
    check(found, expected)
    check(states.to(dtype), expected_states.to(dtype))


@STEPS
@DTYPES
@pytest.mark.parametrize(("heads", "size"), [(3, 20), (2, 128)])
def test_lightning_attention_equals_its_twin(
    step: tuple[list[int], list[int]], dtype: torch.dtype, heads: int, size: int
) -> None:
    torch.manual_seed(7)
    sequences = packed(*step)
    inputs, states = lightning_heads(sum(step[0]), heads, size, dtype), random_states(heads, size, size)
    expected_states = states.clone()
    expected = twin.lightning(inputs, expected_states, sequences)
    check(mixers.lightning(inputs, states, sequences), expected)
    check(states.to(dtype), expected_states.to(dtype))
    unused = [slot for slot in range(NUM_SLOTS) if slot not in step[1]]
    assert torch.equal(states[unused], expected_states[unused])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [70, 1, 3]], ids=["tokens", "prompts"])
def test_the_twin_by_channel_equals_the_function_of_transformers(lengths: list[int]) -> None:
    torch.manual_seed(8)
    heads, key_size, value_size = 2, 16, 24
    sequences = packed(lengths, [4, 1, 0])
    inputs = channel_delta_heads(sum(lengths), heads, key_size, value_size, torch.float32)
    states, start = random_states(heads, key_size, value_size), 0
    before, keys = states.clone(), heads * key_size
    found = twin.channel_delta_rule(inputs, states, sequences)
    for length, slot in zip(lengths, sequences.slots.tolist(), strict=True):
        rows = slice(start, start + length)
        parts = torch.split(inputs.qkv[rows], [keys, keys, heads * value_size], dim=1)
        output, state = kimi.recurrent_kimi_delta_attention(
            *(part.reshape(1, length, heads, -1) for part in parts),
            g=inputs.decay[rows][None],
            beta=inputs.beta[rows].sigmoid()[None],
            initial_state=before[slot : slot + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        check(found[rows], output[0])
        check(states[slot], state[0])
        start += length


def test_the_twin_of_lightning_attention_is_linear_attention_that_forgets() -> None:
    torch.manual_seed(9)
    inputs, states = lightning_heads(70, 2, 12, torch.float32), random_states(2, 12, 12)
    state, found = states[3].clone(), twin.lightning(inputs, states, packed([70], [3]))
    for token in range(70):
        query, key, value = inputs.qkv[token].view(2, 3, 12).unbind(1)
        state = state * torch.exp(-inputs.rate)[:, None, None] + key[:, :, None] * value[:, None]
        check(found[token], (query[:, None] @ state)[:, 0])
    check(states[3], state)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [70, 1, 3]], ids=["tokens", "prompts"])
def test_the_twins_equal_the_functions_of_transformers(lengths: list[int]) -> None:
    torch.manual_seed(3)
    sequences = packed(lengths, [4, 1, 0])
    inputs = delta_heads(sum(lengths), 2, 4, 16, 24, torch.float32)
    weight, conv_states = draw(inputs.qkv.shape[1], 4), random_states(inputs.qkv.shape[1], 4)
    states = random_states(4, 16, 24)
    before, start = (states.clone(), conv_states.clone()), 0
    found = twin.delta_rule(inputs, states, sequences)
    convolved = twin.convolve(inputs.qkv, weight, None, conv_states, sequences, has_silu=True)
    for length, slot in zip(lengths, sequences.slots.tolist(), strict=True):
        rows = slice(start, start + length)
        conv_state = before[1][slot : slot + 1]
        expected = qwen3_next.causal_conv1d_update(inputs.qkv[rows].T[None], conv_state, weight, None, "silu")
        check(convolved[rows], expected[0].T)
        check(conv_states[slot], conv_state[0])
        query, key, value = torch.split(inputs.qkv[rows], [32, 32, 96], dim=1)
        decay = -inputs.log_rate.exp() * functional.softplus(inputs.step[rows] + inputs.step_bias)
        output, state = qwen3_next.torch_recurrent_gated_delta_rule(
            query.reshape(1, length, 2, 16),
            key.reshape(1, length, 2, 16),
            value.reshape(1, length, 4, 24),
            g=decay[None],
            beta=inputs.beta[rows].sigmoid()[None],
            initial_state=before[0][slot : slot + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        check(found[rows], output[0])
        check(states[slot], state[0])
        start += length


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_gates_equal_their_twins(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x, gate = draw(num_tokens, 3, 24, dtype=dtype), draw(num_tokens, 100, dtype=dtype)[:, 8:80].view(num_tokens, 3, 24)
    norm = Norm(draw(24, dtype=dtype), 1e-6)
    check(mixers.gated_norm(x, gate, norm), twin.gated_norm(x, gate, norm))
    rows, gates = x.flatten(1), draw(num_tokens, 100, dtype=dtype)[:, 8:80]
    check(mixers.sigmoid_gate(rows, gates), twin.sigmoid_gate(rows, gates))


@DTYPES
@pytest.mark.parametrize(("is_interleaved", "keeps_order"), [(True, True), (True, False), (False, False)])
def test_rows_of_latents_equal_their_twin(dtype: torch.dtype, is_interleaved: bool, keeps_order: bool) -> None:
    torch.manual_seed(5)
    tokens, heads, rank, size, rotary = 5, 11, 40, 12, 16
    angles = draw(tokens, rotary // 2).repeat(1, 2)
    rows = LatentRows(
        draw(tokens, rank + rotary + 3, dtype=dtype)[:, : rank + rotary],
        draw(tokens, heads, size + rotary, dtype=dtype),
        Norm(draw(rank, dtype=dtype), 1e-6),
        (angles.cos(), angles.sin()),
        is_interleaved,
        keeps_order,
    )
    query = torch.zeros(tokens, heads, rank + rotary, dtype=dtype, device=DEVICE)
    expected_query = query.clone()
    check(mixers.latent_rows(rows, query), twin.latent_rows(rows, expected_query))
    check(query, expected_query)
