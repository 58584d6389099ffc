"""Runs the layers of one pipeline-parallel stage; which layers these are, is decided in `collectives/stage_layers.py`.

The first stage has the embedding and the head, so a shared weight is in memory once, and the last stage sends back the
few rows that need logits instead of the logits. Layers of other stages are replaced by `SkippedLayer`, which keeps the
numbers of the others as transformers' models expect them.
"""

import copy
import inspect
from collections.abc import Collection, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.collectives.stage_layers import Stage
from baton_serve.engine.collectives.stage_links import StageLinks
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.model.batch_inputs import StepInputs
from baton_serve.engine.model.paged_attention import AttentionContext, StepHolder


class StageEndError(Exception):
    """Ends a model's forward after the last layer of this pipeline stage. `hidden` is that layer's output. It is not a
    failure.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the last layer of this stage was computed")
        self.hidden = hidden


class SkippedLayer(nn.Module):
    """Stands in a transformers model for a decoder layer that another pipeline stage computes."""

    def __init__(self, replaced: nn.Module, *, is_after: bool) -> None:
        """Copy the plain attributes of the `replaced` layer, which models read. `is_after` says that it comes after the
        layers of this pipeline stage.
        """
        super().__init__()
        self._is_after = is_after
        # Models unpack the results of such layers.
        result = inspect.signature(type(replaced).forward).return_annotation
        self._returns_tuple = "tuple" in str(result).partition("[")[0].lower()
        _copy_plain(replaced, self)

    def forward(
        self, hidden_states: Tensor | tuple[Tensor, None], *_: object, **__: object
    ) -> Tensor | tuple[Tensor, None]:
        """Return the input unchanged. Behind this stage's last layer, raise `StageEndError` with the input instead."""
        # Annotations of transformers may be wrong: then a model passes on the result of another such layer.
        hidden = hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states
        # It is an exception instead of a result, because the model would go on with its last norm, which only the last
        # stage may apply.
        if self._is_after:
            raise StageEndError(hidden)
        return (hidden, None) if self._returns_tuple else hidden


def _copy_plain(source: nn.Module, target: nn.Module) -> None:
    """Copy the plain attributes of a module, such as the type of a layer's attention, which models read, to the module
    that stands in its place.
    """
    for name, value in vars(source).items():
        if isinstance(value, (str, int, float)) and not name.startswith("_") and name != "training":
            setattr(target, name, value)


class SkippedEmbedding(nn.Module):
    """Stands in a transformers model for the embedding or the output head, which only the first pipeline stage has."""

    def forward(self, values: Tensor) -> Tensor:
        return values


class HeadInput:
    """Imitates the output of a transformers model without head, as the code of the head reads it: `last_hidden_state`,
    and None for all other fields.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        """Return None for every other field of a model's output, such as caches."""


class LastHidden(nn.Module):
    """Stands for the decoder of a transformers model while its output head is computed: its output is `hidden`, the
    rows that the last pipeline stage has sent.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.hidden = torch.empty(0)
        # The head of Falcon-H1 reads a factor there.
        _copy_plain(replaced, self)

    @property
    def decoder(self) -> "LastHidden":
        """Return this object itself, since the heads of some models call the decoder within their model."""
        return self

    def forward(self, *_: object, **__: object) -> HeadInput:
        """Return `hidden` in the form of the output of a transformers model, whatever the arguments are."""
        return HeadInput(self.hidden[None])


def layer_list(module: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Return (name, list) of the module list in a transformers model that holds its `num_layers` decoder layers. Raises
    `UnsupportedModelError` if it has none.
    """
    found = [(n, part) for n, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    # The outermost list comes first: a vision tower within the model may have as many layers as the decoder.
    fitting = sorted(((n, part) for n, part in found if len(part) == num_layers), key=lambda entry: entry[0].count("."))
    if not fitting:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no list of its {num_layers} layers, so it cannot be divided into stages: set"
            " pipeline_parallel_size to 1"
        )
    return fitting[0]


