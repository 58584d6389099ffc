"""Which names a request may call this server by. A web page may let its own name lead to this machine (DNS rebinding):
to the browser its requests are then no foreign ones, and only their `Host` says where they come from."""

from collections.abc import Sequence
from ipaddress import ip_address

from baton_serve.services.common.http.server import AsgiApp
from baton_serve.services.router.protocol.asgi import Receive, Scope, Send, header, send_error
from baton_serve.services.router.protocol.errors import HostNotAllowedError

ANY = "*"
_LOCAL = ("localhost", "*.localhost")


def with_allowed_hosts(app: AsgiApp, allowed: Sequence[str], *, bound_to: str) -> AsgiApp:
    """`allowed` are names, `*.example.com` for all below one, `*` for any. None: where the server listens on a loopback
    address only names of this machine, else any."""
    names = tuple(name.lower() for name in allowed) or (() if _is_loopback(bound_to) else (ANY,))
    return app if ANY in names else _HostCheck(app, (*names, *_LOCAL, bound_to.lower()))


class _HostCheck:
    """A plain ASGI application."""

    def __init__(self, app: AsgiApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = names
        self._known: str | None = None
        """What was allowed last: mostly all clients send the same."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, b"host")
        if given is not None and given != self._known:
            if not is_allowed(given, self._names):
                await send_error(
                    send,
                    HostNotAllowedError(
                        f"the host {given[:100]!r} is not allowed: ask by IP address, or start the router with"
                        " --allowed-hosts and this name"
                    ),
                )
                return
            self._known = given
        await self._app(scope, receive, send)


def is_allowed(host: str, names: Sequence[str]) -> bool:
    """`host` is a `Host` header, with or without a port. An IP address is always allowed: no page can have one of this
    machine as its name."""
    name = _without_port(host)
    if _is_address(name):
        return True
    name = name.lower().removesuffix(".")
    return any(name == known or (known.startswith("*.") and name.endswith(known[1:])) for known in names)


def _without_port(host: str) -> str:
    if host.startswith("["):
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
