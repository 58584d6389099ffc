"""Write a LoRA adapter with random weights in PEFT's format, without torch."""

import json
import random
from array import array
from pathlib import Path

RANK = 4
STRENGTH = 0.1
"""Standard deviation of the weights: large enough to change most answers."""


def write_adapter(folder: Path, model: Path, *, seed: int = 0) -> Path:
    """Write an adapter of the query and value projections of the Llama model in `model`; return `folder`."""
    config = json.loads((model / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    widths = {
        "q_proj": config["num_attention_heads"] * head_dim,
        "v_proj": config["num_key_value_heads"] * head_dim,
    }
    tensors: dict[str, list[int]] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors |= {f"{prefix}.lora_A.weight": [RANK, hidden], f"{prefix}.lora_B.weight": [width, RANK]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors, random.Random(seed)))
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def _safetensors(shapes: dict[str, list[int]], rng: random.Random) -> bytes:
    """Return a file in the format of safetensors: length of the header, header in JSON, then all float32 values."""
    header: dict[str, object] = {}
    data = bytearray()
    for name, shape in shapes.items():
        values = array("f", (rng.gauss(0.0, STRENGTH) for _ in range(shape[0] * shape[1])))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(values)]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the values must be aligned
    return len(text).to_bytes(8, "little") + text + data
