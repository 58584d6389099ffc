"""A minimal completions server for OpenVINO GenAI, which `baton-bench peers` runs in an environment of its own.

`PYTHON openvino_server.py MODEL_FOLDER --port N` needs `openvino-genai` and nothing of Baton. The folder is the output
of `optimum-cli export openvino`. One thread runs continuous batching. `POST /v1/completions` takes a prompt of token
IDs and streams greedy tokens; it ignores the end-of-text token.
"""

import argparse
import importlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

STEP_DEADLINE_S = 300.0
"""Longest wait of a request for its next token."""
YIELD_S = 0.0005
"""Pause between steps in which request threads can take the lock, to read tokens or add requests."""


class Generator:
    """Owns the pipeline and the thread that runs its steps. `stream` may be called from any thread."""

    def __init__(self, folder: str, cache_gb: int) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        scheduling = self._genai.SchedulerConfig()
        scheduling.cache_size = cache_gb
        self._pipeline = self._genai.ContinuousBatchingPipeline(folder, scheduling, "CPU")
        self._numbers = count()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[int]:
        """Add a request and yield the number of new tokens after each step. Raises `TimeoutError`."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        with self._changed:
            handle = self._pipeline.add_request(
                next(self._numbers), self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64)), config
            )
            self._changed.notify_all()
        left = max_tokens
        while left > 0:
            with self._changed:
                if not self._changed.wait_for(handle.can_read, STEP_DEADLINE_S):
                    raise TimeoutError("no token came")
                tokens = sum(len(output.generated_ids) for output in handle.read().values())
            left -= tokens
            yield tokens

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._pipeline.has_non_finished_requests)
                self._pipeline.step()
                self._changed.notify_all()
            time.sleep(YIELD_S)


def handler(generator: Generator, name: str) -> type[BaseHTTPRequestHandler]:
    """Return the request handler class of a server for this generator."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": name}]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            total = 0
            for tokens in generator.stream(asked["prompt"], asked["max_tokens"]):
                total += tokens
                self._event({"choices": [{"index": 0, "text": "." * tokens}]})
            usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": total}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _event(self, content: dict[str, object]) -> None:
            self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
            self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            """Do nothing: a line per request would slow down the measurement."""

    return Handler


class OpenVinoHttpServer(ThreadingHTTPServer):
    # All streams connect at once; with the default of 5, some connections would be reset.
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with the exported model")
    parser.add_argument("--port", type=int, required=True, help="TCP port on 127.0.0.1")
    parser.add_argument("--cache-gb", type=int, default=2, help="size of the KV cache in GB")
    options = parser.parse_args()
    generator = Generator(options.model, options.cache_gb)
    OpenVinoHttpServer(("127.0.0.1", options.port), handler(generator, options.model)).serve_forever()


if __name__ == "__main__":
    main()
