"""The command `baton`: runs the subcommand and imports only the modules that it needs.

This module is above all layers: it passes the options of the router and of instances to `serve`, because
`services.local` must not import them.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from baton_serve.child_command import module_command
from baton_serve.services.common.settings.configuration import nearest
from baton_serve.services.common.version import VERSION

COMMANDS = {
    "serve": "run a whole cluster on this machine: a router and instances, in one terminal",
    "router": "run the router: the HTTP API, and the placement of requests on instances",
    "prefill": "run a prefill worker: it computes prompts and hands off their KV blocks",
    "decode": "run a decode worker: it receives KV blocks and generates tokens",
    "unified": "run a worker that does both, without a handoff",
    "encode": "run an encode worker: it encodes images, videos and audio for prefill and unified workers",
    "chat": "chat in the terminal, with a running server or with a model",
    "complete": "the same with completions of texts",
    "run-batch": "answer the requests of a file (OpenAI's batch format)",
    "bench": "run a benchmark: serve, latency, throughput (as `vllm bench`), and those of `baton-bench`",
    "pull": "download a model from the Hugging Face hub",
    "unpack": "turn a single GGUF file into a model folder",
    "save-sharded-state": "write a checkpoint for --load-format sharded_state",
    "doctor": "check whether this machine can serve models, with remedies",
    "drain": "take one instance out of service after its running requests",
    "rotate": "restart the instances of a pool one by one, without failed requests",
}
"""The subcommands, with their lines in `baton --help`."""
FUNCTIONS = {
    "chat": ("baton_serve.services.local.chat", "main"),
    "complete": ("baton_serve.services.local.chat", "complete"),
    "drain": ("baton_serve.services.rotate.drain", "main"),
    "pull": ("baton_serve.services.local.pull", "main"),
    "run-batch": ("baton_serve.services.local.run_batch", "main"),
    "save-sharded-state": ("baton_serve.services.local.save_sharded_state", "main"),
    "unpack": ("baton_serve.services.local.unpack", "main"),
}
"""Modules and functions of the subcommands that are not `main` in `services.COMMAND.main`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand of `baton` that `argv` names (None: the process's own arguments), and exit with its status.

    An unknown subcommand exits with status 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "--help"
    if command in ("--help", "-h", "help"):
        sys.stdout.write(_help())
        # Most users need the options of `serve` only.
        sys.exit(_run("serve", ["--help"]))
    elif command.startswith("--help="):
        sys.exit(_run("serve", [command]))
    elif command in ("--version", "-V", "version"):
        sys.stdout.write(f"baton {VERSION}\n")
    elif command not in COMMANDS:
        hint = nearest(command, list(COMMANDS)) or f" (known: {', '.join(COMMANDS)})"
        sys.stderr.write(f"baton: unknown command {command}{hint}\n")
        # The status of wrong usage, as argparse and `stop` have it.
        sys.exit(2)
    else:
        sys.exit(_run(command, words))


def _run(command: str, argv: list[str]) -> int | None:
    """Run the subcommand `command` with the arguments `argv`. Return its exit status; None counts as 0."""
    if command == "serve":
        # Of the router and instances only the settings are imported: `baton serve --help` must not load torch.
        from baton_serve.services.common.settings.options import options_of
        from baton_serve.services.instance.settings import InstanceSettings
        from baton_serve.services.local.main import main as serve
        from baton_serve.services.router.settings import RouterSettings

        return serve(argv, router=options_of(RouterSettings), instance=options_of(InstanceSettings))
    if command == "bench":
        # The product does not import the benchmarks, so they replace this process.
        program = module_command("baton_serve.bench.cli", *argv)
        os.execv(program[0], program)
    module, function = FUNCTIONS.get(command, (f"baton_serve.services.{command}.main", "main"))
    run: Callable[[list[str]], int | None] = getattr(import_module(module), function)
    return run(argv)


def _help() -> str:
    lines = [
        "usage: baton COMMAND [options]",
        "",
        "Disaggregated prefill/decode serving of large language models.",
        "",
        *(f"  {name:<{max(map(len, COMMANDS))}}  {text}" for name, text in COMMANDS.items()),
        "",
        "  baton serve Qwen/Qwen3-8B --prefill 1 --decode 1 --port 8000",
        "",
        "baton COMMAND --help shows the options of a command; baton --version shows the version.",
        "",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
