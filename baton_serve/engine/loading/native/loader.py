"""Loads dense decoders directly from safetensors files: mapped on hosts, copied to devices by several threads."""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from baton_serve.contracts.block_layout import KVShape
from baton_serve.contracts.model_path import gguf_parts, model_folder
from baton_serve.engine import device as devices
from baton_serve.engine.collectives.stage_layers import WHOLE_PIPELINE, Stage
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.kernels import AttentionSpec
from baton_serve.engine.loading.gguf_weights import dense_layers, gguf_file
from baton_serve.engine.loading.native.dense_config import DenseConfig, read_folder
from baton_serve.engine.loading.native.dense_decoder import DenseModel
from baton_serve.engine.loading.quantization.checkpoints.gguf import Gguf
from baton_serve.engine.loading.quantization.prequantized import fill_stored
from baton_serve.engine.loading.weight_files import TensorCopy, fill, map_tensors
from baton_serve.engine.model.context_length import max_model_len_of
from baton_serve.engine.model.fingerprint import weights_fingerprint
from baton_serve.engine.model.loaded_model import LoadedModel, LoadProgress
from baton_serve.engine.model.pipeline_stage import keep_layers
from baton_serve.engine.model.rank_parts import RankParts
from baton_serve.engine.model.rotary import Rotary, rotary_frequencies, stretched
from baton_serve.engine.model.weight_offload import refuse_offload
from baton_serve.engine.model_folder import LOAD_ERRORS, weight_files


def load_dense(
    config: EngineConfig, target: torch.device, progress: LoadProgress, stage: Stage = WHOLE_PIPELINE
) -> LoadedModel | None:
    """Load a decoder of a family that this loader knows (Llama, Mistral, Qwen), or one pipeline stage of it, without
    transformers, whose import takes seconds. Return None if this loader cannot load the model.

    The caller then uses transformers, which loads the model or reports what is wrong with it. Raises `ConfigError` for
    settings that the model does not support.
    """
    folder = model_folder(config.model)
    dense = read_folder(folder) if fits(config) else None
    if dense is None:
        return None
    progress("loading weights", 0.0)
    asked = None if dense.dtype is None else devices.DTYPES[dense.dtype]
    dtype = devices.select_dtype(target, config.dtype, asked)
    refuse_offload(target, config.cpu_offload_gb)
    target = devices.weights_device(target, config.cpu_offload_gb)
    max_model_len = max_model_len_of(config, dense)
    gguf = gguf_file(config)
    parts = (dense, dtype, target, stage)
    module = _load(folder, config, *parts, progress) if gguf is None else _load_gguf(gguf, *parts)
    if module is None:
        return None
    progress("loading weights", 1.0)
    num_layers = dense.num_layers if stage.is_whole else len(stage.layers)
    return LoadedModel(
        module=module,
        name=dense.name,
        dtype=dtype,
        vocab_size=dense.vocab_size,
        max_model_len=max_model_len,
        kv_shapes=(KVShape(dense.num_kv_heads, dense.head_dim),) * num_layers,
        specs=[AttentionSpec(scale=dense.head_dim**-0.5)] * num_layers,
        eos_token_ids=dense.eos_token_ids,
        fingerprint=weights_fingerprint(folder, "" if gguf is None else f"|{Gguf.label}", _files(folder, config, gguf)),
        parts=RankParts(stage=stage),
    )


def _files(folder: Path, config: EngineConfig, gguf: Path | None) -> list[Path]:
    """Return the paths of the model's weight files. `gguf` is its GGUF file, or None if the weights are in other
    formats."""
    return gguf_parts(gguf) if gguf is not None else weight_files(folder, config.load_format, config.loader.pattern)


def fits(config: EngineConfig) -> bool:
    """Return whether these settings ask for the weights exactly as they are stored. Only then can the model be loaded
    without transformers."""
    is_gguf = config.load_format == "gguf" or config.model.endswith(".gguf")
    if is_gguf:
        return config.quantization in (None, "gguf") and config.load_format != "dummy"
    return config.rounding is None and config.load_format != "dummy"


def _load(
    folder: Path,
    config: EngineConfig,
    dense: DenseConfig,
    dtype: torch.dtype,
    target: torch.device,
    stage: Stage,
    progress: LoadProgress,
) -> nn.Module | None:
    """Load the weights of a model folder into a new module on `target`. Return None if the files do not have exactly
    the weights that the config `dense` asks for."""
    try:
        stored = map_tensors(folder, config.load_format, config.loader.pattern)
    except LOAD_ERRORS:
        return None
    # Build the module without memory: its weights are replaced below.
    with torch.device("meta"):
        module = DenseModel(dense)
    wanted = dict(module.named_parameters())  # a tied head is not listed again
    # Old checkpoints contain the frequencies, which are computed here.
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
    # A missing, additional or differently shaped tensor means that the family is not what it seems.
    if {name: tensor.shape for name, tensor in wanted.items()} != {n: tensor.shape for n, tensor in stored.items()}:
        return None
    keep_layers(module, stage)
    wanted = dict(module.named_parameters())
    stored = {name: tensor for name, tensor in stored.items() if name in wanted}
    with torch.inference_mode():
        weights = (
            _on_host(stored, dtype) if devices.is_host(target) else _on_device(stored, dtype, target, progress, config)
        )
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=False))
    # New parameters have replaced the shared one, so share it again.
    if stage.is_first:
        module.tie()
    module.model.rotary_emb = _rotary(dense, target)
    return module.eval()


def _load_gguf(
    file: Path, dense: DenseConfig, dtype: torch.dtype, target: torch.device, stage: Stage
) -> nn.Module | None:
    """Load the weights of a GGUF file into a new module on `target`, quantized as in the file. Return None if it does
    not have exactly the weights that the config `dense` asks for."""
    with torch.device("meta"):
        module = DenseModel(dense)
    with torch.inference_mode(), devices.one_thread():
        stored = dense_layers(file, module, dense)
        if stored is not None:
            stored.drop(keep_layers(module, stage))
        if stored is None or not fill_stored(module, stored, target, dtype):
            return None
    module.model.rotary_emb = _rotary(dense, target)
    return module.eval().requires_grad_(False)


def _on_host(stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the stored weights in `dtype`. A weight that has this dtype already stays a view of its file."""
    return {name: tensor.to(dtype) for name, tensor in stored.items()}


def _on_device(
    stored: dict[str, Tensor], dtype: torch.dtype, target: torch.device, progress: LoadProgress, config: EngineConfig
) -> dict[str, Tensor]:
    """Return the stored weights, copied to the device `target` and converted to `dtype`, by name."""
    made = {name: torch.empty(tensor.shape, dtype=dtype, device=target) for name, tensor in stored.items()}
    pieces = [TensorCopy(made[name], tensor) for name, tensor in stored.items()]
    fill(pieces, target, lambda fraction: progress("loading weights", fraction), config.loader.copy_threads)
    return made


def _rotary(dense: DenseConfig, target: torch.device) -> Rotary:
    """Return the rotary module of a decoder, with its frequencies on the device `target`."""
    frequencies = rotary_frequencies(dense.head_dim, dense.rope_theta)
    if dense.rope_stretch is not None:
        frequencies = stretched(frequencies, **asdict(dense.rope_stretch))
    return Rotary(frequencies.to(target))
