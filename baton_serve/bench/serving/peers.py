"""Measure Baton and other servers with the same weights and the same load, one after another on this machine.

`baton-bench peers MODEL [--vllm PATH] [--llama-server PATH --gguf FILE] [--url NAME=URL] [--json]`

Starts `baton serve` with one unified instance, then each other server that is given or found on the PATH: vLLM,
llama.cpp, OpenVINO GenAI, `transformers serve`. Prompts are new random token IDs of exact length. `decode` is output
tokens per second of all streams together, including the time for prompts. `prefill` is prompt tokens divided by TTFT.
Values are medians.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.load_client import BenchTarget, RequestOutcome, drive
from baton_serve.bench.serving.workload import BenchRequest
from baton_serve.child_command import module_command

START_S, COMPLETE_S, STOP_S = 300.0, 120.0, 15.0
OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")
FIRST_TOKEN, LAST_TOKEN = 100, 8000
"""Range of prompt tokens: ordinary IDs in the vocabulary of every common model."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure. `{port}` in `argv` is replaced by a free port. `argv` is empty if the server runs already
    at `url`."""

    name: str
    argv: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    url: str = ""
    ready: str = "/health"


def servers(options: argparse.Namespace) -> list[Server]:
    """Return Baton first, then the servers that were given on the command line or found on the PATH."""
    model, length = options.model, str(options.max_model_len)
    baton = module_command("baton_serve", "serve", model, "--unified", "1", "--prefill", "0", "--decode", "0")
    found = [Server("Baton", [*baton, "--port", "{port}", "--max-model-len", length, *options.baton_args])]
    if vllm := options.vllm or shutil.which("vllm"):
        serve = [vllm, "serve", model, "--port", "{port}", "--dtype", "bfloat16", "--max-model-len", length]
        found.append(Server("vLLM", serve, {"VLLM_CPU_KVCACHE_SPACE": "2"}))
    llama = options.llama_server or shutil.which("llama-server")
    if llama and options.gguf:
        slots = str(max(options.concurrency))
        context = str(options.max_model_len * max(options.concurrency))
        found.append(Server("llama.cpp", [llama, "-m", options.gguf, "--port", "{port}", "-np", slots, "-c", context]))
    if options.transformers:
        serve = [
            options.transformers,
            "serve",
            model,
            "--port",
            "{port}",
            "--dtype",
            "bfloat16",
            "--continuous-batching",
        ]
        found.append(Server("transformers", serve))
    if options.openvino and options.openvino_model:
        serve = [options.openvino, str(OPENVINO_SERVER), options.openvino_model, "--port", "{port}"]
        found.append(Server("OpenVINO GenAI", serve, ready="/v1/models"))
    named = (text.partition("=") for text in options.url)
    return found + [Server(name, url=url, ready="/v1/models") for name, _, url in named]


@contextmanager
def running(server: Server) -> Iterator[str]:
    """Start a server, wait until it is ready and yield its URL; on exit stop it with all its child processes. Raises
    `SystemExit` if it does not start, and shows the end of its log on stderr if the caller raises that too."""
    if not server.argv:
        yield server.url
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    argv = [part.replace("{port}", port) for part in server.argv]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            # A session of its own, so that `killpg` reaches the worker processes of the server.
            argv,
            stdout=log,
            stderr=log,
            env=os.environ | server.variables,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url + server.ready, server.name)
            yield url
        except SystemExit:
            log.seek(0)
            sys.stderr.write(f"the end of the log of {server.name}:\n{log.read()[-2000:].decode(errors='replace')}\n")
            raise
        finally:
            _stop(process)


def wait_complete(url: str, count: int) -> None:
    """Wait until the router has `count` instances. Raises `SystemExit` after `COMPLETE_S`."""
    deadline = time.monotonic() + COMPLETE_S
    while time.monotonic() < deadline:
        if len(httpx.get(f"{url}/health", timeout=5).json()["instances"]) == count:
            return
        time.sleep(0.1)
    raise SystemExit(f"the {count} instances were not ready within {COMPLETE_S:g} s")


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, name: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"baton-bench peers: {name} did not start; the end of its log stands above")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    # SIGINT first: most servers shut down cleanly on Ctrl-C. The group includes worker processes.
    for number, patience in ((signal.SIGINT, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        return


class LoadGenerator:
    """Sends closed-loop load to one server. Prompts never repeat, so that no prefix cache helps; every server gets the
    same ones."""

    def __init__(self, url: str, model: str | None) -> None:
        self._random = random.Random(0)
        self._target = BenchTarget(url, model)

    def send(self, count: int, prompt_tokens: int, max_tokens: int) -> tuple[list[RequestOutcome], float]:
        """Send `count` requests at once; return their outcomes and the seconds until the last one ended. Raises
        `SystemExit` if one fails."""
        prompts = ([self._random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(prompt_tokens)] for _ in range(count))
        requests = [BenchRequest(at_s=0.0, prompt=prompt, max_tokens=max_tokens) for prompt in prompts]
        outcomes, seconds = asyncio.run(drive(requests, self._target))
        if failed := [o.error for o in outcomes if o.error]:
            raise SystemExit(f"baton-bench peers: {self._target.base_url} answered {failed[0]}")
        return outcomes, seconds


def measure(server: Server, options: argparse.Namespace) -> dict[str, float]:
    """Start a server and return tokens per second of each case, and the seconds until it was ready."""
    started = time.monotonic()
    with running(server) as url:
        values = {"ready, s": time.monotonic() - started} if server.argv else {}
        load = LoadGenerator(url, options.served_model_name)
        # Warm up: the first request may compile kernels.
        load.send(1, 16, 4)
        for concurrency in options.concurrency:
            # Warm up with this batch size, for servers that compile or capture graphs for each.
            load.send(concurrency, options.prompt, 2)
            runs = [load.send(concurrency, options.prompt, options.output) for _ in range(options.repeats)]
            rates = [sum(o.output_tokens for o in outcomes) / seconds for outcomes, seconds in runs]
            values[f"decode, {concurrency} streams"] = statistics.median(rates)
        for length in options.prefill:
            times = [load.send(1, length, 1)[0][0].ttft_s for _ in range(options.repeats)]
            values[f"prefill {length}"] = length / statistics.median(times)
    for case, value in values.items():
        sys.stderr.write(f"{server.name}: {case}: {value:.4g}\n")
    return values


def rows(values_of: dict[str, dict[str, float]]) -> Iterator[Row]:
    """Yield one row per case and peer; `ratio` is Baton's value divided by the peer's."""
    ours, *others = values_of
    for case, value in values_of[ours].items():
        unit = "s" if case.endswith(", s") else "tok/s"
        for peer in others or [""]:
            theirs = values_of[peer].get(case) if peer else None
            yield Row(
                "peers", case, value, unit, None, value / theirs if theirs else None, peer if theirs else None, theirs
            )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench peers", description=__doc__)
    made.add_argument("model", help="folder of a model in Hugging Face format")
    made.add_argument("--vllm", help="the `vllm` command of an environment (default: the one on the PATH)")
    made.add_argument("--llama-server", help="the `llama-server` command (default: the one on the PATH)")
    made.add_argument("--gguf", help="the same weights as GGUF file, for llama.cpp")
    made.add_argument("--transformers", help="the `transformers` command of an environment, for `transformers serve`")
    made.add_argument("--openvino", help="the Python of an environment with openvino-genai")
    made.add_argument("--openvino-model", help="the same weights, as exported by `optimum-cli export openvino`")
    made.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="name and URL of a server that is running already; may be repeated",
    )
    made.add_argument("--served-model-name", help="model name in requests (default: the first one of /v1/models)")
    made.add_argument(
        "--baton-args", nargs=argparse.REMAINDER, default=[], help="more options of `baton serve`; must come last"
    )
    made.add_argument("--max-model-len", type=int, default=4096, help="context length of each server")
    made.add_argument("--prompt", type=int, default=128, help="prompt tokens of the decode cases")
    made.add_argument("--output", type=int, default=64, help="output tokens of the decode cases")
    made.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 4, 16],
        help="numbers of concurrent streams of the decode cases",
    )
    made.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="prompt lengths of the prefill cases")
    made.add_argument("--repeats", type=int, default=5, help="repetitions of each case")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if not (Path(options.model) / "config.json").is_file():
        raise SystemExit(f"baton-bench peers: {options.model} has no config.json; give the folder of a model")
    show(rows({server.name: measure(server, options) for server in servers(options)}), as_json=options.json)
