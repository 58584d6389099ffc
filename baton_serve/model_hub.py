"""Finds a model by its name on the Hugging Face hub, and decides which of its files are downloaded.

In the cache of huggingface_hub, `models--ORG--NAME/refs/main` contains a commit, and `snapshots/COMMIT` is the model's
folder. A complete snapshot is used without a request to the hub.
"""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton_serve.contracts.model_path import gguf_parts, has_tokenizer

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")
"""The form of a model's name on the hub: ORG/NAME, and for a GGUF file of it ORG/NAME:Q4_K_M."""
_SMALL_FILES = re.compile(r"[^/]+\.(json|jinja|txt|model|tiktoken|py)")
"""Configs, tokenizers and chat templates. They lie at the top of a repository."""
_MODULE_FILES = re.compile(r"\d+_\w+/[^/]+\.(json|safetensors)")
"""The further modules of an embedding model in the format of sentence-transformers, such as `1_Pooling/config.json`."""
_OTHER_GGUFS = ("mmproj", "imatrix")
"""How the names of other GGUF files than language models begin: vision towers, and statistics for quantization."""
_PICKLE = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
"""Weights in PyTorch's own format."""
_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*")
"""The form of a branch, a tag or a commit."""
_OFF = ("", "0", "false", "no", "off")


class HubError(Exception):
    """A model cannot be found or downloaded. The message names the cause and the remedy."""


