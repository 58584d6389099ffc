"""Loads a decoder through transformers: its class, attention implementation, quantized or dummy weights, a rank's part.

Every defect of a folder is raised as a `ModelError` that names the folder and the cause.
"""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from baton_serve.contracts.model_path import gguf_parts, model_folder
from baton_serve.engine import device
from baton_serve.engine.collectives.shard import UNSHARDED, Shard
from baton_serve.engine.collectives.stage_layers import WHOLE_PIPELINE, Stage
from baton_serve.engine.config import CHECKPOINT_ONLY, EngineConfig
from baton_serve.engine.errors import ConfigError, ModelError
from baton_serve.engine.loading.gguf_weights import gguf_file, gguf_layers, gguf_tensors
from baton_serve.engine.loading.layer_probe import ProbedLayers, check_index, probe_layers, refuse_unsupported
from baton_serve.engine.loading.miniature import check_miniature, needs_comparison
from baton_serve.engine.loading.quantization import layer_by_layer, prequantized
from baton_serve.engine.loading.quantization.checkpoints import CheckpointFormat, checkpoint_format
from baton_serve.engine.loading.quantization.checkpoints.gguf import Gguf
from baton_serve.engine.loading.shard_weights import draw_parts, load_parts
from baton_serve.engine.loading.text_decoders import eos_token_ids, known_decoder
from baton_serve.engine.loading.unsupported_models import named_division, refuse_ranks, refuse_stages, refuse_type
from baton_serve.engine.loading.weight_files import fill, map_tensors, tensor_copies
from baton_serve.engine.model import paged_attention as attention
from baton_serve.engine.model import rotary
from baton_serve.engine.model.attention_adapters import OWN_ATTENTION, adapt_attention
from baton_serve.engine.model.context_length import max_model_len_of
from baton_serve.engine.model.fingerprint import dummy_fingerprint, weights_fingerprint
from baton_serve.engine.model.loaded_model import LoadedModel, LoadProgress
from baton_serve.engine.model.lora.adapter_files import target_modules
from baton_serve.engine.model.mrope_axes import adapt_positions
from baton_serve.engine.model.pipeline_stage import is_within, keep_layers
from baton_serve.engine.model.plugin_models import ModelRegistry
from baton_serve.engine.model.quantized.formats import scheme
from baton_serve.engine.model.quantized.quantization_plan import QuantizationPlan, tied_embedding
from baton_serve.engine.model.quantized.rank_slices import split_module
from baton_serve.engine.model.rank_parts import WHOLE, RankParts, SplitRules, narrow, split
from baton_serve.engine.model.recurrent import adapt_mixers
from baton_serve.engine.model.speech.decoder import cross_layers, cross_port
from baton_serve.engine.model.state_parts import placed_states
from baton_serve.engine.model.vision.text_part import decoder_config, has_bidirectional_prompts, holds_more
from baton_serve.engine.model.weight_offload import refuse_offload
from baton_serve.engine.model_folder import (
    LOAD_ERRORS,
    HfConfig,
    first_line,
    is_pickled,
    quiet_transformers,
    read_config,
    weight_files,
    weights_error,
)

logger = logging.getLogger(__name__)


