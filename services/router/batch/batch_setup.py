"""Assemble the batch API of one router process from the settings: its folder, its routes and its scheduler."""

from collections.abc import Callable, Mapping

from baton_serve.services.router.batch.batch_run import RunPorts
from baton_serve.services.router.batch.batch_scheduler import BatchScheduler
from baton_serve.services.router.batch.endpoints import BatchApi
from baton_serve.services.router.batch.line_client import LineClient
from baton_serve.services.router.batch.pacing import LineGate, RouterLoad, batch_concurrency
from baton_serve.services.router.batch.store import BatchStore, StoreLimits
from baton_serve.services.router.protocol.asgi import Asgi, RequestLimits
from baton_serve.services.router.protocol.byte_budget import BodyMemory
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.settings import RouterSettings

_DAY_S = 24 * 3600


class Batches:
    """Runs batches in this process and owns the folder of `--batch-folder`. `main` creates it, and closes it before the
    HTTP server.
    """

    def __init__(self, folder: str, settings: RouterSettings, keys: ApiKeys, *, clock: Callable[[], float]) -> None:
        """Open the folder. `clock` is the router's monotonic clock. Raises `ConfigurationError` if the folder cannot be
        used.
        """
        self._settings = settings
        self._clock = clock
        limits = StoreLimits(
            max_file_bytes=settings.batch_max_file_bytes,
            max_total_bytes=settings.batch_max_bytes,
            keep_s=int(settings.batch_keep_days * _DAY_S),
        )
        self.store = BatchStore(folder, limits, has_several_owners=keys.has_several_owners)
        self.api = BatchApi(self.store, self._wake, allowed_origins=settings.allowed_origins)
        self._scheduler: BatchScheduler | None = None

    def start(
        self,
        endpoints: Mapping[str, Asgi],
        *,
        load: Callable[[], RouterLoad],
        owner: Callable[[str], Caller | None],
        bodies: BodyMemory,
    ) -> None:
        """Start to run batches.

        `endpoints` are the router's ASGI applications by path; `load` returns how many requests of clients the router
        serves now; `owner` returns the caller with a name, or None. `bodies` limits the memory of all request bodies.
        """
        settings = self._settings
        most = batch_concurrency(settings.batch_max_concurrency, settings.max_concurrent_requests)
        limits = RequestLimits(settings.max_request_bytes, settings.slow_client_s)
        ports = RunPorts(
            store=self.store,
            client=LineClient(endpoints, limits, clock=self._clock),
            gate=LineGate(load, most=most, clock=self._clock),
            bodies=bodies,
            owner=owner,
            max_requests=settings.batch_max_requests,
            max_line_bytes=settings.max_request_bytes,
            max_tasks=2 * most,
        )
        # Twice `most`: requests that wait for their next try hold no place of the gate.
        self._scheduler = BatchScheduler(ports, clock=self._clock)
        self._scheduler.start()

    async def close(self) -> None:
        """Stop running batches, after writing the results that they have so far."""
        if self._scheduler is not None:
            await self._scheduler.close()

    # The routes are made before the scheduler, which needs the endpoints of the finished application.
    def _wake(self) -> None:
        if self._scheduler is not None:
            self._scheduler.wake()
