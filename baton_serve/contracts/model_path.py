"""Finds the folder of a model from the value of `--model`."""

from pathlib import Path


def model_folder(model: str) -> Path:
    """Return the folder of a model that is given as a folder or as a GGUF file in it."""
    path = Path(model)
    return path.parent if path.suffix == ".gguf" else path