def load_model(
    config: EngineConfig,
    target: torch.device,
    progress: LoadProgress,
    shard: Shard = UNSHARDED,
    stage: Stage = WHOLE_PIPELINE,
) -> LoadedModel:
    """Load a decoder with transformers, or one rank's part of it, onto the device `target`. `shard` and `stage` are the
    part by tensor and by pipeline parallelism. `progress` is called with the phase and its finished fraction.

    Raises `ModelError` for broken files, and `UnsupportedModelError` or `ConfigError` for a model or settings that are
    not supported.
    """
    folder, gguf = model_folder(config.model), gguf_file(config)
    ModelRegistry.make_known(folder, config.plugins)
    hf_config = _read_decoder(folder, config)
    name = (getattr(hf_config, "architectures", None) or [hf_config.model_type])[0]
    text_config = hf_config.get_text_config()
    refuse_unsupported(name, text_config)
    dtype = device.select_dtype(target, config.dtype, getattr(text_config, "dtype", None))
    refuse_offload(target, config.cpu_offload_gb)
    target = device.weights_device(target, config.cpu_offload_gb)
    max_model_len = max_model_len_of(config, text_config)
    check_index(name, text_config, max_model_len)
    # The attention function must be known before a model that uses it is built.
    attention.register()
    progress("loading weights", 0.0)
    form = _stored_format(config, hf_config, is_gguf=gguf is not None)
    plan = None if form is not None or config.quantization == "gguf" else _quantization_plan(config)
    is_rounded = form is not None or plan is not None or gguf is not None
    parts = _parts(hf_config, config, dtype, shard, stage, is_rounded=is_rounded)
    if gguf is not None:
        module = _load_gguf(gguf, hf_config, config, plan, dtype, target, parts)
    elif form is not None and config.load_format != "dummy":
        module = _load_stored(folder, hf_config, config, form, dtype, target, parts)
    elif plan is not None:
        module = _load_quantized(folder, hf_config, config, plan, dtype, target, parts)
    elif not shard.is_whole or not stage.is_whole:
        module = _load_parts(folder, hf_config, config, dtype, target, parts, progress)
    elif config.load_format == "dummy":
        module = _make_dummy(hf_config, config, dtype, target)
    else:
        module = _load_whole(folder, hf_config, config, dtype, target, progress)
    module.eval().requires_grad_(False)
    # Modules look up the attention function by this name; models of OWN_ATTENTION were built as `eager`. Before
    # `narrow`, which gives modules copies of the config.
    cast(Any, module).config._attn_implementation = attention.NAME
    narrow(module, parts)
    adapt_attention(module)
    adapt_mixers(module)
    # Everything that changes the KV beside the weights goes into the fingerprint.
    variant = rotary.freeze(module, max_model_len) + _variant(plan, Gguf() if gguf is not None else form)
    progress("loading weights", 1.0)
    with named_division(name, shard):
        layers = _probe(module, name, hf_config, target, dtype, stage, progress)
    return LoadedModel(
        module=module,
        name=name,
        dtype=dtype,
        vocab_size=int(text_config.vocab_size),
        max_model_len=max_model_len,
        kv_shapes=layers.kv_shapes,
        specs=layers.specs,
        eos_token_ids=eos_token_ids(module, text_config),
        fingerprint=_fingerprint(folder, config, variant, gguf, target, parts),
        parts=parts,
        kv_layers=layers.kv_layers,
        shared_layers=layers.shared_layers,
        states=placed_states(layers.states, parts.delta),
        source_tokens=layers.source_tokens,
        has_position_rows=adapt_positions(module),
        has_bidirectional_prompts=has_bidirectional_prompts(text_config),
    )


def _parts(
    hf_config: HfConfig, config: EngineConfig, dtype: torch.dtype, shard: Shard, stage: Stage, *, is_rounded: bool
) -> RankParts:
    """Return which part of each weight a rank holds; `is_rounded` says that the weights are quantized. Raises
    `ConfigError` or `UnsupportedModelError` if the model cannot be divided so."""
    name = (getattr(hf_config, "architectures", None) or [hf_config.model_type])[0]
    if shard.is_whole and stage.is_whole:
        return WHOLE
    refuse_ranks(name, hf_config.get_text_config(), shard)
    refuse_stages(name, hf_config.get_text_config(), stage)
    skeleton = _make_dummy(hf_config, config, dtype, torch.device("meta"))
    # A quantized head that is the embedding too is looked up by all its rows.
    keeps_head = is_rounded and tied_embedding(skeleton) is not None
    keep_layers(skeleton, stage)
    rules = SplitRules(is_rounded, keeps_head, config.enable_expert_parallel)
    return replace(split(skeleton, name, shard, rules), stage=stage)


def _fingerprint(
    folder: Path, config: EngineConfig, variant: str, gguf: Path | None, target: torch.device, parts: RankParts
) -> str:
    """Return the hash that identifies everything on which the KV depends: instances share KV only if it is equal.
    `variant` describes what loading changes in the stored weights, such as quantization. `gguf` is the model's GGUF
    file, if it has one."""
    if config.load_format != "dummy":
        files = weight_files(folder, config.load_format, config.loader.pattern) if gguf is None else gguf_parts(gguf)
        return weights_fingerprint(folder, variant, files)
    # Ranks draw other random weights than a single one does.
    drawn = variant if parts.is_whole else f"{variant}|{parts.shard.size} ranks"
    drawn += "" if parts.stage.is_whole else f"|stages {parts.stage.num_layers}"
    return dummy_fingerprint(folder, drawn, seed=config.seed, device=target.type)


