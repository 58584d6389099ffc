"""Replaces the forward of layers (Mamba, lightning attention, RecurrentGemma) that in transformers cannot continue from
a state with several tokens.

Each function replaces the forward of one class, and was compared with it. `cache` has the states of the sequences, or
nothing for the start of a sequence; all sequences have as many tokens. Projections and norms stay the module's own.
"""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_serve.engine.kernels.reference.state_space import scan

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes


class SequenceStates(Protocol):
    """The methods of transformers' cache by which layers such as Mamba read and store their recurrent states. States
    are [batch, *shape].
    """

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None: ...
    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor: ...
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None: ...
    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor: ...
    def is_recording_past(self, layer_idx: int) -> bool: ...


STATE_CALLS = frozenset({"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"})
"""The methods of transformers' cache by which a mixer reads and stores its states."""


def is_mixer(module: Module) -> bool:
    """Return whether a module of transformers keeps recurrent states, by its class."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and (type(module).__name__ in OWN_FORWARDS or bool(STATE_CALLS & set(code.co_names)))


def number_layers(module: Module) -> None:
    """Set `layer_idx` in the modules of a transformers model that need it but do not get it from transformers, such as
    those of RecurrentGemma and Zamba 2.
    """
    for number, layer in enumerate(getattr(getattr(module, "model", None), "layers", ())):
        if (block := getattr(layer, "temporal_block", None)) is not None:
            block.layer_idx = number
        # Zamba 2 passes the number with each call instead, which the attention interface does not get.
        if (shared := getattr(layer, "shared_transformer", None)) is not None:
            shared.self_attn.layer_idx = number


def convolve(conv: nn.Conv1d, x: Tensor, layer: int, cache: SequenceStates) -> Tensor:
    """Return the causal convolution of each channel of `x`, [batch, channels, length], and update the layer's state in
    `cache`: the last inputs, which precede `x`.
    """
    taps, length = conv.kernel_size[0], x.shape[-1]
    joined = cache.update_conv_state(x, layer, conv_kernel_size=taps)
    missing = max(taps - 1 + length - joined.shape[-1], 0)  # zeros before the start of a sequence
    inputs = functional.pad(joined, (missing, 0))[..., -(taps - 1 + length) :]
    return functional.conv1d(inputs, conv.weight, conv.bias, groups=x.shape[1])


def mamba(module: Module, hidden_states: Tensor, cache: SequenceStates, **_: object) -> Tensor:
    """Compute a Mamba-1 layer for `hidden_states` [batch, length, hidden], and update its states in `cache`. It
    replaces transformers' forward, whose scan of several tokens ignores the earlier state.
    """
    layer = module.layer_idx
    # Jamba and FalconMamba normalize the step, B and C; Mamba does not.
    norms = [getattr(module, name, nn.Identity()) for name in ("dt_layernorm", "b_layernorm", "c_layernorm")]
    state = cache.get_recurrent_state(layer)
    x, gate = module.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
    x = module.act(convolve(module.conv1d, x, layer, cache))
    sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
    dt, b, c = module.x_proj(x.transpose(1, 2)).split(sizes, dim=-1)
    dt, b, c = (norm(part) for norm, part in zip(norms, (dt, b, c), strict=True))
    dt = functional.softplus(module.dt_proj(dt).float()).transpose(1, 2)
    a = -torch.exp(module.A_log.float())
    if state is None:
        state = x.new_zeros(len(x), *a.shape, dtype=torch.float32)
    output, state = scan(x.float(), dt, a, b.float(), c.float(), state)
    cache.update_recurrent_state(state, layer)
    output = (output + x * module.D.float()[:, None]) * functional.silu(gate.float())
    projected: Tensor = module.out_proj(output.transpose(1, 2).to(hidden_states.dtype))
    return projected


def minimax(module: Module, hidden_states: Tensor, cache: SequenceStates, **_: object) -> tuple[Tensor, None]:
    """Compute MiniMax's lightning attention for `hidden_states` [batch, length, hidden], and update its state in
    `cache`. It replaces transformers' forward, which keeps the state in a cache of its own.
    """
    layer, size = module.layer_idx, module.head_dim
    batch, length, _width = hidden_states.shape
    qkv = module.act_fn(module.qkv_proj(hidden_states)).view(batch, length, module.num_attention_heads, 3 * size)
    query, key, value = qkv.transpose(1, 2).split(size, dim=-1)  # [batch, heads, length, size]
    state = cache.get_recurrent_state(layer)
    if state is None:
        state = query.new_zeros(*query.shape[:2], size, size, dtype=torch.float32)
    outputs = []
    for start in range(0, length, module.block_size):
        rows = slice(start, start + module.block_size)
        output, state = _lightning_block(module, query[:, :, rows], key[:, :, rows], value[:, :, rows], state)
        outputs.append(output)
    cache.update_recurrent_state(state, layer)
    joined = torch.cat(outputs, dim=2).transpose(1, 2).flatten(2).to(hidden_states.dtype)
    gate = functional.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(joined)), None


def _lightning_block(module: Module, query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of lightning attention for one block of tokens, and the state after them, both float32
    (https://arxiv.org/abs/2401.04658, algorithm 1). Query, key and value are [batch, heads, length, size].
    """
    query, key, value = query.float(), key.float(), value.float()
    length = query.shape[2]
    scores = query @ key.transpose(-1, -2) * module.diagonal_decay[..., :length, :length]
    output = scores @ value + query * module.query_decay[:, :length] @ state
    added = (key * module.key_decay[:, -length:]).transpose(-1, -2) @ value
    return output, torch.exp(-module.slope_rate * length) * state + added


def recurrent_gemma(
    module: Module, hidden_states: Tensor, cache: SequenceStates, *, position_ids: Tensor, **_: object
) -> tuple[Tensor, None]:
    """Compute a recurrent block of RecurrentGemma (Griffin) for `hidden_states` [batch, length, hidden], and update its
    states in `cache`. It replaces transformers' forward, which keeps the states in the module.
    """
    layer = module.layer_idx
    x = module.linear_x(hidden_states).transpose(1, 2)
    x = convolve(module.conv_1d, x, layer, cache).transpose(1, 2)
    state = cache.get_recurrent_state(layer)
    # None makes the module's one-step form ignore the first input's reset.
    module.rg_lru.recurrent_states = x.new_zeros(len(x), x.shape[2], dtype=torch.float32) if state is None else state
    x = module.rg_lru(x, position_ids)
    cache.update_recurrent_state(module.rg_lru.recurrent_states, layer)
    module.rg_lru.recurrent_states = None
    return module.linear_out(x * module.act_fn(module.linear_y(hidden_states))), None


OWN_FORWARDS: dict[str, Callable[..., Any]] = {
    "FalconMambaMixer": mamba,
    "JambaMambaMixer": mamba,
    "MambaMixer": mamba,
    "MiniMaxLightningAttention": minimax,
    "RecurrentGemmaRecurrentBlock": recurrent_gemma,
}
"""By the name of the module's class: a function of the module, the hidden states, the cache and other arguments."""
