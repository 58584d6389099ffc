"""Decides what all ranks share before KV is allocated: block layout, KV dtype (`--kv-cache-dtype`), tokens of a step,
graph capture (`--enforce-eager`).
"""

from dataclasses import replace
from typing import cast

import msgspec
import torch

from baton_serve.contracts.block_layout import KVLayout, KVWindow
from baton_serve.engine import device as devices
from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.collectives.stage_links import StageLinks
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.execution.kernel_shapes import choose_kernels
from baton_serve.engine.kernels.bidirectional import BidirectionalPrompts
from baton_serve.engine.kernels.mixers import CHECKPOINT_STEP_TOKENS
from baton_serve.engine.kv import capacity
from baton_serve.engine.kv.cache_groups import divide_layers
from baton_serve.engine.kv.kv_cache import BlockPart
from baton_serve.engine.model.forward import choose_forward
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.lora.store import AdapterStore, SlotSettings
from baton_serve.engine.model.pipeline_stage import StagedForward, StagePart
from baton_serve.engine.model.speech import load_audio
from baton_serve.engine.model.vision import load_images, no_images
from baton_serve.engine.model.vision.image_types import ImageReader, PromptImages
from baton_serve.engine.model.weight_offload import offload_weights

CHECKPOINT_TOKENS = 4096
"""Distance between the checkpoints of recurrent states inside a prompt, in tokens. A checkpoint is as large as the KV
of 500 to 3,000 tokens."""


