"""Where a model's files lie, given what `--model` says."""

from pathlib import Path


def model_folder(model: str) -> Path:
    """The folder of a model that is named by its folder, or by a GGUF file in it."""
    path = Path(model)
    return path.parent if path.suffix == ".gguf" else path
