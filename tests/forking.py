"""The fork server of `baton serve`, once for all tests: what they start has imported torch already.

`module.main(argv)` is what a fork runs. Here it is `baton`, with one difference: where that is `baton serve`, its
instances are forked by the server that it comes from itself, and it starts none of its own. Or, where `argv` begins
with the name of a module of tests, that one's `main`.
"""

import multiprocessing.forkserver as stdlib
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from baton_serve.services import cli
from baton_serve.services.local.cluster_supervisor import MODULE
from baton_serve.services.local.launches import ForkLauncher, ProgramLauncher

PEER = "tests.contract.transports_peer"
PRELOADED = [
    "baton_serve.services.local.main",
    "baton_serve.engine.loading.transformers_loader",
    "transformers.models.llama.modeling_llama",
    "tests.forked_ranks",
    PEER,
    __name__,
]


@cache
def forks() -> ForkLauncher:
    is_first = stdlib._forkserver._forkserver_pid is None  # type: ignore[attr-defined]
    assert is_first, "a fork server runs that has not imported what this one is for"
    made = ForkLauncher(__name__, ProgramLauncher(MODULE), PRELOADED)
    made.prepare()
    return made


def main(argv: Sequence[str]) -> None:
    if argv[0].startswith("tests."):
        import_module(argv[0]).main(argv[1:])
        return
    run_baton(argv)


def run_baton(argv: Sequence[str]) -> None:
    stdlib._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    cli.main(argv)
