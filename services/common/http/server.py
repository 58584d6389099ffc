"""Runs an ASGI application on the event loop of a process. Signals are left to `lifecycle`."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import uvicorn

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.listener import Listener, bind_tcp
from baton_serve.services.common.http.protocol import HttpProtocol
from baton_serve.services.common.http.slots import HttpLimits, Slot, Slots, affordable_connections
from baton_serve.services.common.http.write_coalescer import WriteCoalescer

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


class HttpServer:
    """The HTTP server of one process. `start` binds the port; then `port` is the actual one, also if it was 0."""

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
        """Check the TLS files. Raises `ConfigurationError` if the key or the certificate cannot be used."""
        _check_tls(ssl_keyfile, ssl_certfile)
        self.host = host
        self.port = port
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], HttpProtocol),
            # Clients could write any address into X-Forwarded-For.
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
        """Bind the port and return when connections are accepted.

        With `shares_port` other processes of this user may listen there too, and the kernel distributes connections
        among them. Raises `ConfigurationError` if the address cannot be bound.
        """
        bound = bind_tcp(self.host, self.port, shares_port=shares_port)
        self.port = bound.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="http")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        # If serving has ended already, the start has failed: raise its error.
        if self._serving.done():
            self._serving.result()

    async def close(self, *, grace_s: float = 5.0, on_grace_over: Callable[[], None] | None = None) -> None:
        """Accept no more connections, and wait at most `grace_s` for running requests.

        Then `on_grace_over` is called, which may end them with a response, and after another second they are cut off.
        """
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
        # Without a password OpenSSL would ask for one on the terminal if the key is encrypted.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except OSError as exc:
        files = f"--ssl-certfile {certfile}" + (f" with --ssl-keyfile {keyfile}" if keyfile is not None else "")
        raise ConfigurationError(f"{files} cannot be used: {exc.strerror or exc}") from exc


class _Server(uvicorn.Server):
    """uvicorn's server, but connections are accepted by `Listener` with its limits."""

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
        # uvicorn calls `close` and `wait_closed` of these when it stops.
        self.servers = cast(list[asyncio.base_events.Server], listeners)
        self.started = True
        self.ready.set()

    # uvicorn would install its own signal handlers here.
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _protocol(self, slot: Slot) -> HttpProtocol:
        return HttpProtocol(self.config, self.server_state, limits=self._limits, writes=self._writes, slot=slot)
