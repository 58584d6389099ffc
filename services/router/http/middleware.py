"""ASGI middleware of whoever runs the router, by import path, as vLLM's `--middleware`."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.middleware.base import BaseHTTPMiddleware

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.exchange import EXTENSION
from baton_serve.services.common.http.server import AsgiApp
from baton_serve.services.router.protocol.asgi import Receive, Scope, Send


def with_middleware(app: AsgiApp, paths: Sequence[str]) -> AsgiApp:
    """The last one is the outermost. A class is called with the application, a coroutine function for each request with
    Starlette's request and what calls the next one. Raises `ConfigurationError`."""
    if not paths:
        return app
    wrapped: AsgiApp = _Plain(app)
    for path in paths:
        found = _imported(path)
        if inspect.iscoroutinefunction(found):
            wrapped = BaseHTTPMiddleware(wrapped, dispatch=found)
        elif inspect.isclass(found):
            wrapped = cast(Callable[[AsgiApp], AsgiApp], found)(wrapped)
        else:
            raise ConfigurationError(f"--middleware {path}: neither a class nor a coroutine function")
    return wrapped


class _Plain:
    """All of an answer goes through `send`, so that a middleware sees it."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        others = {name: value for name, value in (scope.get("extensions") or {}).items() if name != EXTENSION}
        await self._app({**scope, "extensions": others}, receive, send)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"--middleware {path}: an import path is wanted, package.module.Name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as exc:
        raise ConfigurationError(f"--middleware {path}: {exc}") from exc
