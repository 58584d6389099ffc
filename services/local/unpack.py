"""`baton unpack FILE FOLDER`: turns a single GGUF file into a model folder that `baton` commands accept as MODEL.

`baton serve FILE` does the same for a file without a config.json, in the cache of the user.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "baton unpack"


def main(argv: Sequence[str]) -> int:
    """Run `baton unpack` with these arguments: unpack a GGUF file and print the MODEL to serve. Return the exit status,
    1 if it failed.
    """
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Write the config, the tokenizer and the chat template of a GGUF file into FOLDER, with a link to"
        " the file, and print the MODEL to serve.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF file to unpack")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write; created if it does not exist")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("gguf") is None:
        sys.stderr.write(f"{PROGRAM}: the Python package gguf is not installed: pip install 'baton-serve[gguf]'\n")
        return 1
    # These imports load numpy and the tokenizer library; `--help` must not wait for them.
    from baton_serve.engine.errors import ModelError
    from baton_serve.engine.loading.gguf_folder import unpack

    try:
        sys.stdout.write(f"{unpack(options.file, options.folder)}\n")
    except ModelError as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    return 0