def keep_layers(module: nn.Module, stage: Stage) -> list[str]:
    """Replace the layers, embedding and head of a transformers model that other pipeline stages hold by placeholders.
    Return the names of the replaced modules. Raises `UnsupportedModelError` if the model has no list of its layers.
    """
    if stage.is_whole:
        return []
    name, layers = layer_list(module, sum(stage.num_layers))
    dropped = [f"{name}.{i}" for i in range(len(layers)) if i not in stage.layers]
    for number in range(len(layers)):
        if number not in stage.layers:
            layers[number] = SkippedLayer(layers[number], is_after=number >= stage.layers.stop)
    if not stage.is_first:
        whole = cast(Any, module)
        for part in (whole.get_input_embeddings(), whole.get_output_embeddings()):
            full = next((n for n, other in module.named_modules() if other is part), None)
            if full is not None:
                module.set_submodule(full, SkippedEmbedding())
                dropped.append(full)
    return dropped


def is_within(name: str, modules: Collection[str]) -> bool:
    """Return whether `name` names one of `modules`, or a module or tensor inside of one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def own_layers(layers: Sequence[nn.Module]) -> list[Any]:
    """Return the decoder layers of this pipeline stage, without the placeholders for layers of other stages."""
    return [layer for layer in layers if not isinstance(layer, SkippedLayer)]


class StagePart(Protocol):
    """Computes the layers of one pipeline stage, without communication with other stages."""

    is_capturable: bool
    """True if the work depends on shapes only, so that it can be captured in a graph."""

    def run_stage(self, inputs: StepInputs, layers: list[Tensor], received: Tensor | None) -> Tensor:
        """Compute the layers of this stage. Return the activations for the next stage, [num_tokens, hidden], or from
        the last stage the input of the head, [num_logits, hidden]. `received` is what the stage before has returned;
        None on the first stage.
        """
        ...

    def finish(self, hidden: Tensor) -> Tensor:
        """Return the logits for `hidden` [num_logits, hidden], the rows that the last stage has returned. It is for
        ranks of the first stage, which has the head.
        """
        ...


class StagedForward:
    """Implements `Forward` for one pipeline stage: it receives activations from the stage before and sends its own on.
    Its result is not logits; the first stage computes them by `finish`.
    """

    parts = None
    adapter_slots = None

    def __init__(self, part: StagePart, links: StageLinks) -> None:
        self.part, self.links = part, links
        self.is_capturable = part.is_capturable

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        """Receive the step's activations from the stage before, compute this stage's layers, and send the result to the
        next stage. Return the result too.
        """
        received = self.links.receive(len(inputs.input_ids))
        hidden = self.part.run_stage(inputs, layers, received)
        self.links.send(hidden)
        return hidden

    def finish(self, num_rows: int) -> Tensor:
        """Wait for the last stage's rows of the oldest step whose logits are not computed yet, and return its logits
        [num_rows, vocab_size]. It is for ranks of the first stage.
        """
        return self.part.finish(self.links.receive_result(num_rows))

    def discard(self, num_rows: int) -> None:
        """Receive the last stage's rows of a step, as `finish` does, without computing logits."""
        self.links.receive_result(num_rows)