def _probe(
    module: nn.Module,
    name: str,
    hf_config: HfConfig,
    target: torch.device,
    dtype: torch.dtype,
    stage: Stage,
    progress: LoadProgress,
) -> ProbedLayers:
    """Find out the shapes of the KV and recurrent states of each layer. If this model class was not compared with
    transformers before, compare a small model of it. Raises `UnsupportedModelError` if the model cannot be served."""
    if (port := cross_port(hf_config)) is not None:
        shapes, specs = cross_layers(port, module)
        return ProbedLayers(shapes, specs, None, (), (), port.source_tokens(hf_config))
    layers = probe_layers(module, name, hf_config.get_text_config(), target, stage, dtype)
    if needs_comparison(module):
        progress("comparing layers", 0.0)
        check_miniature(module, name)
    return layers


def _read_decoder(folder: Path, config: EngineConfig) -> HfConfig:
    """Return the config of the decoder in a model folder, in a form for which transformers has a class.

    Raises `ModelError` if the folder is broken, or `UnsupportedModelError` if no part of the model can be served as
    text.
    """
    whole = read_config(folder, config)
    refuse_type(whole)
    return known_decoder(decoder_config(whole), whole.model_type)


def _stored_format(config: EngineConfig, hf_config: HfConfig, *, is_gguf: bool) -> CheckpointFormat | None:
    """Return the format in which the checkpoint stores quantized weights; None if they are not quantized, or in a GGUF
    file (`is_gguf`).

    This removes `quantization_config` from `hf_config`; otherwise transformers would ask for the libraries of the
    format. Raises `ConfigError` if `--quantization` names another format, or `UnsupportedModelError`.
    """
    stated: dict[str, Any] | None = None
    for part in (hf_config, hf_config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            stated = part.quantization_config
            del part.quantization_config
    if is_gguf and config.quantization in (None, "gguf"):
        return None
    if stated is None:
        if config.quantization in CHECKPOINT_ONLY and config.quantization != "bitsandbytes":
            raise ConfigError(
                f"quantization is {config.quantization}, but the weights in {config.model} are not quantized; start"
                " without --quantization, or name a format to which they are rounded while they are loaded"
            )
        return None
    form = checkpoint_format(stated)
    if config.loader.qlora_adapter_name_or_path is not None:
        raise ConfigError(
            f"qlora_adapter_name_or_path says which layers are rounded, but the weights in {config.model} are quantized"
            f" already by {form.method}: leave it out; --enable-lora --lora-modules serves the adapter"
        )
    if config.rounding is not None and config.rounding != form.method:
        raise ConfigError(
            f"quantization is {config.rounding}, but the weights in {config.model} are quantized already by"
            f" {form.method}; start without --quantization"
        )
    return form


def _quantization_plan(config: EngineConfig) -> QuantizationPlan | None:
    """Return which layers are quantized while they are loaded, and to which format, as `--quantization` says; None: no
    layer."""
    if config.rounding is None:
        return None
    chosen = scheme(config.rounding, fp8_dtype=config.fp8_dtype, group_size=config.quantization_group_size)
    # bitsandbytes does not round the head.
    kept = ("lm_head",) if config.rounding == "bitsandbytes" else ()
    adapter = config.loader.qlora_adapter_name_or_path
    only = None if adapter is None else target_modules(Path(adapter))
    return QuantizationPlan(chosen, (*config.quantization_skip, *kept), only)


def _variant(plan: QuantizationPlan | None, form: CheckpointFormat | None) -> str:
    """Return the text that stands for the quantization in the model's fingerprint: that of `plan`, by which weights are
    quantized while they are loaded, or of `form`, the checkpoint's format. It is empty if both are None."""
    quantized = plan if plan is not None else form
    return "" if quantized is None else f"|{quantized.label}"


def _load_stored(
    folder: Path,
    hf_config: HfConfig,
    config: EngineConfig,
    form: CheckpointFormat,
    dtype: torch.dtype,
    target: torch.device,
    parts: RankParts,
) -> nn.Module:
    """Load a checkpoint with quantized weights of the format `form`, and keep them as they are stored. If transformers
    has to convert names or shapes, the weights become floats in between."""
    skeleton = _make_dummy(hf_config, config, dtype, torch.device("meta"))
    with ExitStack() as files:
        model = prequantized.sort_tensors(_open_checkpoint(folder, config, files), form)
        if not model.layers:
            raise ModelError(f"config.json in {folder} says {form.label}, but none of its weights has this format")
        model.drop(keep_layers(skeleton, parts.stage))
        if prequantized.fill_stored(skeleton, model, target, dtype, parts):
            _read_generation_config(skeleton, folder)
            return skeleton.to(target)
        # transformers converts floats only. The layers that stay linear get their codes back afterwards.
        whole = _load_weights(folder, hf_config, config, dtype, prequantized.numbers(model, dtype))
        keep_layers(whole, parts.stage)
        prequantized.requantize(whole, model, target, dtype, parts)
        _read_generation_config(whole, folder)
        return whole.to(target)


def _load_quantized(
    folder: Path,
    hf_config: HfConfig,
    config: EngineConfig,
    plan: QuantizationPlan,
    dtype: torch.dtype,
    target: torch.device,
    parts: RankParts,
) -> nn.Module:
    """Load a model whose weights are not quantized, and quantize them as `plan` says.

    If the checkpoint's tensors have the model's own names, only one unquantized layer at a time is in memory.
    """
    skeleton = _make_dummy(hf_config, config, dtype, torch.device("meta"))
    dropped = keep_layers(skeleton, parts.stage)
    with ExitStack() as files:
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            # transformers' own default.
            std = getattr(hf_config.get_text_config(), "initializer_range", 0.02)
            tensors = layer_by_layer.random_tensors(skeleton, target, dtype, std)
        else:
            stored_ones = _open_checkpoint(folder, config, files)
            tensors = {name: read for name, read in stored_ones.items() if not is_within(name, dropped)}
        if layer_by_layer.fits(skeleton, tensors):
            module = layer_by_layer.fill(skeleton, tensors, plan, target, dtype, parts).to(target)
            _read_generation_config(module, folder)
            return module
    if config.load_format == "dummy":
        whole = _make_dummy(hf_config, config, dtype, torch.device("cpu"))
    else:
        whole = _load_weights(folder, hf_config, config, dtype)
    keep_layers(whole, parts.stage)
    return layer_by_layer.round_loaded(whole, plan, target, dtype, parts)


def _load_gguf(
    file: Path,
    hf_config: HfConfig,
    config: EngineConfig,
    plan: QuantizationPlan | None,
    dtype: torch.dtype,
    target: torch.device,
    parts: RankParts,
) -> nn.Module:
    """Load the weights of a GGUF file: quantized as in the file; or, with `plan`, quantized as `plan` says; or as
    floats if transformers has to convert them."""
    skeleton = _make_dummy(hf_config, config, dtype, torch.device("meta"))
    kept = gguf_layers(file, skeleton, keep_codes=plan is None)
    if kept is not None:
        kept.drop(keep_layers(skeleton, parts.stage))
    if kept is not None and plan is None and prequantized.fill_stored(skeleton, kept, target, dtype, parts):
        _read_generation_config(skeleton, file.parent)
        return skeleton.to(target)
    if kept is not None and plan is not None and layer_by_layer.fits(skeleton, kept.plain):
        module = layer_by_layer.fill(skeleton, kept.plain, plan, target, dtype, parts).to(target)
        _read_generation_config(module, file.parent)
        return module
    # `fill_stored` may have changed the skeleton.
    skeleton = _make_dummy(hf_config, config, dtype, torch.device("meta"))
    whole = _load_weights(file.parent, hf_config, config, dtype, gguf_tensors(file, skeleton, dtype))
    _read_generation_config(whole, file.parent)
    keep_layers(whole, parts.stage)
    if plan is not None:
        return layer_by_layer.round_loaded(whole, plan, target, dtype, parts)
    split_module(whole, parts)
    return whole.to(target)


def _open_checkpoint(folder: Path, config: EngineConfig, files: ExitStack) -> layer_by_layer.Tensors:
    """Return functions that read each tensor of a checkpoint, by name. `files` closes the opened files. Raises
    `ModelError` if a file cannot be opened."""
    try:
        return layer_by_layer.checkpoint_tensors(folder, files, config.load_format, config.loader.pattern)
    except LOAD_ERRORS as exc:
        raise weights_error(folder, exc) from exc


def _read_generation_config(module: nn.Module, folder: Path) -> None:
    """Attach the content of the folder's generation_config.json to `module`, if there is one: it may name more tokens
    that end a sequence."""
    if (folder / "generation_config.json").is_file():
        cast(Any, module).generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def _implementation(hf_config: HfConfig) -> str:
    """Return the name of the attention implementation to pass to transformers when it builds this model."""
    return "eager" if hf_config.model_type in OWN_ATTENTION else attention.NAME


def _make_dummy(hf_config: HfConfig, config: EngineConfig, dtype: torch.dtype, target: torch.device) -> nn.Module:
    """Build a model with random weights on `target`; on torch's meta device, without memory. Raises `ModelError` if
    transformers cannot build it."""
    torch.manual_seed(config.seed)
    try:
        with torch.device(target):
            module: nn.Module = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=dtype,
                attn_implementation=_implementation(hf_config),
                trust_remote_code=config.trust_remote_code,
            )
    except LOAD_ERRORS as exc:
        raise ModelError(f"{config.model} cannot be built: {first_line(exc)}") from exc
    return module