class EngineSetup:
    """The parts of an engine that exist before the number of KV blocks is known, such as kernels, forward and adapters.
    `layout` describes whole KV blocks, with the heads of all ranks.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        device: torch.device,
        collectives: Collectives,
        links: StageLinks | None = None,
    ) -> None:
        """Choose kernels and build the forward, the adapters and the encoders for the loaded `model`. `links` connect
        this pipeline stage with the others; None without a pipeline.

        Call it once: it repacks the model's weights in place. Raises `ConfigError` or `AdapterError`.
        """
        defaults = devices.defaults(device)
        offload = offload_weights(model.module, model.name, device, config.cpu_offload_gb)
        # Sinks and slopes were taken from modules that may have been in host memory.
        model = replace(model, offload=offload, specs=[spec.to(device) for spec in model.specs])
        layer_groups = _layer_groups(config, model)
        self.layout = _layout(config, model, config.block_size or defaults.block_tokens, layer_groups)
        self.states = model.states
        self.weight_bytes = sum(parameter.nbytes for parameter in model.module.parameters())
        """Size of the weights of this rank that are not quantized, in bytes."""
        self.kv_heads = model.kv_heads
        self.block_share = _block_share(model)
        """The size of this rank's part of a block, as a fraction. Ranks may hold the same KV heads."""
        _check_chunks(model, self.layout)
        max_num_seqs, num_spare_rows = capacity.limit_sequences(config, self.layout, device)
        batched = _step_tokens(config, model, max_num_seqs, defaults.max_num_batched_tokens)
        self.sources = load_audio(config, model, self.layout.block_tokens, device)
        """Encodes the windows of audio of prompts; None for models without cross-attention, and on decode instances."""
        self.images: PromptImages | None = self.sources
        # Rank 0 sends embeddings, and the outputs of encoders, to the others.
        if config.reads_images and self.sources is None and model.parts.is_first_rank:
            self.images = load_images(config, device, model.dtype, max_image_tokens=batched - max_num_seqs)
        self.image_reader: ImageReader | None = None if self.images is None else self.images.reader
        """Decodes images; usable from any thread. None: this instance has no vision tower."""
        self.no_images = no_images(config, model, device)
        self.kernels = choose_kernels(config, model, self.layout, device)
        self.limits = SchedulerConfig(
            block_tokens=self.layout.block_tokens,
            max_model_len=model.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batched,
            max_loras=config.max_loras,
            state_blocks=self.layout.state_blocks,
            checkpoint_tokens=-(-CHECKPOINT_TOKENS // self.layout.block_tokens) * self.layout.block_tokens,
            # Plain torch and C++ store states after any token.
            checkpoint_step_tokens=1 if devices.is_host(device) else CHECKPOINT_STEP_TOKENS,
            num_spare_rows=num_spare_rows,
            source_tokens=model.source_tokens,
            mixes_prompts=self.kernels.mixes_prompts,
            keeps_images_whole=self.images is not None and self.images.are_whole,
            has_bidirectional_prompts=model.has_bidirectional_prompts,
            shortest_window_tokens=_shortest_window(model),
            has_position_rows=model.has_position_rows,
            num_stages=config.pipeline_parallel_size,
            layer_groups=layer_groups,
            window_tokens=0 if self.layout.window is msgspec.UNSET else self.layout.window.tokens,
        )
        self._block_layers, self._stage_layers = model.block_layers, model.stage_layers
        self._is_whole, self._is_alone, self._first_state = model.is_whole, config.num_ranks == 1, model.first_state
        self._device, self._enforce_eager = device, config.enforce_eager
        self.adapters: AdapterStore | None = None
        if config.enable_lora:
            self.adapters = AdapterStore(
                max_rank=config.max_lora_rank,
                max_adapters=config.max_adapters,
                dtype=model.dtype if config.lora_dtype == "auto" else devices.DTYPES[config.lora_dtype],
                model_dtype=model.dtype,
                slots=_slot_settings(config, device),
                device=device,
                parts=model.parts,
            )
        chosen = choose_forward(
            model,
            BidirectionalPrompts(self.kernels.attention) if model.has_bidirectional_prompts else self.kernels.attention,
            self.kernels.layers,
            collectives,
            self.adapters,
            mixers=self.kernels.mixers,
            # The C++ of all layers lets no token see a later one.
            may_call_once=self.kernels.has_decoder
            and not (self.limits.keeps_images_whole or model.has_bidirectional_prompts),
        )
        self.weight_bytes -= 0 if model.offload is None else model.offload.saved_bytes
        # A stage computes without its neighbours; here it is connected with them.
        self.forward = chosen if links is None else StagedForward(cast(StagePart, chosen), links)
        for given in config.adapters_at_start:
            assert self.adapters is not None  # `EngineConfig.check` requires enable_lora here
            read = self.adapters.read(given.name, given.path)
            adapter = replace(read, base_model_name=given.base_model_name)
            self.adapters.register(adapter)
            self.adapters.keep(adapter, in_use=(), pinned=())

    @property
    def uses_graphs(self) -> bool:
        """True if steps will be captured in device graphs: the device and the model support it, and `enforce_eager` is
        not set."""
        return self.forward.is_capturable and not self._enforce_eager and devices.has_graphs(self._device)

    @property
    def first_state(self) -> int | None:
        """Return the byte of a checkpoint at which the recurrent states of this rank's stage begin; None for a single
        rank."""
        return None if self._is_alone else self._first_state

    def stage_shares(self) -> list[float]:
        """Return, for each pipeline stage, the fraction of every KV block's bytes that its layers take."""
        return [BlockPart(layers).share(self.layout) for layers in self._stage_layers]

    @property
    def part(self) -> BlockPart | None:
        """Return which layers and KV heads of every KV block this rank holds; None: all of them."""
        if self._is_alone:
            return None
        # With cache groups a block has the KV of fewer layers, which all have the same heads.
        own = self.kv_heads[: self.layout.num_layers] if self.limits.layer_groups else self.kv_heads
        heads = None if self._is_whole or not own else tuple(heads.part for heads in own)
        return BlockPart(self._block_layers, heads)


def _step_tokens(config: EngineConfig, model: LoadedModel, max_num_seqs: int, default: int) -> int:
    """Return the largest number of tokens in a step: that of the settings, or one that follows from the device's
    `default` and the model."""
    if config.max_num_batched_tokens:
        return config.max_num_batched_tokens
    # One step computes a prompt whose tokens all see each other. Contexts of such models are short.
    needed = model.max_model_len + max_num_seqs if model.has_bidirectional_prompts else 0
    # A step must be able to hold one token of every sequence.
    return max(default, config.max_num_seqs, needed)


def _shortest_window(model: LoadedModel) -> int:
    """Return the shortest sliding window of the model's layers in tokens; 0 without one."""
    return min((spec.sliding_window for spec in model.specs if spec.sliding_window is not None), default=0)


def _check_chunks(model: LoadedModel, layout: KVLayout) -> None:
    """Raise `ConfigError` if the chunk size of chunked attention (Llama 4) is not a multiple of the block size."""
    for chunk in {spec.chunk for spec in model.specs if spec.chunk is not None}:
        if chunk % layout.block_tokens:
            raise ConfigError(
                f"{model.name} attends in chunks of {chunk} tokens, which are not whole blocks of {layout.block_tokens}"
                " tokens: choose a block_size that divides them"
            )


def _layer_groups(config: EngineConfig, model: LoadedModel) -> tuple[int, ...]:
    """Return the cache group of each layer with KV; empty for models whose blocks hold the KV of all layers.

    Their layers have one shape, and nothing but KV. The stages of a pipeline, which hold some of the layers, have none.
    """
    has_other_kv = model.states or model.source_tokens or model.shared_layers or model.has_position_rows
    is_chunked = any(spec.chunk is not None for spec in model.specs)
    is_plain = len(set(model.block_shapes)) == 1 and not has_other_kv and not is_chunked
    # The end of a prompt whose tokens all see each other is computed with all of its KV, also before the window.
    is_plain = is_plain and not model.has_bidirectional_prompts
    is_plain = is_plain and all(heads == model.kv_heads[0] for heads in model.kv_heads)
    if config.disable_hybrid_kv_cache_manager or config.pipeline_parallel_size > 1 or not is_plain:
        return ()
    return divide_layers([spec.sliding_window for spec in model.specs], model.max_model_len)


def _layout(config: EngineConfig, model: LoadedModel, block_tokens: int, layer_groups: tuple[int, ...]) -> KVLayout:
    """Return the layout of whole KV blocks of `block_tokens` tokens, with the heads of all ranks, for layers that are
    divided into the groups `layer_groups`.
    """
    first = model.block_shapes[0]
    layout = KVLayout(
        fingerprint=model.fingerprint,
        num_layers=len(model.block_shapes),
        num_kv_heads=first.num_kv_heads,
        block_tokens=block_tokens,
        head_dim=first.head_dim,
        dtype=_kv_dtype(config, model),
        num_planes=first.num_planes,
        state_bytes=model.state_bytes,
        source_tokens=model.source_tokens,
        has_bidirectional_prompts=model.has_bidirectional_prompts,
    )
    if layer_groups:
        longest = max(spec.sliding_window or 0 for spec in model.specs)
        window = KVWindow(max(layer_groups), longest)
        return msgspec.structs.replace(layout, num_layers=layer_groups.count(0), window=window)
    if len(set(model.block_shapes)) == 1:
        return layout
    return msgspec.structs.replace(layout, num_kv_heads=0, head_dim=0, layers=model.block_shapes)


def _block_share(model: LoadedModel) -> float:
    """Return the fraction of each KV block's layers of its stage that this rank holds, by its KV heads; 1.0 if the
    stage has no attention, since ranks of other stages may hold all heads."""
    sizes = [
        (heads.count * shape.head_dim * shape.num_planes, heads.total * shape.head_dim * shape.num_planes)
        for heads, shape in zip(model.kv_heads, model.kv_shapes, strict=True)
    ]
    return sum(own for own, _ in sizes) / sum(whole for _, whole in sizes) if sizes else 1.0


def _slot_settings(config: EngineConfig, device: torch.device) -> SlotSettings | None:
    """Return the number and settings of the LoRA adapter slots for captured graphs; None if this engine captures no
    graphs.
    """
    if config.enforce_eager or not devices.has_graphs(device):
        return None
    return SlotSettings(min(config.max_loras, config.max_num_seqs), devices.beside(device))


def _kv_dtype(config: EngineConfig, model: LoadedModel) -> str:
    """Return the name of the KV cache's dtype. Raises `ConfigError` if a one-byte dtype is set for a model with an odd
    head_dim.
    """
    if config.kv_cache_dtype == "auto":
        return str(model.dtype).removeprefix("torch.")
    if odd := [shape.head_dim for shape in model.block_shapes if shape.head_dim % 2]:
        raise ConfigError(f"kv_cache_dtype {config.kv_cache_dtype} needs an even head_dim, not {odd[0]}: use auto")
    return f"fp8_{config.fp8_dtype}" if config.kv_cache_dtype == "fp8" else config.kv_cache_dtype
