"""A small server of the OpenAI API on loopback, for tests: it answers each prompt with fixed words."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ("one", " two", " three")


@dataclass
class Received:
    """The requests to a server: paths, headers (lower case) and bodies of all POST requests, in order."""

    url: str
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def load(self) -> list[dict[str, Any]]:
        """Return the bodies without warm-up requests, which ask for four tokens."""
        return [body for body in self.bodies if 4 not in (body.get("max_tokens"), body.get("max_completion_tokens"))]


@contextmanager
def serving(*, refuse: int | None = None) -> Iterator[Received]:
    """Run a server until the end of the block. It answers every POST with the status `refuse` if that is given."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
            received.paths.append(self.path)
            received.headers.append({name.lower(): value for name, value in self.headers.items()})
            received.bodies.append(body)
            if refuse is not None:
                self._send(refuse, {"error": {"message": "refused"}})
            elif body.get("stream"):
                self._stream("delta" if "messages" in body else "text")
            else:
                self._send(200, {"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}})

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, kind: str) -> None:
            events: list[dict[str, Any]] = [{"choices": [{"text": word}]} for word in WORDS]
            if kind == "delta":
                events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
                events += [{"choices": [{"delta": {"content": word}}]} for word in WORDS]
                events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
            events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            data = "".join([*lines, "data: [DONE]\n\n"]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Write no log: the tests read what is printed."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    received = Received(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
