"""Decides whether prefill workers may generate answers because no decode or unified instance is ready
(`--decode-fallback`).
"""

import asyncio
from collections.abc import Callable, Iterable

from baton_serve.contracts.instance import InstanceRecord
from baton_serve.services.router.cluster.worker_state import WorkerState


class PrefillFallback:
    """Decides when prefill instances may generate answers because no decode or unified instance is ready (the
    fallback).

    After the start of a cluster the first prefill instance may be ready before the first decode instance. Answers that
    are generated there slow down the prompts of later requests until they end. So a router first waits for a decode or
    unified instance. Once it has seen one, the loss of all of them is a fault, and the fallback begins immediately.
    `Cluster` owns this object. Use it on the event loop only.
    """

    def __init__(self, *, after_s: float | None, on_allowed: Callable[[], None]) -> None:
        """Start without any instance. `after_s` is how long to wait, in seconds from the first prefill instance; None
        never allows the fallback.

        `on_allowed` is called if this time passes without a decode or unified instance.
        """
        self._after_s = after_s
        self._on_allowed = on_allowed
        self._timer: asyncio.TimerHandle | None = None
        self.is_allowed = False

    @property
    def is_pending(self) -> bool:
        """True while this object waits for a decode or unified instance; when the time is over it allows the
        fallback.
        """
        return self._timer is not None

    def on_ready(self, record: InstanceRecord) -> None:
        """Record that an instance has become ready. The first prefill instance starts the waiting time; a decode or
        unified instance ends it, and from then on the fallback is allowed.
        """
        if self._after_s is None or self.is_allowed or record.pooling is not None or record.role == "encode":
            return
        if record.role != "prefill":
            # It has no effect while this instance is ready. If it is lost, its streams must not wait.
            self.close()
            self.is_allowed = True
        elif record.can_generate and self._timer is None:
            # Later prefill instances do not prolong the wait.
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._allow)

    def close(self) -> None:
        """Stop the timer, so that `on_allowed` is not called any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _allow(self) -> None:
        self._timer = None
        self.is_allowed = True
        self._on_allowed()


def only_prefill_generates(workers: Iterable[WorkerState]) -> bool:
    """Return whether prefill instances are the only ones among `workers` that can generate answers: no decode or
    unified instance accepts requests.

    Instances that compute vectors do not count.
    """
    records = [worker.record for worker in workers if worker.takes_work and worker.record.pooling is None]
    records = [record for record in records if record.role != "encode"]
    return any(record.can_generate for record in records) and all(record.role == "prefill" for record in records)
