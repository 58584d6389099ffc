"""`baton unified`: the whole wiring of the process."""

import sys
from os import environ

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.instance.cpu_sharing.cpu_affinity import thread_count
from baton_serve.services.instance.settings import InstanceSettings, short_waits, visible_device


def main(argv: list[str]) -> None:
    """Serves until SIGTERM or Ctrl-C, then drains. Ends with the process's exit status."""
    settings = load(
        InstanceSettings,
        argv,
        environ,
        prefix="BATON__UNIFIED__",
        program="baton unified",
        description="Does all of a request on one device.",
    )
    environ.update(visible_device(settings) | short_waits(environ) | thread_count(settings, environ))
    # Imported now, so that --help and a mistyped flag need not wait for torch.
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
