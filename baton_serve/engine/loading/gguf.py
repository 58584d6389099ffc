"""Weights in a GGUF file, under the names that transformers has for them.

The file lies in a folder in Hugging Face's format, whose config and tokenizer count (gguf_folder makes one of a file).
Linear layers keep their codes (quantization.checkpoints.gguf). Architectures whose tensors transformers cuts or stacks,
such as mixtures of experts, become numbers in host memory instead.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from baton_serve.contracts.model_path import model_folder
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ConfigError, ModelError, UnsupportedModelError
from baton_serve.engine.loading.quantization.checkpoints.gguf import FLOATS, ROUNDED, Gguf, kept_as, numbers
from baton_serve.engine.loading.quantization.stored import StoredModel
from baton_serve.engine.model.quantized.online import linear_names, tied_embedding
from baton_serve.engine.model_folder import LOAD_ERRORS, first_line

ROW_PROCESSORS = ("TensorProcessor", "LlamaTensorProcessor", "Gemma2TensorProcessor", "NemotronTensorProcessor")
"""Of transformers: those that at most put a matrix's rows in another order, or add to vectors."""
MAX_DIMENSIONS = 2
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are one product where they are stored alike (engine.model.fused)."""
GGUF_ERRORS = (*LOAD_ERRORS, LookupError, NotImplementedError)
"""What readers of a broken or unknown file raise."""


def gguf_file(config: EngineConfig) -> Path | None:
    """The file that holds the weights; None: they lie in other files, or are made up. Raises `ModelError` or
    `ConfigError`."""
    path, folder = Path(config.model), model_folder(config.model)
    if config.load_format == "dummy":
        return None
    if path != folder:
        found = [path]
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
    else:
        found = sorted(folder.glob("*.gguf"))
        if config.load_format == "auto" and (not found or any(folder.glob("*.safetensors"))):
            return None
    if len(found) != 1:
        names = ", ".join(file.name for file in found)
        raise ModelError(
            f"{folder} has {len(found)} GGUF files{f' ({names})' if found else ''}; name one of them as the model"
        )
    _check(config)
    return found[0]


def gguf_layers(file: Path, skeleton: nn.Module, *, keep_codes: bool) -> StoredModel | None:
    """The file's tensors by the names of `skeleton`'s parameters, read when asked for; codes of linear layers as they
    are stored, unless they are to become numbers. None: only transformers puts this architecture's tensors together.
    Raises `ModelError`."""
    try:
        return _sorted(file, skeleton, keep_codes=keep_codes)
    except GGUF_ERRORS as exc:
        raise ModelError(f"the weights in {file} cannot be loaded: {first_line(exc)}") from exc


def gguf_tensors(file: Path, skeleton: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """In host memory, by the names of `skeleton`'s parameters. Raises `ModelError`."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # only such a model should cost it

    try:
        loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)
    except GGUF_ERRORS as exc:
        raise ModelError(f"the weights in {file} cannot be loaded: {first_line(exc)}") from exc
    return cast(dict[str, Tensor], loaded["tensors"])


def _sorted(file: Path, skeleton: nn.Module, *, keep_codes: bool) -> StoredModel | None:
    import gguf
    from transformers import modeling_gguf_pytorch_utils as theirs

    reader = gguf.GGUFReader(file)
    architecture = theirs.read_field(reader, "general.architecture")[0]
    processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)
    if processor.__name__ not in ROW_PROCESSORS:
        return None
    process = processor(config=theirs.load_gguf_checkpoint(str(file))["config"]).process
    names = theirs.get_gguf_hf_weights_map(skeleton, processor(config={}))
    tensors = {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names}
    if any(len(tensor.shape) > MAX_DIMENSIONS for tensor in tensors.values()):
        return None
    linears = {f"{name}.weight" for name in linear_names(skeleton)} if keep_codes else set()
    if (embedding := tied_embedding(skeleton)) is not None:
        tensors.pop("lm_head.weight", None)
    kept = {n for n, tensor in tensors.items() if n in linears and tensor.tensor_type.name not in FLOATS}
    stored = StoredModel(Gguf())
    for name, tensor in tensors.items():
        layer, kind = name.removesuffix(".weight"), str(tensor.tensor_type.name)
        if name in kept:
            ending = "" if _is_alike(name, tensors, kept) else ROUNDED
            stored.layers[layer] = {f".{kind}{ending}": partial(_blocks, tensor, process)}
        elif keep_codes and layer == embedding and kind not in FLOATS:
            # Rows are looked up in eight bits.
            stored.layers["lm_head"] = {
                f".{kind}{'' if kind == 'Q8_0' else ROUNDED}": partial(_blocks, tensor, process)
            }
        else:
            stored.plain[name] = partial(_numbers, tensor, process)
    return stored


def _is_alike(name: str, tensors: Mapping[str, Any], kept: set[str]) -> bool:
    """Whether those that become one product with this layer are stored like it."""
    for joined in JOINED:
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf in joined:
            every = [name.replace(f".{leaf}.weight", f".{other}.weight") for other in joined]
            return len({kept_as(tensors[n].tensor_type.name) for n in every if n in kept}) == 1
    return True


def _blocks(tensor: Any, process: Callable[..., Any]) -> Tensor:
    """uint8 [outputs, bytes], outputs in the model's order, which is not the file's in every architecture."""
    rows = torch.from_numpy(np.array(tensor.data)).view(torch.uint8)
    order = process(weights=np.arange(len(rows), dtype=np.float32)[:, None], name=tensor.name).weights
    return rows[torch.from_numpy(np.array(order)).long().squeeze(1)]


def _numbers(tensor: Any, process: Callable[..., Any]) -> Tensor:
    import gguf

    kind = tensor.tensor_type.name
    if kind in FLOATS:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    else:
        weights = torch.cat(list(numbers(torch.from_numpy(np.array(tensor.data)), kind))).numpy()
    return torch.from_numpy(np.array(process(weights=weights, name=tensor.name).weights))


def _check(config: EngineConfig) -> None:
    if config.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size: weights in a GGUF file are read by one device; convert the model")
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedModelError(
            "weights in a GGUF file are read with the Python package gguf, which is not installed:"
            " pip install 'baton-serve[gguf]'"
        )
