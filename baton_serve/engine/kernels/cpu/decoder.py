"""Run a whole decoder with ordinary MLPs as one call of the C++ library, with weights that were packed once at load."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.engine.kernels.cpu.layers import GELU_TANH, KV_CODES, SILU, norm_kind, reads_cache
from baton_serve.engine.kernels.cpu.linear import Matrix, PackedMatrix, as_argument
from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec, Norm
from baton_serve.engine.kernels.mixers import InnerCheckpoints

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_AfterLayer = ctypes.CFUNCTYPE(_INT, _INT)
_NOTHING = _AfterLayer()

MAX_TAPS = 16
"""Taps of a convolution that the C++ library supports at most (src/recurrent.cpp)."""


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The weights and sizes of the gated delta rule of a decoder layer, which is behind a short convolution and before
    a gated norm. Each key head serves `num_heads` / `num_key_heads` value heads.
    """

    convolution: Tensor
    """bf16 [channels, taps]; the channels are queries, keys and values side by side."""
    log_rate: Tensor
    """float32 [num_heads]: the logarithm of the rate of decay."""
    step_bias: Tensor
    """float32 [num_heads]: added to the time steps of the decay."""
    norm: Norm
    """A plain RMSNorm of each head's output, which is multiplied by silu(gate)."""
    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """The weights of latent attention (MLA) in a decoder layer, besides its first and its last product."""

    keys: Matrix
    """The up-projection of the keys, which is applied to each query head: from `key_size` columns to latents."""
    values: Matrix
    """The up-projection of the values of each head, which is applied to its sums of latents."""
    query: Matrix | None
    """The second product of the query; None: it has one only."""
    norm: Norm
    query_norm: Norm | None
    """The norm of what `query` reads; None if that is None."""
    num_heads: int
    key_size: int
    """Size of a query head without the part that rotates."""
    value_size: int
    is_interleaved: bool
    keeps_order: bool
    """Whether pairs that rotate are neighbours, and whether they stay so, as in `LatentRows`."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The packed weights, norms and attention rules of one decoder layer, as the C++ library reads them.

    The outputs of `qkv` are queries, keys and values, then the gate if there is one. With `delta` they are queries,
    keys, values and gate, and then the step sizes and the time steps of the heads. With `latent` they are the query, or
    the input of its second product, then the latent and the part of the key that rotates.
    """

    input_norm: Norm | None
    attention_norm: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    mlp_norm: Norm | None
    mlp_output_norm: Norm | None
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    spec: AttentionSpec | None
    """It is None for layers with the delta rule."""
    rotation: int = 0
    """Its number among the rotations of a step."""
    has_output_gate: bool = False
    """True if the output of attention is multiplied by the sigmoid of a gate."""
    delta: DeltaRule | None = None
    """None: the layer has attention."""
    latent: LatentProjections | None = None
    """None: the layer has no latent attention."""


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """The states that layers with the delta rule have for the sequences of a step, which the step updates in place."""

    slots: Tensor
    """int64 [num_seqs]: each sequence's batch slot."""
    layers: Sequence[tuple[Tensor, Tensor]]
    """By layer with the delta rule, of all batch slots: the inputs of its convolution, bf16 [num_slots, channels,
    taps], and its states, float32 [num_slots, num_heads, key_size, value_size]."""
    checkpoints: InnerCheckpoints | None = None


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """The properties that all layers of a decoder share, such as the activation. All norms are of one kind and have one
    epsilon.
    """

    num_kv_heads: int
    final_norm: Norm
    residual_scale: float = 1.0
    is_gelu: bool = False
    has_no_gate: bool = False
    """True if the MLP applies GELU to all outputs of its first product instead of a gate."""
    is_parallel: bool = False
    is_interleaved: bool = False
    has_wide_norms: bool = False


class _Norm(ctypes.Structure):
    """Mirrors the C struct `NormWeights` of src/decoder.cpp, field by field."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class _Delta(ctypes.Structure):
    """Mirrors the C struct `DeltaLayer` of src/decoder.cpp, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("convolution", "log_rate", "step_bias", "norm", "inputs", "states")),
        *((name, _LONG) for name in ("input_stride", "state_stride")),
        *((name, _INT) for name in ("num_heads", "num_key_heads", "key_size", "value_size", "taps")),
        ("epsilon", _FLOAT),
    )


