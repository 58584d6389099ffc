"""Runs an ASGI app inside a running event loop, and leaves signals to the process."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import uvicorn

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.limits import HttpLimits, affordable_connections
from baton_serve.services.common.http.listener import Listener
from baton_serve.services.common.http.listening import bind_tcp
from baton_serve.services.common.http.protocol import HttpProtocol
from baton_serve.services.common.http.slots import Slot, Slots
from baton_serve.services.common.http.write_coalescer import WriteCoalescer

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


class HttpServer:
    """Binds in `start`, so a port in use is known at once. `port` is then the real one."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        host: str,
        port: int,
        ssl_keyfile: str | None = None,
        ssl_certfile: str | None = None,
        root_path: str = "",
        limits: HttpLimits | None = None,
    ) -> None:
        """Raises `ConfigurationError` for a key and a certificate that cannot be used."""
        _check_tls(ssl_keyfile, ssl_certfile)
        self.host = host
        self.port = port
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], HttpProtocol),
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            ssl_keyfile=ssl_keyfile,
            ssl_certfile=ssl_certfile,
            root_path=root_path,
        )
        self._server = _Server(config, limits or HttpLimits())
        self._serving: asyncio.Task[None] | None = None

    async def start(self, *, shares_port: bool = False) -> None:
        """Returns when connections are accepted. With `shares_port` other processes of this user may listen there too,
        and the kernel deals connections out among them. Raises `ConfigurationError` when the address is not to be had.
        """
        bound = bind_tcp(self.host, self.port, shares_port=shares_port)
        self.port = bound.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="http")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            self._serving.result()

    async def close(self, *, grace_s: float = 5.0, on_grace_over: Callable[[], None] | None = None) -> None:
        """Accepts nothing more; running requests get `grace_s`, then `on_grace_over` may end them with an answer."""
        self._server.should_exit = True
        if self._serving is None:
            return
        await asyncio.wait({self._serving}, timeout=grace_s)
        if not self._serving.done() and on_grace_over is not None:
            on_grace_over()
            await asyncio.wait({self._serving}, timeout=1.0)
        self._server.force_exit = True
        await asyncio.wait({self._serving}, timeout=0.5)


def _check_tls(keyfile: str | None, certfile: str | None) -> None:
    if certfile is None:
        if keyfile is not None:
            raise ConfigurationError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        # An empty password: nobody is there to be asked for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except OSError as exc:
        files = f"--ssl-certfile {certfile}" + (f" with --ssl-keyfile {keyfile}" if keyfile is not None else "")
        raise ConfigurationError(f"{files} cannot be used: {exc.strerror or exc}") from exc


class _Server(uvicorn.Server):
    """uvicorn's, with this repository's way to accept connections."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._limits = limits
        self._writes = WriteCoalescer()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        limits = self._limits
        slots = Slots(affordable_connections(limits.max_connections), limits.max_connections_per_address)
        listeners = [
            Listener(
                listening,
                self._protocol,
                slots=slots,
                tls=self.config.ssl,
                handshake_timeout_s=limits.head_timeout_s,
            )
            for listening in sockets or ()
        ]
        for listener in listeners:
            listener.start()
        self.servers = cast(list[asyncio.base_events.Server], listeners)
        self.started = True
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _protocol(self, slot: Slot) -> HttpProtocol:
        return HttpProtocol(self.config, self.server_state, limits=self._limits, writes=self._writes, slot=slot)
