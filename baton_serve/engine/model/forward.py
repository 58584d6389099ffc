"""Chooses the forward pass of a model: fused layers, one C++ call (CPU), or transformers' modules, which it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.collectives.backends import Collectives, SingleRank
from baton_serve.engine.errors import ConfigError, UnsupportedModelError
from baton_serve.engine.kernels import AttentionBackend, AttentionMetadata, LayerKernels, MixerKernels
from baton_serve.engine.kernels.cpu.layers import CpuLayers
from baton_serve.engine.kernels.cpu.linear import has_packed_linear
from baton_serve.engine.kernels.cpu.recurrent import CpuRecurrentSteps
from baton_serve.engine.kernels.reference import mixers as twin_mixers
from baton_serve.engine.model import fused_cpu, fused_forward, fused_layers
from baton_serve.engine.model import fused_lora as fused_adapted
from baton_serve.engine.model.batch_inputs import StepInputs, add_image_features, embedded
from baton_serve.engine.model.chunked_attention import chunked_batch
from baton_serve.engine.model.families import describe
from baton_serve.engine.model.fused_mixers import MixerTools, has_mixers
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.lora.products import adapt_modules
from baton_serve.engine.model.lora.slots import AdapterSlots
from baton_serve.engine.model.lora.store import AdapterStore
from baton_serve.engine.model.mixture_of_experts import install_experts, stays_on_device
from baton_serve.engine.model.packed_modules import pack_modules
from baton_serve.engine.model.paged_attention import CachePlace, Mixer, PagedAttention, StepHolder
from baton_serve.engine.model.pipeline_stage import StagedModule, own_layers
from baton_serve.engine.model.quantized.experts import QuantizedExperts
from baton_serve.engine.model.quantized.modules import install
from baton_serve.engine.model.rank_parts import sum_outputs
from baton_serve.engine.model.recurrent import PackedMixers, install_packed, install_steps
from baton_serve.engine.model.speech.decoder import CrossAttentionForward
from baton_serve.engine.model.weight_offload import WeightOffload
from baton_serve.engine.model_folder import HfConfig


class LogitParts(Protocol):
    """The interface of models in which each tensor-parallel rank computes some columns of the logits. All ranks must
    make the same calls.
    """

    vocab_size: int
    """Size of the vocabulary, over all ranks."""

    @property
    def max_rows(self) -> int: ...

    def compute(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        """Compute a step and return this rank's columns of its logits, [num_logits, columns]. `layers` are the layers'
        views of the KV cache.
        """
        ...

    def largest(self, part: Tensor, out: Tensor) -> None:
        """Write to `out`, int64 [rows], the token with the largest logit of each row over all ranks; vocab_size for a
        row with NaN. `part` are this rank's columns of the logits, with at most `max_rows` rows.
        """
        ...

    def whole(self, part: Tensor) -> Tensor:
        """Gather the columns of all ranks, and return logits [rows, vocab_size]. `part` are this rank's columns."""
        ...


class Forward(Protocol):
    """Computes a model's forward pass for one step."""

    is_capturable: bool
    """True if the work depends on shapes only, so that it can be captured in a graph."""

    @property
    def parts(self) -> LogitParts | None:
        """The interface for logits that are divided over ranks; None if each rank computes all columns, or if gathering
        all logits is not slower than exchanging the largest ones.
        """
        ...

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        """The device memory of the LoRA adapters that `StepInputs.slot_rows` refers to; None if this forward ignores
        `slot_rows`.
        """
        ...

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        """Compute logits [num_logits, vocab_size]. `layers` are the KV cache's views, one for each layer."""
        ...


def _cache_places(model: LoadedModel) -> dict[int, CachePlace]:
    """Return which layer of the KV cache each attention layer reads, and its attention rules, by the layer's number in
    the model.
    """
    kv_layers = model.attending_layers
    config = cast(Any, model.module).config
    # Gemma 4: tokens of an image see each other in layers with a window alone.
    is_mixed = getattr(config, "use_bidirectional_attention", None) == "vision"
    places = {
        layer: CachePlace(number, spec, is_causal=is_mixed and spec.sliding_window is None)
        for number, (layer, spec) in enumerate(zip(kv_layers, model.specs, strict=True))
    }
    for shared in model.shared_layers:
        is_causal = is_mixed and shared.spec.sliding_window is None
        places[shared.layer] = CachePlace(
            places[shared.source].number, shared.spec, is_shared=True, is_causal=is_causal
        )
    return places


