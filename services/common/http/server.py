"""Runs an ASGI application on the event loop of a process, with TLS certificates and sockets. Signals are left to
`process_lifecycle`.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import uvicorn

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.connection_slots import HttpLimits, Slot, Slots, affordable_connections
from baton_serve.services.common.http.listener import Listener, bind_tcp
from baton_serve.services.common.http.protocol import HttpProtocol
from baton_serve.services.common.http.write_coalescer import WriteCoalescer

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files with which a server offers TLS; without `certfile` it does not. With `cert_reqs` 1 clients may present
    a certificate, and with 2 they must. `ca_certs` has the authorities that must have signed it.
    """

    keyfile: str | None = None
    certfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = ssl.CERT_NONE


class HttpServer:
    """The HTTP server of one process for an ASGI application. `start` binds the port; then `port` is the actual one,
    also if it was 0.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        host: str,
        port: int,
        tls: TlsFiles | None = None,
        root_path: str = "",
        limits: HttpLimits | None = None,
    ) -> None:
        """Check the TLS files; listen on `host` and `port` only in `start`. `root_path` is a prefix of all paths
        (ASGI's root_path). Raises `ConfigurationError` if the key or the certificate cannot be used.
        """
        tls = tls or TlsFiles()
        _check_tls(tls)
        self.host = host
        self.port = port
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], HttpProtocol),
            # Clients could write any address into X-Forwarded-For.
            proxy_headers=False,
            log_config=None,
            # Found out otherwise from the application's type, for which it would have to be a coroutine function.
            interface="asgi3",
            access_log=False,
            lifespan="off",
            ws="none",
            ssl_keyfile=tls.keyfile,
            ssl_certfile=tls.certfile,
            ssl_ca_certs=tls.ca_certs,
            ssl_cert_reqs=tls.cert_reqs,
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
        """Accept no more connections, and wait up to `grace_s` seconds for running requests.

        Then `on_grace_over` is called, which may end them with a response. After another second they are cut off.
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


def _check_tls(tls: TlsFiles) -> None:
    """Raise `ConfigurationError` if TLS files are missing, do not fit together or cannot be read."""
    keyfile, certfile = tls.keyfile, tls.certfile
    _check_authorities(tls)
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


def _check_authorities(tls: TlsFiles) -> None:
    """Check the settings for certificates of clients. Raises `ConfigurationError` if one of them lacks another, or if
    the file of authorities cannot be used.
    """
    if tls.ca_certs is None:
        if tls.cert_reqs != ssl.CERT_NONE:
            raise ConfigurationError(f"--ssl-cert-reqs {tls.cert_reqs} needs --ssl-ca-certs")
        return
    if tls.certfile is None:
        raise ConfigurationError("--ssl-ca-certs needs --ssl-certfile")
    # Without this check, an operator could believe that only clients with a certificate are served.
    if tls.cert_reqs == ssl.CERT_NONE:
        raise ConfigurationError(
            "--ssl-ca-certs has no effect without --ssl-cert-reqs: give 2 to require certificates of clients, or 1 to"
            " check only those that are sent"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(tls.ca_certs)
    except OSError as exc:
        raise ConfigurationError(f"--ssl-ca-certs {tls.ca_certs} cannot be used: {exc.strerror or exc}") from exc


class _Server(uvicorn.Server):
    """uvicorn's server, with connections accepted by `Listener`, which limits their number, instead of by asyncio."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._limits = limits
        self._writes = WriteCoalescer()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        limits = self._limits
        slots = Slots(
            affordable_connections(limits.max_connections),
            limits.max_connections_per_address,
            limits.max_kept_bytes,
        )
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