class _Latent(ctypes.Structure):
    """Mirrors the C struct `LatentLayer` of src/decoder.cpp, field by field."""

    _fields_ = (
        *((name, PackedMatrix) for name in ("keys", "values", "query")),
        *((name, _POINTER) for name in ("norm", "query_norm")),
        *((name, _INT) for name in ("num_heads", "rank", "key_size", "value_size", "is_interleaved", "keeps_order")),
        ("epsilon", _FLOAT),
        ("query_epsilon", _FLOAT),
    )


class _Layer(ctypes.Structure):
    """Mirrors the C struct `DecoderLayer` of src/decoder.cpp, field by field."""

    _fields_ = (
        *((name, PackedMatrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Norm) for name in ("input_norm", "attention_norm", "mlp_norm", "mlp_output_norm")),
        *((name, _Norm) for name in ("query_norm", "key_norm")),
        *((name, _POINTER) for name in ("cache", "sinks", "block_tables", "slots")),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("sliding_window", _INT),
        ("rotation", _INT),
        ("has_output_gate", _INT),
        ("delta", _Delta),
        ("latent", _Latent),
    )


class _Step(ctypes.Structure):
    """Mirrors the C struct `StepArguments` of src/decoder.cpp, field by field."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("head", PackedMatrix),
        ("final_norm", _Norm),
        *((name, _POINTER) for name in ("residual", "normed", "heads", "attended", "gated", "parallel", "convolved")),
        *((name, _POINTER) for name in ("latents", "logits")),
        *((name, _POINTER) for name in ("cos", "sin", "query_starts", "context_lens", "block_tables")),
        *((name, _POINTER) for name in ("slots", "logit_rows", "state_slots", "inner_slots", "inner_tokens")),
        *((name, _POINTER) for name in ("added", "added_rows")),
        *((name, _LONG) for name in ("cache_block_stride", "cache_value_offset")),
        *((name, _LONG) for name in ("cache_head_stride", "cache_token_stride", "table_stride", "rotary_stride")),
        ("rotation_stride", _LONG),
        *((name, _LONG) for name in ("num_tokens", "num_logits", "num_added")),
        *((name, _INT) for name in ("num_layers", "num_seqs", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, _INT) for name in ("block_tokens", "num_threads", "codes")),
        *((name, _INT) for name in ("norm_kind", "activation", "has_no_gate", "is_parallel", "is_interleaved")),
        *((name, _INT) for name in ("num_added_layers", "has_wide_norms", "head_norm_stride")),
        *((name, _FLOAT) for name in ("epsilon", "residual_scale")),
        ("after_layer", _AfterLayer),
    )


class CpuDecoder:
    """Computes all layers of a decoder and its logits by one call of the C++ library. It keeps the weights alive, and
    scratch memory for the longest step so far.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[DecoderLayer],
        head: Matrix,
        rules: DecoderRules,
    ) -> None:
        self._function = library.baton_decoder_step
        self._function.argtypes = [ctypes.POINTER(_Step)]
        self._function.restype = ctypes.c_int
        self._kept = (list(layers), rules, head)
        self._sinks = [_sinks(layer.spec) for layer in layers]
        self._layers = (_Layer * len(layers))(*map(_layer, layers, self._sinks))
        # Views of some elements of the array.
        self._attending = [made for made, layer in zip(self._layers, layers, strict=True) if layer.delta is None]
        self._recurrent = [made for made, layer in zip(self._layers, layers, strict=True) if layer.delta is not None]
        self._scratch: tuple[Tensor, ...] = ()
        self._step = _Step(
            layers=self._layers,
            head=as_argument(head),
            final_norm=_norm(rules.final_norm),
            epsilon=rules.final_norm.eps,
        )
        self._step.num_layers, self._step.num_kv_heads = len(layers), rules.num_kv_heads
        self._set_rules(rules, next((layer.query_norm for layer in layers if layer.delta is None), None))
        self._caches: list[Tensor] | None = None
        self._states: Sequence[tuple[Tensor, Tensor]] | None = None
        self._has_groups = False

    def __call__(
        self,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        caches: list[Tensor],
        meta: AttentionMetadata,
        logit_rows: Tensor | None,
        after_layer: Callable[[int], None] | None = None,
        added: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute a step and return its logits [num_logits, vocabulary] for the tokens `logit_rows` (None: all). Raises
        what `after_layer` raises.

        `residual` holds the embeddings [num_tokens, hidden] and is overwritten. `rotation` is (cos, sin), both float32
        [num_rotations, num_tokens, rotary_dim / 2]; `caches` are the views of the KV cache of the layers with
        attention; `after_layer` is described in `StepInputs`. `added` is (rows, features): int64 [count], and bf16
        [num_layers, count, hidden], which are added to these rows of the outputs of the first layers (DeepStack).
        A model with the delta rule needs `use_states` before.
        """
        step, cos, sin = self._step, rotation[0].contiguous(), rotation[1].contiguous()
        self._point_at(caches)
        self._make_room(len(residual))
        num_logits = len(residual) if logit_rows is None else len(logit_rows)
        logits = torch.empty((num_logits, step.head.outputs), dtype=torch.bfloat16)
        step.residual, step.logits = residual.data_ptr(), logits.data_ptr()
        step.cos, step.sin, step.rotary_stride, step.rotary_dim = (
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(1),
            2 * cos.shape[2],
        )
        step.rotation_stride = cos.stride(0)
        step.query_starts, step.context_lens = meta.query_starts.data_ptr(), meta.context_lens.data_ptr()
        step.block_tables, step.table_stride = meta.block_tables.data_ptr(), meta.block_tables.stride(0)
        step.slots, step.num_seqs = meta.slots.data_ptr(), len(meta.context_lens)
        step.logit_rows = None if logit_rows is None else logit_rows.data_ptr()
        step.num_tokens, step.num_logits = len(residual), num_logits
        step.num_threads = torch.get_num_threads()
        step.num_added_layers = 0
        if added is not None:
            rows, features = added[0].contiguous(), added[1].contiguous()
            step.added_rows, step.added, step.num_added = rows.data_ptr(), features.data_ptr(), len(rows)
            step.num_added_layers = len(features)
        calls = _Calls(after_layer)
        step.after_layer = calls.function
        if self._function(step) != 0:
            raise MemoryError("attention ran out of memory for its scratch space")
        if calls.error is not None:
            raise calls.error
        return logits

    def _set_rules(self, rules: DecoderRules, query_norm: Norm | None) -> None:
        step = self._step
        step.norm_kind, step.residual_scale = norm_kind(rules.final_norm), rules.residual_scale
        step.activation, step.has_no_gate = GELU_TANH if rules.is_gelu else SILU, rules.has_no_gate
        step.is_parallel, step.is_interleaved = rules.is_parallel, rules.is_interleaved
        step.has_wide_norms = rules.has_wide_norms
        # Cohere's norms of heads have weights [num_heads, head_dim].
        has_rows = query_norm is not None and query_norm.weight.dim() == 2
        step.head_norm_stride = query_norm.weight.shape[1] if query_norm is not None and has_rows else 0

    def _point_at(self, caches: list[Tensor]) -> None:
        if caches is self._caches:
            return
        # The pointers of the layers change only with the cache, not with each step.
        self._caches, step = caches, self._step
        assert reads_cache(caches[0], torch.bfloat16)
        for layer, cache in zip(self._attending, caches, strict=True):
            layer.cache = cache.data_ptr()
        strides = caches[0].stride()
        step.cache_block_stride, step.cache_value_offset = strides[0], strides[1]
        step.cache_head_stride, step.cache_token_stride = strides[2], strides[3]
        step.head_dim, step.block_tokens = caches[0].shape[4], caches[0].shape[3]
        step.codes = KV_CODES.get(caches[0].dtype, 0)
        step.num_heads = self._attending[0].output.inputs // step.head_dim

    def use_states(self, states: DeltaStates) -> None:
        """Let layers with the delta rule use these states, which must stay in memory, in the next step."""
        inner = states.checkpoints
        self._step.state_slots = states.slots.data_ptr()
        self._step.inner_slots = None if inner is None else inner.slots.data_ptr()
        self._step.inner_tokens = None if inner is None else inner.tokens.data_ptr()
        if states.layers is self._states:
            return
        self._states = states.layers
        for layer, (inputs, matrices) in zip(self._recurrent, states.layers, strict=True):
            assert inputs[0].is_contiguous() and matrices[0].is_contiguous()
            delta = layer.delta
            delta.inputs, delta.input_stride = inputs.data_ptr(), inputs.stride(0)
            delta.states, delta.state_stride = matrices.data_ptr(), matrices.stride(0)

    def use_groups(self, layer_metas: Sequence[AttentionMetadata] | None) -> None:
        """Let each layer use the blocks of its own cache group in the next step. `layer_metas` has the batch of each
        layer with attention, which must stay in memory; None: all layers use those of the step.
        """
        if layer_metas is None and not self._has_groups:
            return
        self._has_groups = layer_metas is not None
        metas = [None] * len(self._attending) if layer_metas is None else layer_metas
        for layer, meta in zip(self._attending, metas, strict=True):
            assert meta is None or meta.block_tables.is_contiguous()
            layer.block_tables = None if meta is None else meta.block_tables.data_ptr()
            layer.slots = None if meta is None else meta.slots.data_ptr()

    def _make_room(self, num_tokens: int) -> None:
        if self._scratch and len(self._scratch[0]) >= num_tokens:
            return
        layers, step = self._layers, self._step
        hidden = layers[0].qkv.inputs
        widths = (
            hidden,
            max(layer.qkv.outputs for layer in layers),
            max(layer.output.inputs for layer in layers),
            max(layer.down.inputs for layer in layers),
            hidden if step.is_parallel else 0,
            max(layer.qkv.outputs for layer in self._recurrent) if self._recurrent else 0,
            max(_latent_columns(layer.latent, step.head_dim) for layer in layers),
        )
        self._scratch = tuple(torch.empty((num_tokens, width), dtype=torch.bfloat16) for width in widths)
        step.normed, step.heads, step.attended, step.gated, step.parallel, step.convolved, step.latents = (
            part.data_ptr() for part in self._scratch
        )


class _Calls:
    """Wraps the Python function `after_layer` as a C function. An exception cannot pass through C, so it is stored in
    `error`, and the caller raises it after the call.
    """

    def __init__(self, after_layer: Callable[[int], None] | None) -> None:
        self.error: BaseException | None = None
        self._after_layer = after_layer
        self.function = _NOTHING if after_layer is None else _AfterLayer(self._call)

    def _call(self, layer: int) -> int:
        assert self._after_layer is not None
        try:
            self._after_layer(layer)
        except BaseException as error:  # noqa: BLE001 - raised again after the library has returned
            self.error = error
        return self.error is not None


def _layer(layer: DecoderLayer, sinks: Tensor | None) -> _Layer:
    made = _Layer(
        qkv=as_argument(layer.qkv),
        output=as_argument(layer.output),
        gate_up=as_argument(layer.gate_up),
        down=as_argument(layer.down),
        input_norm=_norm(layer.input_norm),
        attention_norm=_norm(layer.attention_norm),
        mlp_norm=_norm(layer.mlp_norm),
        mlp_output_norm=_norm(layer.mlp_output_norm),
        query_norm=_norm(layer.query_norm),
        key_norm=_norm(layer.key_norm),
        sinks=_at(sinks),
        rotation=layer.rotation,
        has_output_gate=layer.has_output_gate,
    )
    if layer.spec is not None:
        made.scale, made.softcap = layer.spec.scale, layer.spec.softcap or 0.0
        made.sliding_window = layer.spec.sliding_window or 0
    if layer.delta is not None:
        made.delta = _delta(layer.delta)
    if layer.latent is not None:
        made.latent = _latent(layer.latent)
    return made


def _delta(rule: DeltaRule) -> _Delta:
    assert rule.convolution.is_contiguous() and norm_kind(rule.norm) == 0
    return _Delta(
        convolution=rule.convolution.data_ptr(),
        log_rate=rule.log_rate.data_ptr(),
        step_bias=rule.step_bias.data_ptr(),
        norm=rule.norm.weight.data_ptr(),
        num_heads=rule.num_heads,
        num_key_heads=rule.num_key_heads,
        key_size=rule.key_size,
        value_size=rule.value_size,
        taps=rule.convolution.shape[1],
        epsilon=rule.norm.eps,
    )


def _latent(own: LatentProjections) -> _Latent:
    assert norm_kind(own.norm) == 0
    made = _Latent(
        keys=as_argument(own.keys),
        values=as_argument(own.values),
        norm=own.norm.weight.data_ptr(),
        num_heads=own.num_heads,
        rank=len(own.norm.weight),
        key_size=own.key_size,
        value_size=own.value_size,
        is_interleaved=own.is_interleaved,
        keeps_order=own.keeps_order,
        epsilon=own.norm.eps,
    )
    if own.query is not None and own.query_norm is not None:
        made.query, made.query_norm = as_argument(own.query), own.query_norm.weight.data_ptr()
        made.query_epsilon = own.query_norm.eps
    return made


def _latent_columns(own: _Latent, width: int) -> int:
    """Return the elements of scratch memory that a layer of latent attention needs for a token, as src/decoder.cpp
    divides it; 0 for other layers. `width` is the size of a row of the KV cache.
    """
    return int(own.num_heads * (own.key_size + 2 * width) + width) if own.num_heads else 0


def _sinks(spec: AttentionSpec | None) -> Tensor | None:
    """Return the attention sinks of a layer, float32 [num_heads]; None if it has none."""
    return None if spec is None or spec.sinks is None else spec.sinks.float().contiguous()


def _norm(norm: Norm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(_at(norm.weight), _at(norm.bias))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