class TransformersForward:
    """Implements `Forward` by a transformers model whose attention layers use the paged KV cache."""

    parts = None
    adapter_slots = None

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        adapters: AdapterStore | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        """Prepare the model's modules. Linear layers add the LoRA adapters of `adapters`; None: none. With several
        ranks, `collectives` sum the outputs of divided linear layers; None for a single rank.
        """
        self._model = model
        self.is_capturable = adapters is None and _has_device_work_only(model)
        self._collectives = SingleRank() if collectives is None else collectives
        head = getattr(model.module, "lm_head", None)
        self._is_head_whole = model.is_whole or getattr(head, "out_features", model.vocab_size) == model.vocab_size
        self._backend = backend
        self._adapters = adapters
        self._step_adapters = adapt_modules(model.module, adapters) if adapters is not None else None
        self._step = StepHolder(model.module)
        # After it: the layers read the holder that was made last.
        self._staged = None if model.stage.is_whole else StagedModule(model.module, model.stage)
        self._places = _cache_places(model)
        sum_outputs(model.module, model.parts, self._collectives)
        self._chunk = next((spec.chunk for spec in model.specs if spec.chunk is not None), None)

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        if self._adapters is not None and self._step_adapters is not None:
            self._step_adapters.rows = self._adapters.rows(inputs.adapters)
        with _added_features(self._model.module, inputs):
            output = self._step.run(
                self._model.module,
                self._attention(inputs, layers),
                **self._read(inputs),
                position_ids=_position_ids(inputs),
                # transformers reads 0 as all rows
                logits_to_keep=0 if inputs.logit_rows is None else inputs.logit_rows,
            )
        return self._whole(cast(Tensor, output.logits)[0])

    def run_stage(self, inputs: StepInputs, layers: list[Tensor], received: Tensor | None) -> Tensor:
        """Compute this pipeline stage's layers, and return the activations for the next stage, or from the last stage
        the input of the head; see `StagePart.run_stage`.
        """
        assert self._staged is not None
        read = self._read(inputs) if received is None else {}
        hidden = self._staged.run(self._attention(inputs, layers), _position_ids(inputs), received, read)
        is_end = self._model.stage.is_last and inputs.logit_rows is not None
        return hidden[inputs.logit_rows] if is_end else hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """Return the logits for `hidden`, the rows that the last pipeline stage has sent. It is for ranks of the first
        stage, which have the head.
        """
        assert self._staged is not None
        return self._whole(self._staged.head(hidden))

    def _read(self, inputs: StepInputs) -> dict[str, Tensor]:
        """Return the input of the transformers model as a keyword argument: the step's token ids, or embeddings if it
        has images.
        """
        if not inputs.images and inputs.static_images is None:
            return {"input_ids": inputs.input_ids[None]}
        # Embeddings of images replace those of their placeholder tokens, so the model gets embeddings and no tokens.
        module = cast(Any, self._model.module)
        found = {"inputs_embeds": embedded(module.get_input_embeddings(), inputs)[None]}
        if getattr(module.config, "hidden_size_per_layer_input", 0):
            found["per_layer_inputs"] = module.model.get_per_layer_inputs(_padded(inputs, module.config)[None])
        return found

    def _attention(self, inputs: StepInputs, layers: list[Tensor]) -> PagedAttention:
        """Return the object by which the model's layers read and write the KV cache in this step. `layers` are the
        layers' views of the cache.
        """
        return PagedAttention(
            self._backend,
            layers,
            self._places,
            inputs.meta,
            self._chunked(inputs, layers),
            inputs.position_ids,
            inputs.after_layer,
            _mixers(inputs),
            inputs.layer_metas,
        )

    def _whole(self, logits: Tensor) -> Tensor:
        """Return logits with the columns of all ranks, of which `logits` has this rank's; `logits` itself if it has all
        columns.
        """
        return logits if self._is_head_whole else self._collectives.gather_columns(logits)

    def _chunked(self, inputs: StepInputs, layers: list[Tensor]) -> AttentionMetadata:
        """Return the attention metadata for layers with chunked attention; for models without such layers, the step's
        own metadata.
        """
        return inputs.meta if self._chunk is None else chunked_batch(inputs, self._chunk, layers[0].shape[3])


def _has_device_work_only(model: LoadedModel) -> bool:
    """Return whether no module of a transformers model reads values back from the device, so that graphs can capture
    its steps. It is known of models whose layers with recurrent states all have a packed form, with experts that
    kernels or torch's grouped products compute.
    """
    parts = list(model.module.modules())
    mixers = [mixer for part in parts if isinstance(mixer := getattr(part, "baton_mixer", None), Mixer)]
    is_alone = model.is_whole and model.stage.is_whole and model.offload is None
    experts = [part for part in parts if "Experts" in type(part).__name__]
    are_packed = bool(mixers) and all(mixer.packed is not None for mixer in mixers)
    return are_packed and is_alone and all(map(stays_on_device, experts))


def _mixers(inputs: StepInputs) -> PackedMixers | None:
    """Return the object that runs layers with recurrent states in this step; None for models without them."""
    if inputs.states is None:
        return None
    return PackedMixers(inputs.states, inputs.states.sequences(inputs.meta))


