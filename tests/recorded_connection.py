"""A client's connection without a network, of which what is written is kept."""

from baton_serve.services.common.http.exchange import Exchange


class RecordedConnection:
    """`services.common.http.exchange.Connection`."""

    def __init__(self) -> None:
        self.is_write_paused = False
        self.written: list[bytes] = []
        self.completed_ones: list[Exchange] = []

    def default_head(self) -> bytes:
        return b"server: a\r\n"

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def writable(self) -> None: ...
    def keep_response(self, num_bytes: int, since: float) -> bool:
        return True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def break_off(self) -> None: ...

    def completed(self, exchange: Exchange) -> None:
        self.completed_ones.append(exchange)

    def body(self) -> bytes:
        """Return the body of a chunked answer."""
        rest, body = b"".join(self.written).partition(b"\r\n\r\n")[2], b""
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if not int(size, 16):
                return body
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
