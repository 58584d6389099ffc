"""Reads weights from a GGUF file, under the names that transformers has for them.

The file is in a folder in Hugging Face format, whose config and tokenizer are used (gguf_folder makes such a folder).
Linear layers keep their codes (quantization.checkpoints.gguf). For architectures whose tensors transformers splits or
stacks, such as mixtures of experts, the weights become floats in host memory instead.
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
"""Classes of transformers that at most reorder a matrix's rows or change vectors, so that codes can be kept."""
MAX_DIMENSIONS = 2
"""Largest number of dimensions of a tensor whose codes are kept. Stacked experts have three."""
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that run as one product if they are stored in the same format (engine.model.fused)."""
GGUF_ERRORS = (*LOAD_ERRORS, LookupError, NotImplementedError)
"""Errors that readers raise for a broken or unknown file."""


def gguf_file(config: EngineConfig) -> Path | None:
    """Return the file with the weights, or None if they are in other files or random.

    Raises `ModelError` if the folder does not have exactly one such file, and `ConfigError` for unsupported settings.
    """
    path, folder = Path(config.model), model_folder(config.model)
    if config.load_format == "dummy":
        return None
    if path != folder:
        found = [path]
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
    else:
        found = sorted(folder.glob("*.gguf"))
        # With `auto`, safetensors files in the folder come first.
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
    """Return readers of the file's tensors by the names of `skeleton`'s parameters. `keep_codes` leaves linear layers
    coded.

    Return None if only transformers can convert this architecture. Raises `ModelError` if the file is broken.
    """
    try:
        return _sorted(file, skeleton, keep_codes=keep_codes)
    except GGUF_ERRORS as exc:
        raise ModelError(f"the weights in {file} cannot be loaded: {first_line(exc)}") from exc


def gguf_tensors(file: Path, skeleton: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights in host memory, by the names of `skeleton`'s parameters. Raises `ModelError`."""
    # takes seconds: only such models should pay them
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)
    except GGUF_ERRORS as exc:
        raise ModelError(f"the weights in {file} cannot be loaded: {first_line(exc)}") from exc
    return cast(dict[str, Tensor], loaded["tensors"])


def _sorted(file: Path, skeleton: nn.Module, *, keep_codes: bool) -> StoredModel | None:
    """Sort the file's tensors into layers that keep their codes and tensors that become floats."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as theirs

    reader = gguf.GGUFReader(file)
    architecture = theirs.read_field(reader, "general.architecture")[0]
    processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)
    # Other processors compute with the values, which codes do not allow.
    if processor.__name__ not in ROW_PROCESSORS:
        return None
    # The processors undo what llama.cpp's converter did to the weights, for example its order of rotated rows.
    process = processor(config=theirs.load_gguf_checkpoint(str(file))["config"]).process
    names = theirs.get_gguf_hf_weights_map(skeleton, processor(config={}))
    tensors = {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names}
    # Stacked experts.
    if any(len(tensor.shape) > MAX_DIMENSIONS for tensor in tensors.values()):
        return None
    linears = {f"{name}.weight" for name in linear_names(skeleton)} if keep_codes else set()
    # The file has a copy of the shared weight only if its maker wrote one.
    if (embedding := tied_embedding(skeleton)) is not None:
        tensors.pop("lm_head.weight", None)
    # Tensors of floats are read as floats, even of linear layers.
    kept = {n for n, tensor in tensors.items() if n in linears and tensor.tensor_type.name not in FLOATS}
    stored = StoredModel(Gguf())
    for name, tensor in tensors.items():
        layer, kind = name.removesuffix(".weight"), str(tensor.tensor_type.name)
        if name in kept:
            # Q, K and V are often stored with different bits, but one product needs one format.
            ending = "" if _is_alike(name, tensors, kept) else ROUNDED
            stored.layers[layer] = {f".{kind}{ending}": partial(_blocks, tensor, process)}
        elif keep_codes and layer == embedding and kind not in FLOATS:
            # The head and the embedding share this weight. Rows are looked up in eight bits.
            stored.layers["lm_head"] = {
                f".{kind}{'' if kind == 'Q8_0' else ROUNDED}": partial(_blocks, tensor, process)
            }
        else:
            stored.plain[name] = partial(_numbers, tensor, process)
    return stored


def _is_alike(name: str, tensors: Mapping[str, Any], kept: set[str]) -> bool:
    """Return whether all layers that become one product with this one are stored in the same way."""
    for joined in JOINED:
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf in joined:
            every = [name.replace(f".{leaf}.weight", f".{other}.weight") for other in joined]
            return len({kept_as(tensors[n].tensor_type.name) for n in every if n in kept}) == 1
    return True


def _blocks(tensor: Any, process: Callable[..., Any]) -> Tensor:
    """Return a layer's blocks, uint8 [outputs, bytes], in the model's order of outputs."""
    rows = torch.from_numpy(np.array(tensor.data)).view(torch.uint8)
    # Send row numbers through the processor, to learn how it would reorder the rows.
    order = process(weights=np.arange(len(rows), dtype=np.float32)[:, None], name=tensor.name).weights
    return rows[torch.from_numpy(np.array(order)).long().squeeze(1)]


def _numbers(tensor: Any, process: Callable[..., Any]) -> Tensor:
    """Return a tensor as float32, converted to transformers' form."""
    import gguf

    kind = tensor.tensor_type.name
    if kind in FLOATS:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    else:
        weights = torch.cat(list(numbers(torch.from_numpy(np.array(tensor.data)), kind))).numpy()
    return torch.from_numpy(np.array(process(weights=weights, name=tensor.name).weights))


def _check(config: EngineConfig) -> None:
    """Raise `ConfigError` or `UnsupportedModelError` if GGUF files cannot be used with these settings."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "tensor_parallel_size: GGUF files need one device; set it to 1, or convert the model to safetensors"
        )
    # Optional, because most installs serve safetensors only.
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedModelError(
            "GGUF files need the Python package gguf, which is not installed: pip install 'baton-serve[gguf]'"
        )
