"""Decide which `Host` headers are accepted, as a protection against DNS rebinding.

A web page can let its own domain name resolve to this machine. The browser then takes the page's requests to this
server for requests to the page's own origin, so CORS does not apply. Only their `Host` header still shows the foreign
name.
"""

from collections.abc import Awaitable, Sequence
from ipaddress import ip_address

from baton_serve.services.common.http.server import AsgiApp
from baton_serve.services.router.protocol.asgi import Receive, Scope, Send, send_error
from baton_serve.services.router.protocol.errors import HostNotAllowedError

ANY = "*"
# Browsers resolve these names to the machine itself, never by DNS, so no page can take one of them over.
_LOCAL = ("localhost", "*.localhost")


def with_allowed_hosts(app: AsgiApp, allowed: Sequence[str], *, bound_to: str) -> AsgiApp:
    """Return `app` behind a check of the `Host` header, or `app` itself if every host name is allowed.

    `allowed` holds host names; `*.example.com` stands for all subdomains, `*` for every name. If it is empty, a server
    on a loopback address (`bound_to`) accepts only names of this machine, and any other server accepts every name.
    """
    names = tuple(name.lower() for name in allowed) or (() if _is_loopback(bound_to) else (ANY,))
    return app if ANY in names else _HostCheck(app, (*names, *_LOCAL, bound_to.lower()))


class _HostCheck:
    """A plain ASGI application that rejects requests whose `Host` header is not allowed, and passes all others on."""

    def __init__(self, app: AsgiApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = names
        self._last_allowed: bytes | None = None
        """The header that was allowed last. Most clients send the same one, which then needs no further check."""

    # Not a coroutine function: every request passes here, and one coroutine less is resumed for each of its steps.
    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        for name, value in scope["headers"]:
            if name == b"host":
                if value != self._last_allowed:
                    host = bytes(value).decode("latin-1")
                    if not is_allowed(host, self._names):
                        return send_error(send, _not_allowed(host))
                    self._last_allowed = bytes(value)
                break
        # A request without the header (HTTP/1.0) does not come from a browser.
        return self._app(scope, receive, send)


def _not_allowed(host: str) -> HostNotAllowedError:
    return HostNotAllowedError(
        f"the host {host[:100]!r} is not allowed: use the server's IP address, or start the router"
        " with --allowed-hosts and this name"
    )


def is_allowed(host: str, names: Sequence[str]) -> bool:
    """Return whether `host`, the value of a `Host` header with or without a port, is one of the allowed `names`. An IP
    address is always allowed.
    """
    name = _without_port(host)
    # DNS rebinding needs a name that resolves to this machine. A page cannot have the machine's address as its origin.
    if _is_address(name):
        return True
    # A trailing dot marks a fully qualified name; it is the same name.
    name = name.lower().removesuffix(".")
    return any(name == known or (known.startswith("*.") and name.endswith(known[1:])) for known in names)


def _without_port(host: str) -> str:
    if host.startswith("["):  # an IPv6 address with a port: [::1]:8000
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback if _is_address(host) else host.lower() == "localhost"
