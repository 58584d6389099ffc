"""Maps the tensors of a GGUF file to a model's parameters; their quantized blocks are decoded in
`quantization/checkpoints/gguf.py`.

The file is in a folder in Hugging Face format, whose config and tokenizer are used (gguf_folder makes such a folder).
Linear layers keep their codes (quantization.checkpoints.gguf). Dense decoders of known families need no transformers.
For architectures whose tensors transformers splits or stacks, such as mixtures of experts, the weights become floats in
host memory instead.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from baton_serve.contracts.model_path import gguf_parts, model_folder
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ConfigError, ModelError, UnsupportedModelError
from baton_serve.engine.loading.gguf_header import GgufFormatError, GgufTensor, read_gguf
from baton_serve.engine.loading.gguf_metadata import CLASSES
from baton_serve.engine.loading.native.dense_config import DenseConfig
from baton_serve.engine.loading.quantization.checkpoints.gguf import FLOATS, ROUNDED, Gguf, kept_as, numbers
from baton_serve.engine.loading.quantization.prequantized import StoredModel
from baton_serve.engine.model.quantized.quantization_plan import linear_names, tied_embedding
from baton_serve.engine.model_folder import GGUF_ERRORS, first_line

ROW_PROCESSORS = ("TensorProcessor", "LlamaTensorProcessor", "Gemma2TensorProcessor", "NemotronTensorProcessor")
"""Classes of transformers that at most reorder a matrix's rows or change vectors, so that codes can be kept."""
MAX_DIMENSIONS = 2
"""Largest number of dimensions of a tensor whose codes are kept. Stacked experts have three."""
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that run as one product if they are stored in the same format (engine.model.fused_forward)."""
DENSE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules of dense decoders by llama.cpp's names of tensors."""
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer of dense decoders by llama.cpp's names of tensors."""
Array = NDArray[Any]
Restore = Callable[[Array, str], Array]
"""Converts the rows of a tensor, given with its name, to the model's form."""


def gguf_file(config: EngineConfig) -> Path | None:
    """Return the GGUF file that has the model's weights, or None if they are in other files or random.

    Raises `ModelError` if the folder does not have exactly one such file, and `ConfigError` for unsupported settings.
    """
    path, folder = Path(config.model), model_folder(config.model)
    if config.load_format not in ("auto", "gguf"):
        if path != folder and config.load_format != "dummy":
            raise ConfigError(f"load_format is {config.load_format}, but {path} is a GGUF file: leave out the format")
        return None
    if path != folder:
        found = [path]
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
    else:
        found = sorted(path for path in folder.glob("*.gguf") if gguf_parts(path)[0] == path)
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
    """Return functions that read the weights of a GGUF file for the parameters of `skeleton`, a model without memory.
    With `keep_codes` linear layers stay quantized as in the file, otherwise all become floats.

    Return None if only transformers can convert this architecture. Raises `ModelError` if the file is broken.
    """
    try:
        return _converted(file, skeleton, keep_codes=keep_codes)
    except GGUF_ERRORS as exc:
        raise _unreadable(file, exc) from exc


