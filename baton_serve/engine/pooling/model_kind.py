"""Decides whether a model generates, embeds or classifies (`--task`, `--runner`), from two JSON files. Reads two JSON
files and loads nothing.

The rules are vLLM's: an explicit task wins, then a Sentence Transformers folder means embeddings, then the
architecture's name decides.
"""

import json
from pathlib import Path
from typing import Literal

from baton_serve.engine.config import RunnerType, Task
from baton_serve.engine.errors import ConfigError

ModelKind = Literal["generate", "embed", "classify"]

CLASSIFIER_SUFFIXES = ("ForSequenceClassification",)
"""Ends of the names of architectures that classify."""
GENERATOR_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Ends of the names of architectures that generate text."""
EMBEDDER_SUFFIXES = ("Model", "ForRetrieval", "ForTextEncoding", "ForMaskedLM")
"""Ends of the names of architectures that embed."""


def detect_model_kind(folder: Path, *, runner: RunnerType = "auto", task: Task = "auto") -> ModelKind:
    """Return what the model in a folder computes: "generate" (text), "embed" or "classify". `runner` and `task` are the
    options of vLLM; "auto": decide by the files.

    A folder that cannot be read counts as "generate": loading it then reports the cause. Raises `ConfigError` if
    `runner` and `task` contradict each other.
    """
    if task != "auto" and runner != "auto" and (runner == "generate") != (task == "generate"):
        raise ConfigError(f"--runner {runner} and --task {task} contradict each other; give one of them")
    if runner == "generate" or task == "generate":
        return "generate"
    if task in ("embed", "classify"):
        return "embed" if task == "embed" else "classify"
    found = _by_folder(folder)
    if task == "score":
        # An embedding model scores a pair by the cosine. A text generator is taken for a classifier that decides
        # between two of its tokens (Qwen3-Reranker).
        return "classify" if found == "generate" else found
    return "embed" if runner == "pooling" and found == "generate" else found


def architecture_of(folder: Path) -> str:
    """Return the name of the model's class that config.json states; "" if it states none or cannot be read."""
    names = _read(folder / "config.json").get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _by_folder(folder: Path) -> ModelKind:
    # modules.json is the mark of a Sentence Transformers folder.
    """Return what a model computes, by the files of its folder and the name of its class."""
    if (folder / "modules.json").is_file():
        return "embed"
    name = architecture_of(folder)
    if name.endswith(CLASSIFIER_SUFFIXES):
        return "classify"
    if name.endswith(GENERATOR_SUFFIXES) or not name.endswith(EMBEDDER_SUFFIXES):
        return "generate"
    return "embed"


def _read(path: Path) -> dict[str, object]:
    """Return the object in a JSON file; an empty one if the file is missing or broken."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
