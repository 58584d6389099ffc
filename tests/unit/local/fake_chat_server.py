"""An OpenAI-compatible server on loopback whose answers a test writes, event by event."""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

DONE = "[DONE]"


def deltas(*texts: str, kind: str = "content") -> list[str]:
    """Return the events of a chat's answer, without its end."""
    return [json.dumps({"choices": [{"delta": {kind: text}}]}, ensure_ascii=False) for text in texts]


class FakeChatServer:
    """`with FakeChatServer([answer, …]) as server`: gives one answer of `answers` to each request, in order.

    An answer is a list of events, or a status with a body. After an answer without `DONE` the connection stays open
    until the client closes it, if `holds` is true.
    """

    def __init__(self, answers: Sequence[list[str] | tuple[int, str]], *, holds: bool = False) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Paths and bodies of the requests."""
        self.keys: list[str | None] = []
        self.has_lost_client = threading.Event()
        self._holds = holds
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_args: object) -> None:
                """Print no line for each request, unlike the base class."""

            def do_GET(self) -> None:
                server.keys.append(self.headers.get("authorization"))
                self._send(200, json.dumps({"data": [{"id": "small"}, {"id": "other"}]}))

            def do_POST(self) -> None:
                server.keys.append(self.headers.get("authorization"))
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.requests.append((self.path, body))
                answer = server.answers.pop(0)
                if isinstance(answer, tuple):
                    self._send(*answer)
                    return
                self.send_response(200)
                self.end_headers()
                for event in answer:
                    self.wfile.write(f"data: {event}\n\n".encode())
                if server._holds and DONE not in answer:
                    self.connection.settimeout(20.0)
                    if self.connection.recv(1) == b"":
                        server.has_lost_client.set()

            def _send(self, status: int, body: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