def is_hub_name(model: str) -> bool:
    """Return whether `model` has the form ORG/NAME or ORG/NAME:GGUF and is not a path that exists."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def is_offline(environ: Mapping[str, str]) -> bool:
    """Return whether HF_HUB_OFFLINE forbids requests to the hub."""
    return any(environ.get(name, "").lower() not in _OFF for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def find_model(
    model: str, environ: Mapping[str, str], *, weights: bool = True, revision: str | None = None
) -> Path | None:
    """Return the folder or the GGUF file of a model in the cache, or None if it has not been downloaded completely.

    Without `weights`, a folder with config and tokenizer is enough. Raises `HubError` if `revision` has no valid form.
    """
    name, _, kind = model.partition(":")
    folder = _cache(environ) / f"models--{name.replace('/', '--')}"
    revision = revision or "main"
    # It becomes a part of a path.
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise HubError(f"{revision!r} is not a revision of {name}: give a branch, a tag or a commit")
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    snapshot = folder / "snapshots" / commit
    if not kind and _is_complete(snapshot, weights=weights):
        return snapshot
    ggufs = _of_kind([str(file) for file in snapshot.rglob("*.gguf") if file.is_file()], kind)
    firsts = [Path(file) for file in _firsts(ggufs)]
    if len(firsts) != 1 or not all(part.is_file() for part in gguf_parts(firsts[0])):
        return None
    return firsts[0]


def obtain_model(
    model: str,
    environ: Mapping[str, str],
    *,
    offline: bool = False,
    weights: bool = True,
    revision: str | None = None,
) -> Path:
    """Return the folder or the GGUF file of a model. Download what is missing, with a progress bar on a terminal.

    Without `weights`, a folder may lack them, as a router does not need them. `revision` is a branch, tag or commit.
    Raises `HubError` if the model is not in the cache and cannot be downloaded.
    """
    if environ.get("VLLM_USE_MODELSCOPE", "").lower() not in _OFF:
        return _of_modelscope(model, environ, offline=offline, revision=revision)
    if (found := find_model(model, environ, weights=weights, revision=revision)) is not None:
        return found
    if offline or is_offline(environ):
        which, more = ("", "") if revision is None else (f" (revision {revision})", f" --revision {revision}")
        raise HubError(
            f"{model}{which} is neither a folder nor in the Hugging Face cache, and downloads are off (--offline or"
            f" HF_HUB_OFFLINE): run `baton pull {model}{more}` with a network, or give a folder"
        )
    _download(model, environ, weights=weights, revision=revision)
    if (found := find_model(model, environ, weights=weights, revision=revision)) is None:
        raise HubError(
            f"{model}: files are missing after the download: run `baton pull {model}` again, which resumes it"
        )
    return found


def choose_files(model: str, files: Sequence[str], *, weights: bool = True) -> list[str]:
    """Return the names in `files`, a repository's files, that serving needs: configs, tokenizer and weights.

    A GGUF file contains all of these, so it is then the only one. Without `weights`, safetensors are left out. Raises
    `HubError` if it has no weights in a usable format, or several GGUF files and `model` names none of them.
    """
    name, _, kind = model.partition(":")
    small = [file for file in files if _SMALL_FILES.fullmatch(file) or _MODULE_FILES.fullmatch(file)]
    ggufs = _of_kind(files, kind)
    tensors = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    # Mistral's repositories hold the weights twice; `consolidated` is the format of its own library.
    tensors = [file for file in tensors if not file.startswith("consolidated")] or tensors
    # Older repositories have PyTorch's format only.
    tensors = tensors or ([] if ggufs else [file for file in files if _PICKLE.fullmatch(file)])
    if tensors and not kind:
        return small + tensors if weights else small
    # Not the small files: a config without its tokenizer, as some of these repositories have, would hide the file's.
    if len(_firsts(ggufs)) == 1:
        return ggufs
    if ggufs or kind:
        listed = ", ".join(file for file in files if file.endswith(".gguf")) or "none"
        raise HubError(
            f"{model} does not name one GGUF file: give {name}:KIND, such as {name}:Q4_K_M (files: {listed})"
        )
    raise HubError(
        f"{model} has no *.safetensors, *.gguf or pytorch_model.bin files: convert the weights, and give that folder"
    )


def _of_modelscope(model: str, environ: Mapping[str, str], *, offline: bool, revision: str | None) -> Path:
    """Return the folder of a model of ModelScope, by its own package. Raises `HubError`."""
    try:
        snapshot_download = importlib.import_module("modelscope.hub.snapshot_download").snapshot_download
    except ImportError as exc:
        raise HubError(
            f"{model}: VLLM_USE_MODELSCOPE needs the package modelscope: run `pip install modelscope`, or unset the"
            " variable to use the Hugging Face hub"
        ) from exc
    try:
        return Path(
            snapshot_download(
                model_id=model,
                cache_dir=environ.get("HF_HUB_CACHE") or None,
                revision=revision,
                local_files_only=offline or is_offline(environ),
            )
        )
    # The package documents no errors.
    except Exception as exc:
        raise HubError(f"{model} cannot be downloaded from ModelScope: {_first_line(exc)}: check the name") from exc


def _download(model: str, environ: Mapping[str, str], *, weights: bool, revision: str | None) -> None:
    # The import takes a third of a second, which a start from the cache must not pay for.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    name, endpoint = model.partition(":")[0], environ.get("HF_ENDPOINT") or "https://huggingface.co"
    options: dict[str, Any] = {"token": environ.get("HF_TOKEN") or None, "endpoint": endpoint}
    try:
        siblings = HfApi(**options).model_info(name, revision=revision, timeout=30.0).siblings or []
        wanted = choose_files(model, [sibling.rfilename for sibling in siblings], weights=weights)
        snapshot_download(name, revision=revision, allow_patterns=wanted, cache_dir=_cache(environ), **options)
    except RevisionNotFoundError as exc:
        raise HubError(f"{name} has no revision {revision} at {endpoint}: give a branch, a tag or a commit") from exc
    except HfHubHTTPError as exc:
        raise HubError(_refusal(name, endpoint, exc.response.status_code if exc.response is not None else 0)) from exc
    except HubError:
        raise
    # The errors are those of the HTTP library, which is another one in each version of huggingface_hub.
    except Exception as exc:
        raise HubError(
            f"{name} cannot be downloaded from {endpoint}: {_first_line(exc)}: check the network, the proxy and the"
            " free disk space, then start again, which resumes the download; without a network give a folder"
        ) from exc


def _refusal(name: str, endpoint: str, status: int) -> str:
    """Return the message for an answer of the hub with an error status."""
    if status in (401, 403):
        return (
            f"{name} cannot be downloaded: {endpoint} answered {status}, so it is gated, private or does not exist:"
            f" check the name, accept its conditions at {endpoint}/{name}, and set HF_TOKEN to a token of that account"
        )
    if status == 404:
        return f"{name} does not exist at {endpoint}: check the name; a private model needs HF_TOKEN"
    return f"{name} cannot be downloaded: {endpoint} answered {status or 'with an error'}: try again later"


def _is_complete(snapshot: Path, *, weights: bool) -> bool:
    """Return whether a snapshot has a config, a tokenizer and, if wanted, all weights; an interrupted one may not."""
    if not (snapshot / "config.json").is_file() or not has_tokenizer(snapshot):
        return False
    if not weights:
        return True
    has_weights = any(file.is_file() for file in snapshot.glob("*.safetensors"))
    index = snapshot / "model.safetensors.index.json"
    if not has_weights and not index.is_file():
        index = snapshot / "pytorch_model.bin.index.json"
        has_weights = any(file.is_file() for file in snapshot.glob("pytorch_model*.bin"))
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return has_weights and all((snapshot / str(shard)).is_file() for shard in shards)


def _of_kind(files: Sequence[str], kind: str) -> list[str]:
    """Return the GGUF files of language models in `files` whose names contain `kind`, such as Q4_K_M, as a word."""
    # A kind contains underscores, so one may stand before it, but not after it.
    word = re.compile(rf"(^|[._-]){re.escape(kind)}([.-]|$)", re.IGNORECASE)
    found = []
    for file in files:
        name = file.rsplit("/", 1)[-1]
        is_model = name.endswith(".gguf") and not name.lower().startswith(_OTHER_GGUFS)
        if is_model and (not kind or word.search(name.removesuffix(".gguf"))):
            found.append(file)
    # `UD-Q4_K_M` is a kind of its own. `Q4_K_M` means it only if the repository lacks that kind.
    return [file for file in found if f"ud-{kind}".lower() not in file.lower()] or found


def _firsts(ggufs: Sequence[str]) -> list[str]:
    """Return the files without the further parts of split models."""
    return [file for file in ggufs if gguf_parts(Path(file))[0] == Path(file)]


def _cache(environ: Mapping[str, str]) -> Path:
    """Return the hub's cache folder, by the same variables in the same order as huggingface_hub."""
    if stated := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(stated).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
