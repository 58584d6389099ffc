"""Download a model's files into a folder; the chart's init containers run this with `python -c`.

The free space is checked before the download, and failures of the network are retried: a file that was received partly
is continued. Environment: REPOSITORY, REVISION, FOLDER, LIMIT_BYTES (of the volume; 0: none) and PATTERNS (JSON list).
"""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

ATTEMPTS = 6
FIRST_WAIT_S = 5.0
PERMANENT = (RepositoryNotFoundError, RevisionNotFoundError, OfflineModeIsEnabled)
"""Errors that another attempt does not change. A gated repository without a valid token is of the first kind."""
NETWORK = (OSError, httpx.HTTPError)

logger = logging.getLogger("download")


class NoSpaceError(Exception):
    """The files do not fit into the volume."""


def check_space(sizes: Mapping[str, int], folder: Path, *, free: int, limit: int) -> None:
    """Raise `NoSpaceError` if the files do not fit.

    `sizes` are bytes by file name, `free` the bytes of the file system, and `limit` those of the volume (0: none).
    """
    present = {name for name, size in sizes.items() if (folder / name).is_file() and _size(folder / name) == size}
    # Pods that share a volume download together, and wait for each other by locks on the files.
    received = sum(_size(path) for path in (folder / ".cache").rglob("*.incomplete"))
    missing = sum(size for name, size in sizes.items() if name not in present) - received
    total = sum(sizes.values())
    if limit and total > limit:
        raise NoSpaceError(
            f"the model has {total / 1e9:.1f} GB, the volume's limit is {limit / 1e9:.1f} GB: "
            "raise model.source.download.cache.size"
        )
    if missing > free:
        raise NoSpaceError(
            f"{missing / 1e9:.1f} GB are missing in {folder}, {free / 1e9:.1f} GB are free: use a larger volume or disk"
        )


def download(once: Callable[[], object], *, sleep: Callable[[float], object] = time.sleep) -> None:
    """Call `once` until it succeeds, at most `ATTEMPTS` times.

    Raises the last error, or a permanent one immediately.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            once()
        except (*PERMANENT, NoSpaceError):
            raise
        except NETWORK as exc:
            if attempt == ATTEMPTS:
                raise
            wait_s = FIRST_WAIT_S * 2 ** (attempt - 1)
            logger.warning("attempt %d of %d failed, next in %.0f s: %s", attempt, ATTEMPTS, wait_s, exc)
            sleep(wait_s)
        else:
            return


def sizes_of(repository: str, revision: str, patterns: list[str]) -> dict[str, int]:
    """Return the bytes of each file of the repository that matches one of `patterns`; without patterns of all files."""
    files = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
    wanted = [f for f in files if not patterns or any(fnmatch(f.rfilename, pattern) for pattern in patterns)]
    return {f.rfilename: f.size or 0 for f in wanted}


def _size(path: Path) -> int:
    return path.stat().st_size


def main() -> None:
    repository, revision = os.environ["REPOSITORY"], os.environ["REVISION"]
    folder, limit = Path(os.environ["FOLDER"]), int(os.environ["LIMIT_BYTES"])
    patterns: list[str] = json.loads(os.environ["PATTERNS"])
    folder.mkdir(parents=True, exist_ok=True)

    def once() -> None:
        try:
            sizes = sizes_of(repository, revision, patterns)
        except PERMANENT:
            raise
        except NETWORK as exc:
            # The folder may be complete already: `snapshot_download` knows that without the hub.
            logger.warning("the files' sizes are unknown, the free space is not checked: %s", exc)
        else:
            check_space(sizes, folder, free=shutil.disk_usage(folder).free, limit=limit)
        snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=patterns or None)

    try:
        download(once)
    except (*NETWORK, NoSpaceError) as exc:
        sys.exit(f"the download of {repository} failed: {exc}")


if __name__ == "__main__":
    main()
