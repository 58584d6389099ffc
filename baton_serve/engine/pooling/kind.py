"""What a model in a folder is for: writing text, embedding it, or classifying it. Reads two JSON files, loads nothing.

The rules are vLLM's: an explicit task wins, then a Sentence Transformers folder embeds, then the architecture's name
decides.
"""

import json
from pathlib import Path
from typing import Literal

from baton_serve.engine.config import RunnerType, Task
from baton_serve.engine.errors import ConfigError

ModelKind = Literal["generate", "embed", "classify"]

CLASSIFIER_SUFFIXES = ("ForSequenceClassification",)
GENERATOR_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
EMBEDDER_SUFFIXES = ("Model", "ForTextEncoding", "ForMaskedLM")


def detect_model_kind(folder: Path, *, runner: RunnerType = "auto", task: Task = "auto") -> ModelKind:
    """A folder that cannot be read counts as a writer: loading it tells what is wrong.

    Raises `ConfigError` for a runner and a task that contradict each other.
    """
    if task != "auto" and runner != "auto" and (runner == "generate") != (task == "generate"):
        raise ConfigError(f"--runner {runner} and --task {task} contradict each other; give one of them")
    if runner == "generate" or task == "generate":
        return "generate"
    if task in ("embed", "classify"):
        return "embed" if task == "embed" else "classify"
    found = _by_folder(folder)
    if task == "score":
        # Of an embedding model the score is the cosine of two embeddings; of a writer, that of two of its tokens.
        return "classify" if found == "generate" else found
    return "embed" if runner == "pooling" and found == "generate" else found


def architecture_of(folder: Path) -> str:
    """Empty where config.json names none."""
    names = _read(folder / "config.json").get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _by_folder(folder: Path) -> ModelKind:
    if (folder / "modules.json").is_file():
        return "embed"
    name = architecture_of(folder)
    if name.endswith(CLASSIFIER_SUFFIXES):
        return "classify"
    if name.endswith(GENERATOR_SUFFIXES) or not name.endswith(EMBEDDER_SUFFIXES):
        return "generate"
    return "embed"


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