def _load_whole(
    folder: Path,
    hf_config: HfConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    target: torch.device,
    progress: LoadProgress,
) -> nn.Module:
    """Load a whole model without quantizing its weights, onto `target`.

    If the files have the model's own parameters, they are copied directly to the device. Otherwise, and on the CPU,
    transformers loads them; on the CPU it maps the files, which needs no copy. Raises `ModelError` if the files are
    broken.
    """
    if device.is_host(target):
        return _load_weights(folder, hf_config, config, dtype)
    with no_init_weights():  # random numbers would be overwritten immediately
        module = _make_dummy(hf_config, config, dtype, target)
    cast(Any, module).tie_weights()
    try:
        pieces = (
            tensor_copies(module, map_tensors(folder, config.load_format, config.loader.pattern))
            if folder.is_dir()
            else None
        )
        if pieces is None:
            del module  # free the device's memory before the second attempt
            return _load_weights(folder, hf_config, config, dtype).to(target)
        fill(
            list(pieces.values()),
            target,
            lambda fraction: progress("loading weights", fraction),
            config.loader.copy_threads,
        )
    except LOAD_ERRORS as exc:
        raise weights_error(folder, exc) from exc
    _read_generation_config(module, folder)
    return module


def _load_parts(
    folder: Path,
    hf_config: HfConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    target: torch.device,
    parts: RankParts,
    progress: LoadProgress,
) -> nn.Module:
    """Load one rank's part (`parts`) of a model whose weights are not quantized, or draw it at random. Raises
    `ModelError` if the files are broken.

    If transformers has to convert the files, each rank converts the whole model in host memory first.
    """
    with no_init_weights():  # memory that is never written is never taken
        module = _make_dummy(hf_config, config, dtype, torch.device("cpu"))
    cast(Any, module).tie_weights()
    dropped = keep_layers(module, parts.stage)
    if config.load_format == "dummy":
        std = getattr(hf_config.get_text_config(), "initializer_range", 0.02)
        draw_parts(module, parts, target, dtype, config.seed, std)
        return module.to(target)
    try:
        stored_ones = map_tensors(folder, config.load_format, config.loader.pattern)
        files = {name: tensor for name, tensor in stored_ones.items() if not is_within(name, dropped)}
        threads = config.loader.copy_threads
        if not load_parts(module, files, parts, target, lambda done: progress("loading weights", done), threads):
            module = _load_weights(folder, hf_config, config, dtype)
            keep_layers(module, parts.stage)
            split_module(module, parts)
    except LOAD_ERRORS as exc:
        raise weights_error(folder, exc) from exc
    _read_generation_config(module, folder)
    return module.to(target)


