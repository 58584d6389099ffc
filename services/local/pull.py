"""`baton pull ORG/NAME`: downloads a model from the Hugging Face hub, so that it can be served without a network."""

import argparse
import sys
from collections.abc import Sequence

from baton_serve.model_hub import HubError, is_hub_name
from baton_serve.model_source import ModelSource, find_source
from baton_serve.services.common.settings.configuration import environment

PROGRAM = "baton pull"


def main(argv: Sequence[str]) -> int:
    """Run `baton pull` with these arguments: download a model and print the path to serve. Return the exit status, 1 if
    it failed.
    """
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Download the files of a model that serving needs into the Hugging Face cache (HF_HOME), and print"
        " their path. HF_TOKEN gives access to gated models. An interrupted download is resumed.",
    )
    parser.add_argument("model", metavar="ORG/NAME", help="the model; ORG/NAME:Q4_K_M chooses one of its GGUF files")
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")
    parser.add_argument("--download-dir", metavar="FOLDER", help="folder for models instead of the cache")
    parser.add_argument("--hf-token", metavar="TOKEN", help="token for gated models (default: HF_TOKEN)")
    given = parser.parse_args(argv)
    source = ModelSource(**vars(given))
    model = source.model
    if not is_hub_name(model):
        sys.stderr.write(f"{PROGRAM}: {model} is not a name on the hub, such as Qwen/Qwen3-8B\n")
        return 1
    try:
        sys.stdout.write(f"{find_source(source, environment())}\n")
    except HubError as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    return 0
