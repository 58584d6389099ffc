"""Computes the hash that identifies weights and config, so that only instances with equal ones share KV blocks.

It hashes the config, the header of each weight file and samples of its bytes. This takes seconds even for large models,
and does not depend on the files' place or time.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from baton_serve.engine.config import EngineConfig
from baton_serve.engine.model_folder import weight_files

NUM_SAMPLES = 64
"""Number of places at which a weight file is sampled."""
SAMPLE_BYTES = 4096
"""Size of each sample in bytes."""
MAX_HEADER_BYTES = 100 << 20
"""Largest header that is hashed, in bytes."""
OTHER_HEADER_BYTES = 1 << 20  # of other formats; hashed whole: it contains names, shapes and the first weights
VOLATILE_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
"""Fields of config.json that do not change the KV, or that are part of the variant."""


def weights_fingerprint(folder: Path, variant: str, files: Sequence[Path]) -> str:
    """Return a hash that identifies the weights in `files` and the folder's config, so that instances share KV only if
    it was computed by equal weights. `variant` describes everything else that changes the KV, such as quantization.

    To be fast, it reads samples of the files.
    """
    digest = _config_digest(folder, variant)
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            start = file.read(8)
            # safetensors begins with the header's length
            is_safe = path.suffix == ".safetensors"
            header_bytes = int.from_bytes(start, "little") if is_safe else min(size, OTHER_HEADER_BYTES) - 8
            digest.update(file.read(min(header_bytes, MAX_HEADER_BYTES)))
            # Samples at equal distances, the last one at the end of the file.
            for sample in range(NUM_SAMPLES):
                file.seek(
                    8 + header_bytes + max(0, size - 8 - header_bytes - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1)
                )
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def encoder_fingerprint(folder: Path, config: EngineConfig, settings: object, device: str) -> str:
    """Return the hash of everything that the outputs of a model's encoder depend on beside their file: weights, and
    `settings` of processors, which are JSON values. `device` is as in `dummy_fingerprint`.

    It does not depend on what changes only the decoder, such as a quantization or a length: an encode instance does not
    load it.
    """
    variant = json.dumps(["embeddings", settings], sort_keys=True, default=str)
    if config.load_format == "dummy":
        found = dummy_fingerprint(folder, variant, seed=config.seed, device=device)
    else:
        found = weights_fingerprint(folder, variant, weight_files(folder, config.load_format, config.loader.pattern))
    return versioned(found, config.weights_version)


def dummy_fingerprint(folder: Path, variant: str, *, seed: int, device: str) -> str:
    """Return the hash that identifies random weights (load format dummy) and the folder's config. `variant`
    describes everything else that changes the KV. `device` is the kind of device: each draws other numbers from the
    same `seed`."""
    digest = _config_digest(folder, variant)
    digest.update(f"dummy:{seed}:{device}".encode())
    return digest.hexdigest()[:32]


def versioned(fingerprint: str, version: str) -> str:
    """Return the fingerprint of weights that replaced others while the instance ran. `version` identifies the update;
    it is empty for the weights of the start.

    `weights_fingerprint` reads samples only, which may miss a small change of the weights; their KV must differ in any
    case.
    """
    if not version:
        return fingerprint
    return hashlib.sha256(f"{fingerprint}:{version}".encode()).hexdigest()[:32]


def _config_digest(folder: Path, variant: str) -> "hashlib._Hash":
    """Return a hash object over a folder's config.json and `variant`, to which the caller adds the weights."""
    config = json.loads((folder / "config.json").read_text())
    # Saving a folder again with another version of transformers must not change the fingerprint.
    kept = {key: value for key, value in config.items() if key not in VOLATILE_KEYS}
    return hashlib.sha256(json.dumps([kept, variant], sort_keys=True).encode())
