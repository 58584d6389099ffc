"""Models in the layout of the hub's cache, as if they had been downloaded."""

from pathlib import Path


def downloaded(cache: Path, name: str, commit: str) -> Path:
    """Write a complete model without contents into `cache`, and return its folder."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    found = folder / "snapshots" / commit
    found.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (found / file).write_text("{}")
    return found
