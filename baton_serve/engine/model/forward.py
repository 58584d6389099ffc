"""From a step's inputs to logits: through transformers' own forward, or through fused layers where they fit."""

from typing import Any, Protocol, cast

from torch import Tensor

from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels import AttentionBackend, LayerKernels
from baton_serve.engine.kernels.cpu.layers import CpuLayers
from baton_serve.engine.model import fused, fused_cpu
from baton_serve.engine.model import fused_lora as fused_adapted
from baton_serve.engine.model.batch_inputs import StepInputs, embedded
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.lora.products import adapt_modules
from baton_serve.engine.model.lora.store import AdapterStore
from baton_serve.engine.model.paged_attention import PagedAttention, StepHolder
from baton_serve.engine.model.quantized.experts import QuantizedExperts
from baton_serve.engine.model.quantized.modules import install


class LogitParts(Protocol):
    """Logits of which each rank has some columns. All ranks call alike."""

    vocab_size: int
    """Of all ranks together."""

    @property
    def max_rows(self) -> int: ...

    def compute(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        """As `Forward`, but this rank's columns alone."""
        ...

    def largest(self, part: Tensor, out: Tensor) -> None:
        """`out`, int64 [rows]: the argmax of `whole`, or vocab_size of a row with NaN, of at most `max_rows` rows."""
        ...

    def whole(self, part: Tensor) -> Tensor:
        """[rows, vocab_size]."""
        ...


class Forward(Protocol):
    is_capturable: bool
    """A call's work on the device depends on shapes only: a graph may hold it."""

    @property
    def parts(self) -> LogitParts | None:
        """None: logits are whole, or a choice among their parts takes no less than gathering them."""
        ...

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        """`layers` are the KV cache's views; returns logits [num_logits, vocab_size]."""
        ...


class TransformersForward:
    """Any decoder that transformers knows."""

    is_capturable = False
    parts = None

    def __init__(self, model: LoadedModel, backend: AttentionBackend, adapters: AdapterStore | None = None) -> None:
        self._model = model
        self._backend = backend
        self._adapters = adapters
        self._step_adapters = adapt_modules(model.module, adapters) if adapters is not None else None
        self._step = StepHolder(model.module)

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        if self._adapters is not None and self._step_adapters is not None:
            self._step_adapters.rows = self._adapters.rows(inputs.adapters)
        module = self._model.module
        if inputs.images:
            embed = cast(Any, module).get_input_embeddings()
            read: dict[str, Tensor] = {"inputs_embeds": embedded(embed, inputs)[None]}
        else:
            read = {"input_ids": inputs.input_ids[None]}
        output = self._step.run(
            module,
            PagedAttention(self._backend, layers, self._model.specs, inputs.meta, inputs.after_layer),
            **read,
            position_ids=inputs.position_ids[None],
            logits_to_keep=0 if inputs.logit_rows is None else inputs.logit_rows,
        )
        return cast(Tensor, output.logits)[0]


def choose_forward(
    model: LoadedModel,
    backend: AttentionBackend,
    kernels: LayerKernels,
    collectives: Collectives,
    adapters: AdapterStore | None = None,
) -> Forward:
    """Call once: fusing repacks the model's weights in place. `adapters`: is offered the products to which they can be
    added."""
    is_plain = model.is_whole and adapters is None
    if isinstance(kernels, CpuLayers) and is_plain and fused_cpu.fits(model, kernels.library):
        return fused_cpu.CpuForward(model, kernels)
    if fused.fits(model.module):
        if adapters is not None:
            return fused_adapted.AdaptedForward(model, backend, kernels, collectives, adapters)
        return fused.FusedForward(model, backend, kernels, collectives)
    assert model.is_whole, "only fused layers sum over ranks"
    if any(isinstance(part, QuantizedExperts) for part in model.module.modules()):
        raise UnsupportedModelError(f"{model.name}: experts in few bits are served in fused layers only")
    install(model.module, kernels)
    return TransformersForward(model, backend, adapters)
