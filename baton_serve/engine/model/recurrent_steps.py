"""Replaces transformers' functions for one token of Mamba and gated delta layers by C++ kernels that work in the batch
slots.

The modules call these functions by global names of their file, with the states that the cache has returned. A module
gets a second forward for steps of one token: the same code, in which the names stand for functions that accept a
`SlotState`. All families have the same functions; tests compare the kernels with them.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeAlias

from torch import Tensor, nn

from baton_serve.engine.kernels.cpu.recurrent import CpuRecurrentSteps, SlotState, time_steps
from baton_serve.engine.model.mixer_adapters import OWN_FORWARDS

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes
Step: TypeAlias = Callable[..., Any]


def step_forward(part: Module, steps: CpuRecurrentSteps) -> Step | None:
    """Return a forward of a transformers module with recurrent states for one token of each sequence: a copy of its
    own, whose functions that update states are replaced by C++ kernels.

    Return None if some of these functions cannot be replaced.
    """
    function = inspect.unwrap(type(part).forward)
    # A model's own code may have other functions with these names.
    if not function.__module__.startswith("transformers.models."):
        return None
    names = set(function.__code__.co_names)
    replaced = {name: make(function.__globals__[name], steps) for name, make in _STEPS.items() if name in names}
    has_state = "get_recurrent_state" in names
    if type(part).__name__ in OWN_FORWARDS or _CONVOLUTION not in replaced or has_state == (len(replaced) == 1):
        return None
    made = FunctionType(function.__code__, {**function.__globals__, **replaced}, closure=function.__closure__)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return MethodType(made, part)


def _convolution(original: Step, steps: CpuRecurrentSteps) -> Step:
    """Return a replacement for transformers' `causal_conv1d_update` that updates a state in its slot by a C++ kernel,
    or calls `original` for unsupported inputs.
    """

    def step(
        x: Tensor,  # [num_seqs, num_channels, 1]
        conv_state: SlotState,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        activation: str | None = None,
    ) -> Tensor:
        if activation in (None, "silu", "swish"):
            output = steps.convolution(x[..., 0], weight, bias, conv_state, has_silu=activation is not None)
            if output is not None:
                return output[..., None]
        states = conv_state.load()
        result: Tensor = original(x, states, weight, bias, activation)
        conv_state.store(states)
        return result

    return step


def _delta_rule(original: Step, steps: CpuRecurrentSteps) -> Step:
    """Return a replacement for transformers' gated delta rule of one token that updates a state in its slot by a C++
    kernel, or calls `original` for unsupported inputs. Decays may be by head or by channel.
    """

    def step(
        query: Tensor,  # [num_seqs, 1, num_key_heads, key_size]
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        initial_state: SlotState,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: object,
    ) -> tuple[Tensor, SlotState]:
        parts = query[:, 0], key[:, 0], value[:, 0], g[:, 0], beta[:, 0]
        output = steps.delta_rule(*parts, initial_state, use_qk_l2norm_in_kernel)
        if output is not None:
            return output[:, None], initial_state
        result, states = original(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state.load(),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **rest,
        )
        initial_state.store(states)
        return result, initial_state

    return step


def _state_space(original: Step, steps: CpuRecurrentSteps) -> Step:
    """Return a replacement for transformers' `mamba2_selective_state_update` that updates a state in its slot by a C++
    kernel, or calls `original` for unsupported inputs.
    """

    def step(  # noqa: PLR0913 -- transformers' signature
        state: SlotState,
        x: Tensor,  # [num_seqs, num_heads, head_dim]
        dt: Tensor,  # the same, with equal values in a head; so are A, D and the bias without the first dimension
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor,  # noqa: N803
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **rest: object,
    ) -> Tensor:
        if z is None and dt_softplus:
            bias = None if dt_bias is None else dt_bias[:, 0]
            output = steps.state_space(x, time_steps(dt[..., 0], bias), A[:, 0, 0], B, C, D[:, 0], state)
            if output is not None:
                return output
        states = state.load()
        result: Tensor = original(states, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **rest)
        state.store(states)
        return result

    return step


_CONVOLUTION = "causal_conv1d_update"
_STEPS: dict[str, Callable[[Step, CpuRecurrentSteps], Step]] = {
    _CONVOLUTION: _convolution,
    "mamba2_selective_state_update": _state_space,
    "recurrent_kimi_delta_attention": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
}
"""By the name in the module's file: makes the function that takes its place."""
