"""Entry point of `baton unified`: reads the settings and runs the instance."""

import sys
from os import environ

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.instance.cpu_sharing.cpu_affinity import thread_count
from baton_serve.services.instance.settings import InstanceSettings, short_waits, visible_device


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or Ctrl-C, then drain. Ends the process with its exit status."""
    settings = load(
        InstanceSettings,
        argv,
        environ,
        prefix="BATON__UNIFIED__",
        program="baton unified",
        description="Runs a unified instance: computes prompts and generates answers on the same device.",
    )
    # Before the imports below: torch and OpenMP read these variables once, when they are loaded.
    environ.update(visible_device(settings) | short_waits(environ) | thread_count(settings, environ))
    # Imported after parsing: --help and a mistyped flag should not wait seconds for torch.
    from baton_serve.services.instance.process import run_instance
    from baton_serve.services.unified.handler import UnifiedHandler

    status = run_instance(
        settings,
        "unified",
        lambda parts: UnifiedHandler(parts.engine, parts.puller, parts.image_reader),
    )
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
