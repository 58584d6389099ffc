"""Entry point of `baton encode`: reads the settings and runs an instance that only encodes images, videos and audio.

`services.instance.encoding_server` serves it. It loads the encoders of a model, and not its decoder.
"""

import sys
from os import environ

from baton_serve.services.common.settings.configuration import load_with
from baton_serve.services.instance.cpu_sharing.cpu_affinity import thread_count
from baton_serve.services.instance.settings import InstanceSettings, short_waits, visible_device, with_local_model


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or Ctrl-C, then drain. Ends the process with its exit status."""
    loaded = load_with(
        InstanceSettings,
        (),
        argv,
        environ,
        prefix="BATON__ENCODE__",
        program="baton encode",
        description="Runs an encode instance: encodes images, videos and audio for other instances of the same model.",
    )
    settings = with_local_model(loaded.settings, environ, "encode")
    # Before the imports below: torch and OpenMP read these variables once, when they are loaded.
    environ.update(visible_device(settings) | short_waits(environ) | thread_count(settings, environ))
    # Imported after parsing: --help and a mistyped flag should not wait seconds for torch.
    from baton_serve.services.instance.instance_process import no_handler, run_instance

    status = run_instance(settings, "encode", no_handler, notes=loaded.notes)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
