"""`baton serve | router | prefill | …`: finds the process asked for and imports nothing else.

Above all layers: it hands `serve` the options of the other processes, which `services.local` must not import.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from baton_serve.services.common.settings.configuration import nearest
from baton_serve.services.common.version import VERSION

COMMANDS = {
    "serve": "a whole cluster on this machine: a router and instances, supervised, in one terminal",
    "router": "the router: OpenAI API, placement, streams",
    "prefill": "an instance that reads prompts and hands their KV blocks on",
    "decode": "an instance that takes over the blocks and writes the answers",
    "unified": "an instance that does both",
    "unpack": "a GGUF file that stands alone becomes a folder that can be served",
    "doctor": "what of this machine helps or hinders serving, with remedies",
    "drain": "takes one instance out of service: no new work, what runs ends or is handed over",
    "rotate": "restarts the instances of a pool one by one, without a failed request",
}
MODULES = {"drain": "baton_serve.services.rotate.drain", "unpack": "baton_serve.services.local.unpack"}
"""Of commands that are not `services.COMMAND.main`."""


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "--help"
    if command in ("--help", "-h", "help"):
        sys.stdout.write(_help())
    elif command in ("--version", "-V", "version"):
        sys.stdout.write(f"baton {VERSION}\n")
    elif command not in COMMANDS:
        hint = nearest(command, list(COMMANDS)) or f" (known: {', '.join(COMMANDS)})"
        sys.stderr.write(f"baton: unknown command {command}{hint}\n")
        sys.exit(2)
    else:
        sys.exit(_run(command, words))


def _run(command: str, argv: list[str]) -> int | None:
    """The status of the process; mains that exit by themselves return nothing."""
    if command == "serve":
        # Only settings are imported here, and neither of the two modules loads torch.
        from baton_serve.services.common.settings.options import options_of
        from baton_serve.services.instance.settings import InstanceSettings
        from baton_serve.services.local.main import main as serve
        from baton_serve.services.router.settings import RouterSettings

        return serve(argv, router=options_of(RouterSettings), instance=options_of(InstanceSettings))
    run: Callable[[list[str]], int | None] = import_module(
        MODULES.get(command, f"baton_serve.services.{command}.main")
    ).main
    return run(argv)


def _help() -> str:
    lines = [
        "usage: baton COMMAND [options]",
        "",
        "Disaggregated prefill/decode serving of large language models.",
        "",
        *(f"  {name:<9}{text}" for name, text in COMMANDS.items()),
        "",
        "  baton serve /path/to/hf-model --prefill 1 --decode 1 --port 8000",
        "",
        "baton COMMAND --help tells the options of one command; baton --version the version.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
