"""Decides whether the router is ready (`/health`), and logs each change of it."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from baton_serve.services.router.cluster.prefill_fallback import only_prefill_generates
from baton_serve.services.router.cluster.worker_state import WorkerState

logger = logging.getLogger(__name__)


class HasWorkers(Protocol):
    """Anything whose instances are counted by role: the cluster, or the view of one model."""

    def workers(self) -> list[WorkerState]: ...


class WatchedCluster(HasWorkers, Protocol):
    """The part of `cluster.Cluster` that decides whether requests can be served."""

    is_closed: bool

    @property
    def allows_prefill_fallback(self) -> bool: ...
    def is_registry_connected(self) -> bool: ...
    def add_listener(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` whenever an instance becomes ready or is lost, until the returned function is called."""
        ...


def count_pools(cluster: HasWorkers) -> Mapping[str, int]:
    """Return by role how many instances accept requests. The optional pool `encode` is left out while it is empty."""
    roles = Counter[str](w.record.role for w in cluster.workers() if w.state == "ready" and w.takes_work)
    return {role: roles[role] for role in ("prefill", "decode", "unified")} | (
        {"encode": roles["encode"]} if roles["encode"] else {}
    )


def fallback_warning(cluster: WatchedCluster) -> str | None:
    """Return a text for the operator while prefill instances generate the answers because no decode instance is ready,
    or else None.
    """
    # Pools of all models count together here: placement decides for each model.
    if not (cluster.allows_prefill_fallback and only_prefill_generates(cluster.workers())):
        return None
    return "no decode or unified instance is ready: prefill instances generate the answers (--decode-fallback)"


def sleep_warning(cluster: HasWorkers) -> str | None:
    """Return a text for the operator while instances sleep, or else None."""
    sleeping = [w.record.instance for w in cluster.workers() if w.state == "ready" and w.record.sleeping]
    return f"{len(sleeping)} instances sleep (POST /wake_up): {', '.join(sleeping)}" if sleeping else None


def empty_pools_reason(cluster: WatchedCluster) -> str | None:
    """Return the reason why no request can be served now, without names of instances. Return None if requests can be
    served, or if instances sleep.
    """
    workers, pools = cluster.workers(), count_pools(cluster)
    computes_vectors = any(w.state == "ready" and w.takes_work and w.record.pooling is not None for w in workers)
    if pools["decode"] or pools["unified"] or computes_vectors or fallback_warning(cluster) is not None:
        return None
    # A router whose instances sleep works: if probes ended it or took it out, no operator could wake the instances.
    if any(worker.state == "ready" and worker.record.sleeping for worker in workers):
        return None
    empty = [name for name, size in pools.items() if not size]
    return f"no instance can generate an answer: empty pools are {', '.join(empty)}"


def unready_reason(cluster: WatchedCluster) -> str | None:
    """Return the reason of `empty_pools_reason` with the names of the instances that are not connected, or None if
    requests can be served.
    """
    reason = empty_pools_reason(cluster)
    if reason is None:
        return None
    workers = cluster.workers()
    if unreached := [worker.record.instance for worker in workers if worker.state != "ready"]:
        reason += f"; registered, but not connected: {', '.join(unreached)}"
    if not cluster.is_registry_connected():
        reason += "; the registry does not answer"
    return reason


class ReadinessLog:
    """Logs when the router becomes able to serve requests, and when it loses this ability. Use it on the event loop
    only.
    """

    def __init__(self, cluster: WatchedCluster, *, url: str, names: str) -> None:
        """Create the log without writing anything. `url` is the router's address without a path, and `names` are the
        names of the models; both appear in the log lines.
        """
        self._cluster = cluster
        self._url = url
        self._names = names
        self._is_ready = self._was_ready = False
        self._warning: str | None = None

    def start(self) -> None:
        """Log whether the router can serve requests now, and each change from now on."""
        logger.info("listening on %s, waiting for instances of %s", self._url, self._names)
        self._cluster.add_listener(self._check)
        self._check()

    def _check(self) -> None:
        if self._cluster.is_closed:
            return
        # In this order the warning explains how a router can be ready without decode instances.
        self._log_readiness()
        self._log_fallback()

    def _log_fallback(self) -> None:
        before, self._warning = self._warning, fallback_warning(self._cluster)
        if self._warning is not None and before is None:
            logger.warning(self._warning)
        elif before is not None and self._warning is None and self._is_ready:
            logger.info("new requests are decoded by decode or unified instances again")

    def _log_readiness(self) -> None:
        reason = unready_reason(self._cluster)
        if (reason is None) == self._is_ready:
            return
        self._is_ready = reason is None
        if reason is None:
            logger.info("ready: %s at %s/v1, page at %s/", self._names, self._url, self._url)
            if not self._was_ready:
                # The words of uvicorn, for which scripts for vLLM wait.
                logger.info("Application startup complete.")
            self._was_ready = True
        else:
            logger.warning("not ready any more: %s", reason)
