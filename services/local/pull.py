"""`baton pull ORG/NAME`: downloads a model from the Hugging Face hub, so that it can be served without a network."""

import argparse
import sys
from collections.abc import Sequence

from baton_serve.model_hub import HubError, is_hub_name, obtain_model
from baton_serve.services.common.settings.configuration import environment

PROGRAM = "baton pull"


def main(argv: Sequence[str]) -> int:
    """Download the model and print the path to serve. Return 0, or 1 if it failed."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Download the files of a model that serving needs into the Hugging Face cache (HF_HOME), and print"
        " their path. HF_TOKEN gives access to gated models. An interrupted download is resumed.",
    )
    parser.add_argument("model", metavar="ORG/NAME", help="the model; ORG/NAME:Q4_K_M chooses one of its GGUF files")
    model = parser.parse_args(argv).model
    if not is_hub_name(model):
        sys.stderr.write(f"{PROGRAM}: {model} is not a name on the hub, such as Qwen/Qwen3-8B\n")
        return 1
    try:
        sys.stdout.write(f"{obtain_model(model, environment())}\n")
    except HubError as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    return 0
