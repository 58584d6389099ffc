"""Entry point of `baton unified`: runs an instance that computes prompts and generates answers (no disaggregation).

It is the role for deployments without disaggregation.
"""

import sys
from os import environ

from baton_serve.contracts.messages import Generate
from baton_serve.services.common.settings.configuration import load_with
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.cpu_sharing.cpu_affinity import thread_count
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.interfaces import EngineStats
from baton_serve.services.instance.kv_sharing.prompt_image_source import PromptImageSource
from baton_serve.services.instance.kv_sharing.pulling import PullPort
from baton_serve.services.instance.local_generation import generate
from baton_serve.services.instance.nodes.rank_host import run_node
from baton_serve.services.instance.request_server import RoleMessage
from baton_serve.services.instance.settings import InstanceSettings, short_waits, visible_device, with_local_model


class UnifiedHandler:
    """Serves the requests of a unified instance: computes prompts and generates answers. Implements
    `services.instance.request_server.RoleHandler`. Use it only on the event loop.
    """

    def __init__(self, engine: EngineCalls, puller: PullPort, images: PromptImageSource | None = None) -> None:
        self._engine = engine
        self._puller = puller
        self._images = images

    def can_serve(self, message: RoleMessage) -> bool:
        return isinstance(message, Generate)

    def refused(self, message: RoleMessage, reason: str) -> None:
        """Do nothing when a request is refused: no other instance waits for a unified instance."""

    async def serve(self, request: AttemptEntry, message: RoleMessage) -> None:
        assert isinstance(message, Generate)
        await generate(self._engine, request, self._puller, message, self._images)

    def on_stats(self, stats: EngineStats) -> None:
        """Do nothing: on a unified instance no request waits outside the engine."""

    def num_queued(self) -> int:
        return 0


def main(argv: list[str]) -> None:
    """Run `baton unified` with these arguments: serve until SIGTERM or Ctrl-C, drain, then exit the process."""
    loaded = load_with(
        InstanceSettings,
        (),
        argv,
        environ,
        prefix="BATON__UNIFIED__",
        program="baton unified",
        description="Runs a unified instance: computes prompts and generates answers on the same device.",
    )
    settings = with_local_model(loaded.settings, environ, "unified")
    # Before the imports below: torch and OpenMP read these variables once, when they are loaded.
    environ.update(visible_device(settings) | short_waits(environ) | thread_count(settings, environ))
    if settings.node_rank:
        sys.exit(run_node(settings, "unified", notes=loaded.notes))
    # Imported after parsing: --help and a mistyped flag should not wait seconds for torch.
    from baton_serve.services.instance.instance_process import run_instance

    status = run_instance(
        settings,
        "unified",
        lambda parts: UnifiedHandler(parts.engine, parts.puller, parts.images),
        notes=loaded.notes,
    )
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
