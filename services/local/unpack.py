"""`baton unpack FILE FOLDER`: a GGUF file that stands alone becomes a folder that every process can be given."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "baton unpack"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Writes the config, tokenizer and chat template within a GGUF file into FOLDER, with a link to the"
        " file, and prints the MODEL to serve.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it is not there")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("gguf") is None:
        sys.stderr.write(f"{PROGRAM}: needs the Python package gguf: pip install 'baton-serve[gguf]'\n")
        return 1
    from baton_serve.engine.errors import ModelError
    from baton_serve.engine.loading.gguf_folder import unpack

    try:
        sys.stdout.write(f"{unpack(options.file, options.folder)}\n")
    except ModelError as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    return 0
