"""Entry point of `baton prefill`: reads the settings and runs the instance."""

import sys
from os import environ

from baton_serve.services.common.settings.configuration import load_with
from baton_serve.services.instance.cpu_sharing.cpu_affinity import thread_count
from baton_serve.services.instance.nodes.rank_host import run_node
from baton_serve.services.instance.settings import InstanceSettings, short_waits, visible_device, with_local_model


def main(argv: list[str]) -> None:
    """Run `baton prefill` with these arguments: serve until SIGTERM or Ctrl-C, drain, then exit the process."""
    loaded = load_with(
        InstanceSettings,
        (),
        argv,
        environ,
        prefix="BATON__PREFILL__",
        program="baton prefill",
        description="Runs a prefill instance: computes prompts and hands their KV blocks to decode instances.",
    )
    settings = with_local_model(loaded.settings, environ, "prefill")
    # Before the imports below: torch and OpenMP read these variables once, when they are loaded.
    environ.update(visible_device(settings) | short_waits(environ) | thread_count(settings, environ))
    if settings.node_rank:
        sys.exit(run_node(settings, "prefill", notes=loaded.notes))
    # Imported after parsing: --help and a mistyped flag should not wait seconds for torch.
    from baton_serve.services.instance.instance_process import run_instance
    from baton_serve.services.prefill.handler import prefill_handler

    status = run_instance(settings, "prefill", prefill_handler, notes=loaded.notes)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
