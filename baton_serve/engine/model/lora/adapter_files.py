"""Reads a LoRA adapter's folder as PEFT writes it: adapter_config.json and adapter_model.safetensors; refuses what is
not supported.

Every defect of a folder is raised as an `AdapterError` that names the folder and the cause.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton_serve.engine.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.[^.]+)?\.weight")
"""Names of PEFT's tensors: module, which of the two matrices, and optionally the adapter's name."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA", None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}),
}
"""Settings that change an adapter's arithmetic, with the values for which it is the plain product of two matrices."""
MERGE = "merge the adapter into the model (merge_and_unload of PEFT) and serve the result"
"""The remedy for adapters that are more than products beside linear layers."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The two LoRA matrices of one linear layer. The adapter adds `up @ down @ x` to its output; `up` contains the
    scale (alpha / r).
    """

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter with its weights. `fingerprint` is a hash of its config and weights, independent of path and
    name.
    """

    name: str
    path: str
    fingerprint: str
    rank: int
    products: Mapping[str, LowRank]
    """One product for each module to whose output it is added."""
    at_run_time: bool = False
    """True if it was loaded after the start, over HTTP."""
    base_model_name: str | None = None
    """The model that it was made for, as the operator calls it; None: not stated."""

    def to(self, device: torch.device) -> "Adapter":
        """Return a copy of the adapter whose weights are on `device`."""
        products = {
            module: LowRank(product.down.to(device), product.up.to(device)) for module, product in self.products.items()
        }
        return replace(self, products=products)


def read_adapter(name: str, folder: Path, *, dtype: torch.dtype, at_run_time: bool = False) -> Adapter:
    """Read a LoRA adapter that PEFT has saved in a folder into host memory, with weights in `dtype`. `at_run_time`
    records that it is loaded after the start.

    Raises `AdapterError` if files are missing or broken, or if it is more than plain LoRA (such as DoRA).
    """
    config = _read_config(name, folder)
    weights = folder / WEIGHTS
    try:
        with safe_open(_regular(weights), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - a safetensors file is not iterable
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        with weights.open("rb") as file_bytes:
            while piece := file_bytes.read(1 << 20):
                digest.update(piece)
    except (OSError, SafetensorError) as exc:
        raise AdapterError(f"adapter {name}: {weights} cannot be read: {exc}") from exc
    pairs = _paired(name, tensors)
    products: dict[str, LowRank] = {}
    for module, (down, up) in pairs.items():
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
            raise AdapterError(f"adapter {name}: the matrices of {module} do not fit each other")
        # Scale in float32 before rounding to the model's dtype.
        scaled = up.float() * _scale(config, module, down.shape[0])
        products[module] = LowRank(down.to(dtype), scaled.to(dtype))
    rank = max(product.down.shape[0] for product in products.values())
    return Adapter(name, str(folder), digest.hexdigest()[:32], rank, products, at_run_time)


def target_modules(folder: Path) -> tuple[str, ...]:
    """Return the names of the modules that the adapter in a folder changes, as `target_modules` in its config states
    them: full names, or last parts such as "q_proj". Raises `AdapterError`.
    """
    config = _read_config(folder.name, folder)
    stated = config.get("target_modules")
    if not isinstance(stated, list) or not stated or not all(isinstance(name, str) for name in stated):
        raise AdapterError(f"adapter {folder.name}: target_modules in {folder / CONFIG} is not a list of names")
    return tuple(stated)


def _regular(path: Path) -> Path:
    """Return `path` itself. Raises `OSError` if it is not a regular file, since opening a named pipe would wait
    forever.
    """
    if not S_ISREG(path.stat().st_mode):
        raise OSError("it is not a regular file")
    return path


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json in the adapter's folder. Raises `AdapterError`, with `name` in its
    message, if it is broken or sets something that is not supported.
    """
    path = folder / CONFIG
    try:
        config = json.loads(_regular(path).read_text())
    except (OSError, ValueError) as exc:
        raise AdapterError(f"adapter {name}: {path} cannot be read: {exc}") from exc
    if not isinstance(config, dict) or not isinstance(config.get("r"), int):
        raise AdapterError(
            f"adapter {name}: {path} has no integer field 'r' (the LoRA rank); save the adapter with PEFT"
        )
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in neutral:
            raise AdapterError(f"adapter {name}: {key} = {config[key]!r} is not supported; {MERGE}")
    return config


def _paired(name: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the two LoRA matrices (A, B) of each module from the tensors of an adapter's file. Raises `AdapterError`
    for other tensors, and if a module lacks one of the two.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(
                f"adapter {name}: {key} is no LoRA matrix of a linear layer, and only those are supported; {MERGE}"
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise AdapterError(f"adapter {name} has no weights")
    if lonely := [module for module, pair in found.items() if len(pair) < 2]:
        raise AdapterError(f"adapter {name}: {lonely[0]} lacks one of its two matrices")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of a module's LoRA product: alpha / r, or alpha / sqrt(r) with `use_rslora`
    (https://arxiv.org/abs/2312.03732).

    A module may have an alpha of its own (`alpha_pattern`), whose patterns are matched as PEFT does it.
    """
    alpha = float(config.get("lora_alpha") or rank)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
