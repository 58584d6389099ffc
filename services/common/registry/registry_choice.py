"""Chooses the implementation of the registry by its URL.

Redis' library is loaded only for URLs of Redis, because its import takes a tenth of a second.
"""

from collections.abc import Callable
from urllib.parse import urlsplit

from baton_serve.contracts.messages import ToRegistry
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.registry.memory_registry import MemoryRegistryClient, MemoryRegistryView
from baton_serve.services.common.registry.port import RegistryClient, RegistryView

_REDIS = ("redis", "rediss", "unix")


def check_registry_url(url: str) -> None:
    """Check that `url` is the URL of a registry of instances (`memory://`, `redis://`, …). Raises `ConfigurationError`
    if it is not.
    """
    if not _is_of_redis(url):
        _zeromq_address(url)


def registry_client(url: str, key: ClusterKey | None = None) -> RegistryClient:
    """Return the client with which an instance registers in the registry at `url`. `key` encrypts the connection to a
    `memory://` registry (None: not encrypted); Redis is protected by its own password and TLS. Raises
    `ConfigurationError` for a wrong URL.
    """
    if _is_of_redis(url):
        from baton_serve.services.common.registry.redis_registry import RedisRegistryClient

        return RedisRegistryClient(url)
    return MemoryRegistryClient(_zeromq_address(url), key=key)


def hosted_registry(url: str, on_message: Callable[[ToRegistry], None], key: ClusterKey | None = None) -> RegistryView:
    """Return a registry that runs in this process, for a `memory://` URL. Each message of an instance is also passed to
    `on_message`. `key` encrypts the connections.

    Raises `ConfigurationError` for a wrong URL.
    """
    return MemoryRegistryView(_zeromq_address(url), key=key, on_message=on_message)


def registry_view(url: str, key: ClusterKey | None = None) -> RegistryView:
    """Return the object by which a router reads the registry at `url`. With `memory://` it runs the registry itself,
    and `key` encrypts the connections.

    Raises `ConfigurationError` for a wrong URL.
    """
    if _is_of_redis(url):
        from baton_serve.services.common.registry.redis_registry import RedisRegistryView

        return RedisRegistryView(url)
    return MemoryRegistryView(_zeromq_address(url), key=key)


def _is_of_redis(url: str) -> bool:
    """Return whether `url` is that of a Redis server and has a host (or, for a Unix socket, a path)."""
    # Redis' client would connect to this machine if the host is missing, as in `redis:/HOST`.
    parts = urlsplit(url)
    return parts.scheme in _REDIS and bool(parts.path if parts.scheme == "unix" else parts.hostname)


def _zeromq_address(url: str) -> str:
    """Return the ZeroMQ address of a registry URL: `memory://HOST:PORT`, `memory:///PATH` or `memory:///@NAME`.

    The last two are for one machine: a Unix socket with a path, or an abstract one, which needs neither a port nor a
    file. Raises `ConfigurationError` for any other URL.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory" and not parts.netloc and len(parts.path) > 1:
        return "ipc://" + (parts.path.removeprefix("/") if parts.path.startswith("/@") else parts.path)
    try:
        is_whole = parts.scheme == "memory" and bool(parts.hostname) and parts.port is not None
    except ValueError:  # `parts.port` raises it for a port that is not a number.
        is_whole = False
    if not is_whole:
        allowed = "memory://HOST:PORT, redis://…, rediss://… or unix:///PATH"
        raise ConfigurationError(f"--registry {url!r} is not a registry URL; use {allowed}")
    return f"tcp://{parts.netloc}"
