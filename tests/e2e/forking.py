"""The fork server of `baton serve`, once for all tests that start instances themselves: they import torch once."""

from functools import cache

from services.local.launches import Forks, Programs

MODULE = "services.cli"


@cache
def forks() -> Forks:
    made = Forks(MODULE, Programs(MODULE), ["transformers.models.llama.modeling_llama"])
    made.prepare()
    return made
