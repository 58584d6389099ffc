"""OpenVINO GenAI behind the one request that `baton-bench peers` sends: a program for an environment of its own.

`PYTHON openvino_server.py MODEL_FOLDER --port N` needs `openvino-genai` and nothing of Baton. The folder is what
`optimum-cli export openvino` writes. Continuous batching runs in one thread; `POST /v1/completions` streams the tokens
of a prompt given as token ids, greedily, without regard to the end of the text.
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
YIELD_S = 0.0005
"""Between steps, for those who wait to read or to add."""


class Generator:
    """Owns the pipeline. Any thread may call `stream`."""

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
        """How many tokens came with each step."""
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
            """Not a line per request."""

    return Handler


class OpenVinoHttpServer(ThreadingHTTPServer):
    request_queue_size = 128  # all streams connect at once; five places would reset some


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cache-gb", type=int, default=2)
    options = parser.parse_args()
    generator = Generator(options.model, options.cache_gb)
    OpenVinoHttpServer(("127.0.0.1", options.port), handler(generator, options.model)).serve_forever()


if __name__ == "__main__":
    main()
