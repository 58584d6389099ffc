"""Entry point of `baton decode`: reads the settings and runs the instance."""

import sys
from os import environ

from baton_serve.services.common.settings.configuration import load_with
from baton_serve.services.instance.cpu_sharing.cpu_affinity import thread_count
from baton_serve.services.instance.nodes.rank_host import run_node
from baton_serve.services.instance.settings import InstanceSettings, short_waits, visible_device, with_local_model


def main(argv: list[str]) -> None:
    """Run `baton decode` with these arguments: serve until SIGTERM or Ctrl-C, drain, then exit the process."""
    loaded = load_with(
        InstanceSettings,
        (),
        argv,
        environ,
        prefix="BATON__DECODE__",
        program="baton decode",
        description="Runs a decode instance: fetches prompts' KV blocks from prefill instances and generates answers.",
    )
    settings = with_local_model(loaded.settings, environ, "decode")
    # Before the imports below: torch and OpenMP read these variables once, when they are loaded.
    environ.update(visible_device(settings) | short_waits(environ) | thread_count(settings, environ))
    if settings.node_rank:
        sys.exit(run_node(settings, "decode", notes=loaded.notes))
    # Imported after parsing: --help and a mistyped flag should not wait seconds for torch.
    from baton_serve.services.decode.block_queue import BlockQueue
    from baton_serve.services.decode.handler import DecodeHandler
    from baton_serve.services.instance.instance_process import run_instance

    status = run_instance(
        settings,
        "decode",
        lambda parts: DecodeHandler(
            parts.engine,
            parts.transfer,
            parts.router,
            parts.puller,
            counter=parts.counter,
            fallback=settings.handoff_fallback,
            block_queue=BlockQueue(parts.engine, max_waiting=settings.max_waiting),
        ),
        notes=loaded.notes,
    )
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
