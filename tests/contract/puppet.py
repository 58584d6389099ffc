"""A process that does what its arguments say, for tests of the supervisor.

`router PORT COUNT`: serves a /health of COUNT instances. `ready`: says so and waits. `deaf`: and ignores SIGTERM.
`exit STATUS TEXT`: says TEXT and ends. `once FILE STATUS`: waits if FILE exists, else makes it and ends with STATUS.
`hung FILE STATUS TEXT`: says so, and if FILE exists says TEXT and ends with STATUS. `slow FILE`: waits, without saying
so if FILE exists.
`drains SECONDS`: ends so long after SIGTERM.
`unless FILE TEXT`: waits unless FILE exists, else says TEXT and ends. `variable NAME`: says what it has.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NoReturn


def is_fit_to_fork() -> bool:
    """For the fork server, which may have imported this."""
    return True


def drain(seconds: float, *_: object) -> None:
    time.sleep(seconds)
    sys.exit(0)


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    match list(argv):
        case ["router", port, count]:
            serve(int(port), int(count))
        case ["exit", status, text]:
            sys.stderr.write(f"some line\n{text}\n")
            return int(status)
        case ["unless", file, text] if Path(file).exists():
            sys.stderr.write(f"{text}\n")
            return 1
        case ["once", file, status] if not Path(file).exists():
            Path(file).touch()
            return int(status)
        case ["hung", file, status, text] if Path(file).exists():
            say_ready()
            sys.stderr.write(f"{text}\n")
            return int(status)
        case ["slow", file] if Path(file).exists():
            wait()
        case ["variable", name]:
            sys.stderr.write(f"{name}={os.environ[name]}\n")
        case ["drains", seconds]:
            signal.signal(signal.SIGTERM, partial(drain, float(seconds)))
        case ["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say_ready()
    wait()


def say_ready() -> None:
    sys.stdout.write("ready puppet\n")
    sys.stdout.flush()


def wait() -> NoReturn:
    while True:
        signal.pause()


def serve(port: int, count: int) -> None:
    body = json.dumps({"pools": {"prefill": count}}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
