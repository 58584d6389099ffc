"""Identifies the weights that compute a KV cache, so that two instances exchange blocks only if theirs are equal.

Reads the config, each weight file's header and samples of its bytes: seconds even for large models,
and independent of where and when the files were written.
"""

import hashlib
import json
from pathlib import Path

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 << 20
GGUF_HEADER_BYTES = 1 << 20  # read whole: names, shapes and the first weights
VOLATILE_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")


def weights_fingerprint(folder: Path, variant: str, gguf: Path | None = None) -> str:
    """`variant` names whatever else changes the KV, such as a frozen choice of rotary frequencies; `gguf` is the file
    that holds the weights, where it is one."""
    digest = _config_digest(folder, variant)
    for path in sorted(folder.glob("*.safetensors")) if gguf is None else [gguf]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little") if gguf is None else min(size, GGUF_HEADER_BYTES) - 8
            digest.update(file.read(min(header_bytes, MAX_HEADER_BYTES)))
            for sample in range(NUM_SAMPLES):
                file.seek(
                    8 + header_bytes + max(0, size - 8 - header_bytes - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1)
                )
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def dummy_fingerprint(folder: Path, variant: str, *, seed: int, device: str) -> str:
    """Of random weights. Each kind of device draws other numbers from one seed."""
    digest = _config_digest(folder, variant)
    digest.update(f"dummy:{seed}:{device}".encode())
    return digest.hexdigest()[:32]


def _config_digest(folder: Path, variant: str) -> "hashlib._Hash":
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in VOLATILE_KEYS}
    return hashlib.sha256(json.dumps([kept, variant], sort_keys=True).encode())