class CapturedStage:
    """Implements `Forward` for the layers of one pipeline stage between a receive and a send, so that `DecodeGraphs`
    and `PromptGraphs` can capture them. Its result is not logits but what the stage sends. `receive` and `send` stay
    outside of graphs.
    """

    parts = None
    adapter_slots = None

    def __init__(self, staged: StagedForward, max_rows: int) -> None:
        """Allocate the memory from which graphs read at most `max_rows` rows of activations of the stage before."""
        self._part, self._links = staged.part, staged.links
        self.is_capturable = staged.is_capturable
        self.is_last = self._links.is_last
        """True on the last stage, whose result has only the rows that need logits."""
        self._received = self._links.received_rows(max_rows)

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        """Compute this stage's layers, and return the activations for the next stage, [num_tokens, hidden], or from the
        last stage the input of the head, [num_logits, hidden].
        """
        # The layers change their input, but a graph may be compared with the same work on the same input.
        received = None if self._received is None else self._received[: len(inputs.input_ids)].clone()
        return self._part.run_stage(inputs, layers, received)

    def receive(self, num_rows: int) -> None:
        """Receive `num_rows` rows of activations from the stage before, for the graph that is replayed next. Do nothing
        on the first stage.
        """
        received = self._links.receive(num_rows)
        if received is not None:
            assert self._received is not None
            self._received[:num_rows] = received

    def send(self, hidden: Tensor) -> None:
        """Send the activations [rows, hidden] that a graph has computed to the next stage, or the first."""
        # A copy, since the next replay may begin before they have been sent.
        self._links.send(hidden.clone())


class StagedModule:
    """Computes the layers of one pipeline stage, and the output head, by transformers' own model code."""

    def __init__(self, module: nn.Module, stage: Stage) -> None:
        """Prepare the transformers model `module`, in which `keep_layers` has replaced what other stages hold. Raises
        `UnsupportedModelError` if its class does not name the part of it without the head.
        """
        self._stage = stage
        # Llama 4 names a part that its text model lacks.
        names = (cast(Any, module).base_model_prefix, "model")
        name = next((one for one in names if one in module._modules), None)
        if name is None:
            raise UnsupportedModelError(
                "its class does not name its decoder (base_model_prefix), so it cannot be divided into stages: set"
                " pipeline_parallel_size to 1"
            )
        self._base = module.get_submodule(name)
        self._steps = StepHolder(self._base)
        self._received: Tensor | None = None
        if not stage.is_first:
            _, layers = layer_list(module, sum(stage.num_layers))
            # Before it, the model may have scaled the embeddings, which are none.
            layers[stage.layers.start].register_forward_pre_hook(self._replace_input, with_kwargs=True)
        # A copy of the model whose layers are replaced, so that its own code computes the head.
        # The copy shares all weights. Its dictionary of modules is its own, so that the original keeps its layers.
        self._head: Any = copy.copy(module)
        self._head._modules = dict(module._modules)
        self._last = LastHidden(self._base)
        self._head._modules[name] = self._last

    def run(
        self, context: AttentionContext, position_ids: Tensor, received: Tensor | None, read: dict[str, Tensor]
    ) -> Tensor:
        """Return the output of this stage's last layer, or on the last stage of the last norm, [num_tokens, hidden].
        `read` is the model's input on the first stage; `received` is the output of the stage before on all others.
        Raises `UnsupportedModelError` if layers pass on more than one tensor.
        """
        if received is not None:
            # The model needs an input for its masks, but may scale it: `_replace_input` gives the layers the original.
            self._received = received[None]
            read = {"inputs_embeds": self._received}
        try:
            output = self._steps.run(self._base, context, position_ids=position_ids, **read)
            hidden = output.last_hidden_state
        except StageEndError as end:
            hidden = end.hidden
        finally:
            self._received = None
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise UnsupportedModelError(
                "its layers pass on more than one row for each token, so it cannot be divided into stages: set"
                " pipeline_parallel_size to 1"
            )
        return hidden[0]

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size] of the rows `hidden` [num_rows, hidden] that the last stage has
        sent.
        """
        self._last.hidden = hidden
        # Models demand token ids, which `LastHidden` does not read.
        return cast(
            Tensor, self._head(input_ids=hidden.new_zeros((1, 1), dtype=torch.int64), use_cache=False).logits[0]
        )

    def _replace_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Replace the input of this stage's first layer by what the stage before has sent. It is a forward pre-hook of
        torch, and returns the layer's new arguments.
        """
        if self._received is None:
            return args, kwargs
        return ((self._received, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": self._received})