def _padded(inputs: StepInputs, config: HfConfig) -> Tensor:
    """Return the step's token ids with padding in the place of image tokens, int64 [num_tokens]: of these, layers read
    the embedding of the padding token (Gemma 4).
    """
    found = inputs.input_ids.clone()
    for image in inputs.images:
        found[image.where] = config.pad_token_id or 0
    return found


def _position_ids(inputs: StepInputs) -> Tensor:
    """Return the positions of the step's tokens in the shape that transformers expects: [1, num_tokens], or [3, 1,
    num_tokens] with M-RoPE.
    """
    positions = inputs.position_ids
    return positions[None] if positions.dim() == 1 else positions[:, None]


@contextmanager
def _added_features(module: nn.Module, inputs: StepInputs) -> Iterator[None]:
    """Make a transformers model's layers add the image features of this step to their outputs (DeepStack) while the
    context is open. Do nothing if the images have no such features.
    """
    static = () if inputs.static_images is None else (inputs.static_images,)
    widest = max((image.features.shape[1] for image in (*inputs.images, *static)), default=0)
    num_layers = widest // cast(Any, module).config.get_text_config().hidden_size - 1
    if num_layers < 1:
        yield
        return

    def add(layer: int, _: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        add_image_features(hidden[0], inputs, layer)

    layers = cast(Any, module).model.layers[:num_layers]
    hooks = [layer.register_forward_hook(partial(add, number)) for number, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _keeps_modules(model: LoadedModel, kernels: LayerKernels) -> bool:
    """Return whether a model with linear or latent attention runs on transformers' layers, not on fused ones: if it is
    divided over ranks, or if it has experts and the CPU has packed products, which fused experts do not use.
    """
    family = describe(model.module)
    if family is None or not has_mixers(model.module, family):
        return False
    is_packed = isinstance(kernels, CpuLayers) and model.dtype == torch.bfloat16 and has_packed_linear(kernels.library)
    layers = own_layers(cast(Any, model.module).model.layers)
    has_experts = any(hasattr(getattr(layer, family.mlp), "experts") for layer in layers)
    return not model.is_whole or (is_packed and has_experts)


def _hold_layers(module: nn.Module, offload: WeightOffload, kernels: LayerKernels) -> None:
    """Move the layers of `offload` to host memory, and make transformers' modules fetch them when they run."""
    layers = own_layers(cast(Any, module).model.layers)
    for number, layer in enumerate(layers):
        if number in offload:
            offload.to_device(layer)
            install(layer, kernels)
            offload.hold(number, (layer,), (kernels,))
    offload.add_hooks(layers)


def choose_forward(
    model: LoadedModel,
    backend: AttentionBackend,
    kernels: LayerKernels,
    collectives: Collectives,
    adapters: AdapterStore | None = None,
    *,
    mixers: MixerKernels = twin_mixers,
    may_call_once: bool = True,
) -> Forward:
    """Return the fastest `Forward` that supports the model; for one stage of a pipeline it implements `StagePart`.
    `may_call_once` says that one C++ call that computes all layers gives right results on this machine.

    Call it once: fusing repacks the weights in place. The linear layers that LoRA adapters may change are registered in
    `adapters`. Raises `UnsupportedModelError` for quantized experts that fused layers do not support.
    """
    if model.source_tokens:
        if adapters is not None:
            raise ConfigError(
                f"{model.name} has cross-attention, which LoRA adapters do not support: leave out enable_lora"
            )
        return CrossAttentionForward(model, backend, collectives)
    is_plain = model.is_whole and model.stage.is_whole and adapters is None and may_call_once and model.offload is None
    if isinstance(kernels, CpuLayers) and is_plain and fused_cpu.fits(model, kernels.library):
        return fused_cpu.CpuForward(model, kernels, MixerTools(kernels, mixers, backend))
    if adapters is not None and fused_adapted.fits(model.module):
        return fused_adapted.AdaptedForward(model, backend, kernels, collectives, adapters)
    if adapters is None and fused_layers.fits(model.module) and not _keeps_modules(model, kernels):
        return fused_forward.FusedForward(model, backend, kernels, collectives, mixers)
    if any(isinstance(part, QuantizedExperts) for part in model.module.modules()):
        raise UnsupportedModelError(
            f"{model.name}: quantized experts are supported only with fused layers, which do not support this model"
        )
    if model.offload is not None:
        _hold_layers(model.module, model.offload, kernels)
    install(model.module, kernels)
    if isinstance(kernels, CpuLayers):
        pack_modules(model.module, model.dtype, kernels.library)
        install_steps(model.module, CpuRecurrentSteps(kernels.library))
    else:
        install_packed(model.module, mixers)
        if model.states and model.is_whole:
            install_experts(model.module, kernels)
    return TransformersForward(model, backend, adapters, collectives)