def gguf_tensors(file: Path, skeleton: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read all weights of a GGUF file with transformers. Return them in host memory, in `dtype`, by the names of the
    parameters of `skeleton`. Raises `ModelError` if the file is split or broken."""
    if gguf_parts(file) != [file]:
        raise ModelError(
            f"{file} is split, and its architecture is read by transformers, which needs one file: join the parts with"
            " `llama-gguf-split --merge`"
        )
    # takes seconds: only such models should pay them
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)
    except GGUF_ERRORS as exc:
        raise _unreadable(file, exc) from exc
    return cast(dict[str, Tensor], loaded["tensors"])


def dense_layers(file: Path, skeleton: nn.Module, dense: DenseConfig) -> StoredModel | None:
    """Return functions that read the weights of a GGUF file for `skeleton`, a decoder of a known family with the config
    `dense`, without transformers. Linear layers stay quantized as in the file.

    Return None if the file has other tensors than such a decoder. Raises `ModelError` if the file is broken.
    """
    try:
        parsed = read_gguf(file)
    except (GgufFormatError, OSError) as exc:
        raise _unreadable(file, exc) from exc
    if parsed.architecture not in CLASSES:
        return None
    tensors = {dense_name(name): tensor for name, tensor in parsed.tensors.items()}
    shapes = {name: tuple(part.shape) for name, part in skeleton.named_parameters(remove_duplicate=False)}
    if set(tensors) - set(shapes):
        return None
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise ModelError(
                f"the weights in {file} cannot be loaded: {tensor.name} has shape {list(tensor.shape)}, but the config"
                f" asks for {list(shapes[name])}"
            )
    heads = {"attn_q": dense.num_heads, "attn_k": dense.num_kv_heads} if parsed.architecture == "llama" else {}

    def restore(weights: Array, name: str) -> Array:
        # llama.cpp's converter puts the two rows that are rotated together side by side.
        if (count := heads.get(name.split(".")[-2])) is None:
            return weights
        pairs = weights.reshape(count, -1, 2, *weights.shape[1:])
        return pairs.swapaxes(1, 2).reshape(weights.shape)

    return _sort(tensors, skeleton, restore, keep_codes=True)


def dense_name(name: str) -> str:
    """Return the name in a safetensors checkpoint for a tensor that llama.cpp calls `name`, in decoders like Llama and
    Qwen; "" if it has none."""
    stem, _, leaf = name.rpartition(".")
    if stem in DENSE_NAMES:
        return f"{DENSE_NAMES[stem]}.{leaf}"
    block, _, part = stem.partition(".")[2].partition(".")
    return f"model.layers.{block}.{LAYER_NAMES[part]}.{leaf}" if part in LAYER_NAMES else ""


def _unreadable(file: Path, exc: BaseException) -> ModelError:
    """Return the `ModelError` for a GGUF file that cannot be read because of `exc`."""
    cause = str(exc) if isinstance(exc, GgufFormatError) else first_line(exc)
    return ModelError(f"the weights in {file} cannot be loaded: {cause}")


def _converted(file: Path, skeleton: nn.Module, *, keep_codes: bool) -> StoredModel | None:
    """Return functions that read the weights of a GGUF file, with transformers' rules to undo what llama.cpp changed in
    this architecture. None if these rules cannot be applied to quantized weights."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    parsed = read_gguf(file)
    processor = theirs.TENSOR_PROCESSORS.get(parsed.architecture, theirs.TensorProcessor)
    # Other processors compute with the values, which codes do not allow.
    if processor.__name__ not in ROW_PROCESSORS:
        return None
    # The processors undo what llama.cpp's converter did to the weights, for example its order of rotated rows.
    process = processor(config=cast(Any, skeleton).config.get_text_config().to_dict()).process
    names = tensor_names(skeleton, parsed.architecture)
    tensors = {names[name]: tensor for name, tensor in parsed.tensors.items() if name in names}
    # Stacked experts.
    if any(len(tensor.shape) > MAX_DIMENSIONS for tensor in tensors.values()):
        return None

    def restore(weights: Array, name: str) -> Array:
        return cast(Array, process(weights=weights, name=name).weights)

    return _sort(tensors, skeleton, restore, keep_codes=keep_codes)


def tensor_names(skeleton: nn.Module, architecture: str) -> dict[str, str]:
    """Return the names of the model's parameters, by the names of llama.cpp's tensors. `skeleton` is the model and
    `architecture` llama.cpp's name of its architecture.

    The result equals that of transformers' `get_gguf_hf_weights_map`, which is slower. Raises `NotImplementedError` for
    an architecture that the package gguf does not know.
    """
    import gguf

    found = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if found is None:
        raise NotImplementedError(f"the package gguf does not know the architecture {architecture!r}: upgrade it")
    config = cast(Any, skeleton).config.get_text_config()
    known = gguf.get_tensor_name_map(found, config.num_hidden_layers)
    names: dict[str, str] = {}
    parameters = list(skeleton.state_dict())
    # Some files were made from a model without head, so names that are relative to a module count too.
    for module, _ in skeleton.named_modules():
        own: dict[str, str] = {}
        prefix = f"{module}." if module else ""
        for full in parameters:
            if full.startswith(prefix):
                stem, dot, leaf = full.removeprefix(prefix).rpartition(".")
                stem, ending = (stem, dot + leaf) if leaf in ("weight", "bias") and dot else (stem + dot + leaf, "")
                if (short := known.get_name(stem)) is not None:
                    own[short + ending] = full
        names = own | names
    return names


def _sort(tensors: dict[str, GgufTensor], skeleton: nn.Module, restore: Restore, *, keep_codes: bool) -> StoredModel:
    """Divide the tensors of a GGUF file, by the model's names, into linear layers that stay quantized (with
    `keep_codes`) and tensors that become floats. `restore` undoes what llama.cpp changed in a tensor."""
    linears = {f"{name}.weight" for name in linear_names(skeleton)} if keep_codes else set()
    # The file has a copy of the shared weight only if its maker wrote one.
    if (embedding := tied_embedding(skeleton)) is not None:
        tensors.pop("lm_head.weight", None)
    # Tensors of floats are read as floats, even of linear layers.
    kept = {n for n, tensor in tensors.items() if n in linears and tensor.kind not in FLOATS}
    stored = StoredModel(Gguf())
    for name, tensor in tensors.items():
        layer, kind = name.removesuffix(".weight"), tensor.kind
        if name in kept:
            # Q, K and V are often stored with different bits, but one product needs one format.
            ending = "" if _is_alike(name, tensors, kept) else ROUNDED
            stored.layers[layer] = {f".{kind}{ending}": partial(_blocks, tensor, restore)}
        elif keep_codes and layer == embedding and kind not in FLOATS:
            # The head and the embedding share this weight. Rows are looked up in eight bits.
            stored.layers["lm_head"] = {
                f".{kind}{'' if kind == 'Q8_0' else ROUNDED}": partial(_blocks, tensor, restore)
            }
        else:
            stored.plain[name] = partial(_numbers, tensor, restore)
    return stored


def _is_alike(name: str, tensors: Mapping[str, GgufTensor], kept: set[str]) -> bool:
    """Return whether all layers that are joined with this one to a single matrix product, such as Q, K and V, are kept
    in the same form, so that they can be joined. `kept` are the quantized ones."""
    for joined in JOINED:
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf in joined:
            every = [name.replace(f".{leaf}.weight", f".{other}.weight") for other in joined]
            return len({kept_as(tensors[n].kind) for n in every if n in kept}) == 1
    return True


def _blocks(tensor: GgufTensor, restore: Restore) -> Tensor:
    """Return the quantized rows of a layer, uint8 [outputs, bytes], in the model's order of outputs. It is a view of
    the file if the order there is the same."""
    rows = torch.from_numpy(tensor.data)
    # Send row numbers through the function, to learn how it would reorder the rows.
    numbered = np.arange(len(rows), dtype=np.float32)[:, None]
    order = restore(numbered, tensor.name)
    return rows if np.array_equal(order, numbered) else rows[torch.from_numpy(np.array(order)).long().squeeze(1)]


def _numbers(tensor: GgufTensor, restore: Restore) -> Tensor:
    """Return a tensor of a GGUF file as float32, after `restore` has undone what llama.cpp changed in it."""
    rows = torch.from_numpy(np.array(tensor.data))
    if tensor.kind in FLOATS:
        weights = rows.view(FLOATS[tensor.kind]).float()
    else:
        weights = torch.cat(list(numbers(rows.view(-1, rows.shape[-1]), tensor.kind))).view(tensor.shape)
    return torch.from_numpy(np.array(restore(weights.numpy(), tensor.name)))


def _check(config: EngineConfig) -> None:
    """Check that the package gguf is installed and that these settings support GGUF files. Raises
    `UnsupportedModelError` or `ConfigError` if not."""
    # Optional, because most installs serve safetensors only.
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedModelError(
            "GGUF files need the Python package gguf, which is not installed: pip install 'baton-serve[gguf]'"
        )
