"""Chooses the registry's implementation by URL. Only clusters that use Redis load its library: a tenth of a second."""

from collections.abc import Callable
from urllib.parse import urlsplit

from baton_serve.contracts.messages import ToRegistry
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.registry.memory import MemoryRegistryClient, MemoryRegistryView
from baton_serve.services.common.registry.port import RegistryClient, RegistryView

_REDIS = ("redis", "rediss", "unix")


def check_registry_url(url: str) -> None:
    """Raises `ConfigurationError`."""
    if not _is_of_redis(url):
        _zeromq_address(url)


def registry_client(url: str, key: ClusterKey | None = None) -> RegistryClient:
    """`key` is that of ZeroMQ; Redis has its own ways. Raises `ConfigurationError`."""
    if _is_of_redis(url):
        from baton_serve.services.common.registry.redis_registry import RedisRegistryClient

        return RedisRegistryClient(url)
    return MemoryRegistryClient(_zeromq_address(url), key=key)


def hosted_registry(url: str, on_message: Callable[[ToRegistry], None], key: ClusterKey | None = None) -> RegistryView:
    """The view of a `memory://` registry; `on_message` hears all that it is told. Raises `ConfigurationError`."""
    return MemoryRegistryView(_zeromq_address(url), key=key, on_message=on_message)


def registry_view(url: str, key: ClusterKey | None = None) -> RegistryView:
    """Raises `ConfigurationError`. With `memory://` the view hosts the registry itself."""
    if _is_of_redis(url):
        from baton_serve.services.common.registry.redis_registry import RedisRegistryView

        return RedisRegistryView(url)
    return MemoryRegistryView(_zeromq_address(url), key=key)


def _is_of_redis(url: str) -> bool:
    """False for what Redis' client would take for this machine, such as `redis:/HOST`."""
    parts = urlsplit(url)
    return parts.scheme in _REDIS and bool(parts.path if parts.scheme == "unix" else parts.hostname)


def _zeromq_address(url: str) -> str:
    """Of `memory://HOST:PORT`, or on one machine `memory:///PATH` and `memory:///@NAME` (no port, no file)."""
    parts = urlsplit(url)
    if parts.scheme == "memory" and not parts.netloc and len(parts.path) > 1:
        return "ipc://" + (parts.path.removeprefix("/") if parts.path.startswith("/@") else parts.path)
    try:
        is_whole = parts.scheme == "memory" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_whole = False
    if not is_whole:
        allowed = "memory://HOST:PORT, redis://…, rediss://… or unix:///PATH"
        raise ConfigurationError(f"registry {url!r} is no registry's URL (allowed: {allowed})")
    return f"tcp://{parts.netloc}"
