"""Parses requests with `httptools`, and decides how large their heads may be."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from baton_serve.services.common.http.exchange import EXTENSION, Exchange, Scope

_MAX_SMALL_PIECES = 8192
"""Pieces of a body after which they must be larger than `_MIN_PIECE_BYTES` on average."""
_MIN_PIECE_BYTES = 16
"""Smallest average size of the pieces of a long chunked body. Each piece takes 2 us, whatever its size: with chunks of
one byte a single read from the socket would block the event loop for 0.1 s."""


class HeadTooLargeError(Exception):
    """The head of a request (request line and headers) is larger than the limit, or the data between two chunks of its
    body is.
    """


class RequestHead(msgspec.Struct):
    """The head of an HTTP request: request line and headers."""

    method: str
    url: bytes
    version: str
    """The version of HTTP, for example `1.1`."""
    headers: list[tuple[bytes, bytes]]
    """Names in lower case and values, in the client's order."""
    has_valid_host: bool
    """The request has exactly one Host header, or none and is HTTP/1.0."""
    expects_continue: bool
    """The client waits for "100 Continue" before it sends its body."""
    keeps_alive: bool
    """The client may send another request on the connection."""


class RequestConsumer(Protocol):
    """Receives the requests that a `RequestParser` finds. If one of its methods raises, the request
    counts as invalid.
    """

    def on_head(self, head: RequestHead) -> None:
        """Begin a request whose head has arrived. The pieces of its body follow."""

    def on_body(self, body: bytes) -> None:
        """Accept `body`, the next piece of the current request's body."""

    def on_request_complete(self) -> None:
        """End the current request, because all of it has arrived."""


class RequestParser:
    """Finds the HTTP requests in the bytes of one connection and passes them to a `RequestConsumer`. httptools' parser
    calls the methods `on_…`.
    """

    def __init__(self, consumer: RequestConsumer, *, max_head_bytes: int, clock: Callable[[], float]) -> None:
        """Create a parser that passes requests to `consumer`. The head of a request may have at most `max_head_bytes`.
        `clock` returns the event loop's time in seconds.
        """
        self.head_since: float | None = None
        """Time at which an incomplete head began; None if there is none."""
        self._consumer = consumer
        self._max_head_bytes = max_head_bytes
        self._clock = clock
        self._parser = self._new_parser()
        self._is_in_head = True
        self._num_parsed = 0
        """Number of heads, pieces of bodies and ends of requests that the parser has found so far."""
        self._num_pieces = self._body_bytes = 0
        self._head_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_hosts = 0
        self._expects_continue = False

    def feed(self, data: bytes) -> None:
        """Parse `data`, the next bytes of the connection, and call the consumer for what is complete. Raises
        `httptools.HttpParserError` if it is not valid HTTP, and `HeadTooLargeError` if a head exceeds the limit. After
        an error, call it no more.
        """
        num_parsed = self._num_parsed
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._parse_without_upgrade(data, exc)
        # If the parser has found nothing, all of `data` belongs to an incomplete head, or in a chunked body to the
        # extension of a chunk or to trailers. All are limited: the parser keeps an incomplete line in memory and copies
        # it with each piece of data.
        if self._num_parsed == num_parsed:
            if self.head_since is None:
                self.head_since = self._clock()
            self._head_bytes += len(data)
            if self._head_bytes > self._max_head_bytes:
                raise HeadTooLargeError

    def close(self) -> None:
        """Drop the reference to the consumer, so that the memory is freed. Call `feed` no more after it."""
        # httptools' parser and the consumer refer to this object. Without these cycles all memory is freed immediately,
        # and not by the garbage collector.
        del self._parser, self._consumer

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._num_hosts = 0
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # Trailers after a chunked body are ignored.
        name = name.lower()
        self._headers.append((name, value))
        if name == b"host":
            self._num_hosts += 1
        elif name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return  # `_parse_without_upgrade` parses this head again, without the upgrade.
        self._is_in_head = False
        self._num_pieces = self._body_bytes = 0
        self._num_parsed += 1
        self._head_bytes, self.head_since = 0, None
        version, num_hosts = parser.get_http_version(), self._num_hosts
        self._consumer.on_head(
            RequestHead(
                parser.get_method().decode("ascii"),
                self._url,
                version,
                self._headers,
                # RFC 9112, section 3.2: two Host headers can make a proxy and this server see different hosts.
                num_hosts == 1 or (num_hosts == 0 and version == "1.0"),
                self._expects_continue,
                version != "1.0" and parser.should_keep_alive(),
            )
        )

    def on_body(self, body: bytes) -> None:
        self._num_parsed += 1
        self._head_bytes, self.head_since = 0, None
        self._num_pieces += 1
        self._body_bytes += len(body)
        if self._num_pieces > _MAX_SMALL_PIECES and self._body_bytes < _MIN_PIECE_BYTES * self._num_pieces:
            raise ValueError("the chunks of the body are too small")
        self._consumer.on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        self._num_parsed += 1
        self._head_bytes, self.head_since = 0, None
        self._consumer.on_request_complete()

    def _parse_without_upgrade(self, data: bytes, upgrade: httptools.HttpParserUpgrade) -> None:
        """Parse `data` again, beginning with a request that asks to switch to another protocol, such as h2c
        (`upgrade`), without that wish.

        Such a request is answered in HTTP/1.1, as RFC 9110 allows. Raises `httptools.HttpParserError` if it is not
        valid.
        """
        # The parser would take everything after such a head for the other protocol. So a new parser gets the head again
        # without the Upgrade header, and then the rest of the data.
        rest = memoryview(data)[upgrade.args[0] :]
        while True:
            version, method = self._parser.get_http_version(), self._parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError("this server is not a proxy")
            fields = [b"%b: %b" % field for field in self._headers if field[0] != b"upgrade"]
            start = b"%b %b HTTP/%b" % (method, self._url, version.encode("ascii"))
            self._parser = self._new_parser()
            self._parser.feed_data(b"\r\n".join((start, *fields, b"", b"")))
            if not rest:
                return
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as exc:
                rest = rest[exc.args[0] :]

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A response may be sent before the client has sent everything. After "connection: close" the parser must not
        # treat that rest as an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser


class ScopeBuilder:
    """Builds the ASGI scope (dict that describes a request) of each request of one connection."""

    def __init__(self, transport: asyncio.Transport, root_path: str) -> None:
        self._root_path = root_path
        self._common: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
            "scheme": "https" if is_ssl(transport) else "http",
            "root_path": root_path,
        }
        self._target: tuple[bytes, dict[str, Any]] = (b"", {})

    def scope(self, head: RequestHead, exchange: Exchange) -> Scope:
        """Return the ASGI scope of the request with this head; it refers to `exchange`. Raises
        `httptools.HttpParserError` or `ValueError` for an invalid URL.
        """
        # The last target is kept, because a client mostly requests the same path on a connection.
        if self._target[0] != head.url:
            self._target = (head.url, self._parsed(head.url))
        scope = self._common | self._target[1]
        scope["http_version"], scope["method"], scope["headers"] = head.version, head.method, head.headers
        scope["extensions"] = {EXTENSION: exchange}
        return scope

    def _parsed(self, url: bytes) -> dict[str, Any]:
        """Return the entries of the ASGI scope that depend on the request's URL: path, raw path and query string."""
        parsed = httptools.parse_url(url)
        raw = parsed.path or b""
        path = raw.decode("ascii")
        return {
            "path": self._root_path + (unquote(path) if "%" in path else path),
            "raw_path": self._root_path.encode("ascii") + raw,
            "query_string": parsed.query or b"",
        }