def _load_weights(
    folder: Path,
    hf_config: HfConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    state: dict[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Load a model into host memory with transformers. `state` are its weights by name, if transformers cannot read
    them from the folder itself.

    Raises `ModelError` if weights are missing or have other shapes.
    """
    try:
        # The files also have the towers' tensors; only the decoder is loaded here.
        if state is None and (holds_more(folder, hf_config) or config.load_format == "sharded_state"):
            state = map_tensors(folder, config.load_format, config.loader.pattern)
        with quiet_transformers():
            module, report = _class_of(hf_config, state).from_pretrained(
                folder if state is None else None,
                config=hf_config,
                state_dict=state,
                dtype=dtype,
                attn_implementation=_implementation(hf_config),
                local_files_only=True,
                use_safetensors=not is_pickled(weight_files(folder, config.load_format, config.loader.pattern)),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
    except LOAD_ERRORS as exc:
        raise weights_error(folder, exc) from exc
    # transformers only warns, and fills missing weights with random numbers.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{folder} lacks {len(missing)} weights that its config asks for, such as {missing[0]}")
    if mismatched := sorted(map(str, report["mismatched_keys"])):
        raise ModelError(f"{len(mismatched)} weights in {folder} do not fit its config, such as {mismatched[0]}")
    loaded: nn.Module = module
    if state is not None:
        _read_generation_config(loaded, folder)
    return loaded


def _class_of(hf_config: HfConfig, state: dict[str, torch.Tensor] | None) -> Any:
    """Return the class of transformers that loads the model: the automatic one for a folder, or the model's own class
    if the weights are given as `state`."""
    return AutoModelForCausalLM if state is None else AutoModelForCausalLM._model_mapping[type(hf_config)]
