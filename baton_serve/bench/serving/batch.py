"""Measure what a large batch costs live streams, and whether it survives processes that are killed.

`baton-bench batch [MODEL] [--lines 10000] [--clients 4] [--requests 400] [--rounds 5] [--no-kills] [--json]`

Starts `baton serve` with one prefill and one decode worker. Live clients stream answers, each with a random pause
between two requests. They are measured alternately without a batch and beside a batch of `/v1/batches`, `--rounds`
times each, so that both meet the same other load of the machine; the ratio is that of the pooled requests. The batch of
the last round runs to its end, the others are cancelled. One more batch runs on a new cluster, whose decode worker and
then router are killed with SIGKILL in the middle. Every line of these two must have exactly one answer.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import urlsplit

import httpx
import psutil

from baton_serve.bench.listening import listening_process
from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.load_client import (
    BenchTarget,
    RequestOutcome,
    body,
    connect,
    first_model,
    percentile,
    send,
)
from baton_serve.bench.serving.peers import Server, running, wait_complete
from baton_serve.bench.serving.workload import BenchRequest, random_prompt
from baton_serve.child_command import module_command

TARGET_RATIO = 1.1
"""Design target: p99 TTFT of live requests beside a batch, over that without."""
LINE_PROMPT_TOKENS, LINE_TOKENS = 32, 16
LIVE_PROMPT_TOKENS, LIVE_TOKENS = 128, 64
WARM_UP = 8
"""Live requests of each client that are sent first and not counted."""
BATCH_S = 3600.0
"""Longest time until a batch ends."""
POLL_S = 0.2


@dataclass(slots=True)
class LiveOutcomes:
    """The outcomes of live requests, of all rounds."""

    without: list[RequestOutcome] = field(default_factory=list)
    beside: list[RequestOutcome] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """How a batch ended. `wrong` counts the lines with no answer, several answers, or an error. `beside_per_s` are the
    lines per second beside live clients, 0 if that was not measured."""

    wrong: int
    beside_per_s: float = 0.0


class BatchClient:
    """Creates batches at one router and reads their results. The owner closes `client`."""

    def __init__(self, client: httpx.Client, *, lines: int, model: str, seed: int) -> None:
        """Create the client for batches of `lines` lines. `seed` determines the prompts."""
        self._client = client
        self._lines = lines
        self._model = model
        self._rng = random.Random(seed)

    def create(self) -> str:
        """Upload the lines, create the batch and return its id."""
        lines = "\n".join(self._line(number) for number in range(self._lines))
        form = {"file": ("lines.jsonl", lines.encode())}
        answer = self._client.post("/v1/files", data={"purpose": "batch"}, files=form).raise_for_status()
        order = {"input_file_id": answer.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        name: str = self._client.post("/v1/batches", json=order).raise_for_status().json()["id"]
        return name

    def _line(self, number: int) -> str:
        prompt = random_prompt(self._rng, LINE_PROMPT_TOKENS)
        asked = {"model": self._model, "prompt": prompt, "max_tokens": LINE_TOKENS, "ignore_eos": True}
        return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": asked})

    def cancel(self, batch_id: str) -> None:
        """Cancel the batch and wait until none of its requests runs."""
        self._client.post(f"/v1/batches/{batch_id}/cancel").raise_for_status()
        _wait_until(
            lambda: self._client.get(f"/v1/batches/{batch_id}").json()["status"] == "cancelled", what="cancelled batch"
        )

    def num_answered(self, batch_id: str) -> int:
        """Return how many lines have a result, or -1 while the router does not answer."""
        try:
            counts = self._client.get(f"/v1/batches/{batch_id}").raise_for_status().json()["request_counts"]
        except httpx.HTTPError:
            return -1
        return int(counts["completed"] + counts["failed"])

    def is_answering(self, batch_id: str, goal: int = 1) -> bool:
        """Return whether at least `goal` lines have a result."""
        return self.num_answered(batch_id) >= goal

    def wait(self, batch_id: str) -> BatchReport:
        """Wait for the end of the batch and compare its results with its lines. Raises `SystemExit` after `BATCH_S`."""
        deadline = time.monotonic() + BATCH_S
        while time.monotonic() < deadline:
            try:
                batch = self._client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
            except httpx.HTTPError:
                batch = {"status": "unknown: the router restarts"}
            if batch["status"] == "completed":
                return BatchReport(self._num_wrong(batch["output_file_id"]))
            if batch["status"] in ("failed", "expired", "cancelled"):
                raise SystemExit(f"baton-bench batch: the batch {batch['status']}: {batch['errors']}")
            time.sleep(POLL_S)
        raise SystemExit(f"baton-bench batch: the batch did not end within {BATCH_S:g} s")

    def _num_wrong(self, file_id: str) -> int:
        content = self._client.get(f"/v1/files/{file_id}/content").raise_for_status().content
        return num_wrong(content, self._lines)


def num_wrong(content: bytes, lines: int) -> int:
    """Return how many of `lines` lines do not have exactly one complete answer in the output file."""
    answers: Counter[str] = Counter()
    for line in content.splitlines():
        result = json.loads(line)
        usage = result["response"]["body"].get("usage") or {}
        # A short or failed answer counts as none.
        answers[result["custom_id"]] += usage.get("completion_tokens") == LINE_TOKENS
    return sum(answers[f"line-{number}"] != 1 for number in range(lines))


async def live_traffic(url: str, options: argparse.Namespace, *, seed: int, count: int) -> list[RequestOutcome]:
    """Stream `count` answers to each client and return their outcomes."""
    target = BenchTarget(url)
    async with connect(target) as client:
        model = await first_model(client)
        bound = BenchTarget(url, model=model)

        async def one(number: int) -> list[RequestOutcome]:
            rng, outcomes = random.Random(f"{seed} {number}"), []
            for _ in range(count):
                # Not all at the same moment: a person reads, an agent runs a tool.
                await asyncio.sleep(rng.expovariate(1 / options.pause_s))
                prompt = random_prompt(rng, LIVE_PROMPT_TOKENS)
                asked = body(BenchRequest(0.0, prompt, LIVE_TOKENS), bound, 0)
                outcomes.append(await send(client, bound.path(), asked))
            return outcomes

        found = await asyncio.gather(*(one(number) for number in range(options.clients)))
    return [outcome for outcomes in found for outcome in outcomes]


def serve_command(options: argparse.Namespace, folder: str) -> list[str]:
    """Return the command of a cluster with batches in `folder`."""
    command = module_command("baton_serve", "serve", *([options.model] if options.model else []))
    return [*command, "--port", "{port}", "--batch-folder", folder, *options.baton_args]


def measure_rounds(options: argparse.Namespace) -> tuple[LiveOutcomes, BatchReport]:
    """Start a cluster and measure live requests alternately without and beside a batch. Return also the end of the
    last batch."""
    live, rates = LiveOutcomes(), []
    count = max(1, options.requests // options.clients // options.rounds)
    with tempfile.TemporaryDirectory() as folder, running(Server("baton", serve_command(options, folder))) as url:
        wait_complete(url, 2)
        asyncio.run(live_traffic(url, options, seed=-1, count=WARM_UP))
        with httpx.Client(base_url=url, timeout=60.0) as client:
            batches = BatchClient(client, lines=options.lines, model=first_name(client), seed=0)
            for number in range(options.rounds):
                live.without += asyncio.run(live_traffic(url, options, seed=2 * number, count=count))
                batch_id = batches.create()
                _wait_until(partial(batches.is_answering, batch_id), what="first results")
                before, began = batches.num_answered(batch_id), time.monotonic()
                live.beside += asyncio.run(live_traffic(url, options, seed=2 * number + 1, count=count))
                answered = batches.num_answered(batch_id)
                if answered >= options.lines:
                    raise SystemExit("baton-bench batch: the batch ended before the live requests: give more --lines")
                rates.append((answered - before) / (time.monotonic() - began))
                _log(f"round {number + 1}: {rates[-1]:.3g} lines/s beside clients; {_ttfts(live)}")
                if number + 1 < options.rounds:
                    batches.cancel(batch_id)
            return live, replace(batches.wait(batch_id), beside_per_s=statistics.median(rates))


def first_name(client: httpx.Client) -> str:
    """Return the name of the first model."""
    name: str = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    return name


def _ttfts(live: LiveOutcomes) -> str:
    sides = (("without", live.without), ("beside", live.beside))
    return ", ".join(f"p99 TTFT {name} {_p99_ms(outcomes):.4g} ms" for name, outcomes in sides)


def killed_batch(options: argparse.Namespace) -> BatchReport:
    """Run a batch beside live requests, kill a decode worker and the router in the middle, and return how it ended.

    Live requests may fail with their router. Raises `SystemExit` if the batch does not continue.
    """
    with tempfile.TemporaryDirectory() as folder, running(Server("baton", serve_command(options, folder))) as url:
        wait_complete(url, 2)
        port = urlsplit(url).port or 0
        with httpx.Client(base_url=url, timeout=60.0) as client:
            batches = BatchClient(client, lines=options.lines, model=first_name(client), seed=1)
            batch_id = batches.create()
            for goal, killed in ((options.lines // 3, "decode worker"), (2 * options.lines // 3, "router")):
                _wait_until(partial(batches.is_answering, batch_id, goal), what=f"{goal} results")
                process = listening_process(port if killed == "router" else decode_port(client))
                process.send_signal(signal.SIGKILL)
                process.wait(10)
                _log(f"killed the {killed} after {goal} lines or a few more")
                wait_restarted(client, process)
            return batches.wait(batch_id)


def decode_port(client: httpx.Client) -> int:
    """Return the port of the HTTP server of the decode worker."""
    for instance in client.get("/health").raise_for_status().json()["instances"]:
        if instance["role"] == "decode":
            return int(instance["http_address"].rpartition(":")[2])
    raise SystemExit("baton-bench batch: there is no decode worker")


def wait_restarted(client: httpx.Client, killed: psutil.Process) -> None:
    """Wait until both instances are ready again. Raises `SystemExit` after `BATCH_S`."""

    def is_complete() -> bool:
        try:
            instances = client.get("/health").json()["instances"]
        except httpx.HTTPError:
            return False
        return len(instances) == 2 and not killed.is_running()

    _wait_until(is_complete, what="both instances")


def _wait_until(is_true: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + BATCH_S
    while not is_true():
        if time.monotonic() > deadline:
            raise SystemExit(f"baton-bench batch: no {what} within {BATCH_S:g} s")
        time.sleep(POLL_S)


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _p99_ms(outcomes: Sequence[RequestOutcome]) -> float:
    return percentile([outcome.ttft_s for outcome in outcomes], 99) * 1e3


def rows(live: LiveOutcomes, report: BatchReport, killed: BatchReport | None) -> Iterator[Row]:
    """Yield the live values beside those without a batch, then the lines of the batches. Raises `SystemExit` if a live
    request failed."""
    for outcome in (*live.without, *live.beside):
        if outcome.error is not None:
            raise SystemExit(f"baton-bench batch: a live request failed: {outcome.error}")
    peer = "without a batch"
    first, second = ([one.ttft_s * 1e3 for one in outcomes] for outcomes in (live.without, live.beside))
    gaps, later = ([gap * 1e3 for one in outcomes for gap in one.itls_s] for outcomes in (live.without, live.beside))
    pairs = (
        ("p99 TTFT", percentile(second, 99), percentile(first, 99)),
        ("median TTFT", statistics.median(second), statistics.median(first)),
        ("p99 gap", percentile(later, 99), percentile(gaps, 99)),
        ("median gap", statistics.median(later), statistics.median(gaps)),
    )
    for what, beside, without in pairs:
        limit = TARGET_RATIO * without if what == "p99 TTFT" else None
        yield Row("batch", f"live {what} beside a batch", beside, "ms", limit, beside / without, peer, without)
    yield Row("batch", "lines of the batch beside live clients", report.beside_per_s, "req/s")
    yield Row("batch", "lines without exactly one answer", report.wrong, "errors")
    if killed is not None:
        yield Row("batch", "the same, decode worker and router killed", killed.wrong, "errors")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench batch", description=__doc__)
    made.add_argument("model", nargs="?", default="", help="folder of a model; default: the bundled demo model")
    made.add_argument("--lines", type=int, default=10_000, help="lines of each batch")
    made.add_argument("--clients", type=int, default=4, help="number of live clients")
    made.add_argument("--requests", type=int, default=400, help="live requests without a batch, and beside one")
    made.add_argument("--pause-s", type=float, default=0.5, help="mean pause of a client between two requests")
    made.add_argument("--rounds", type=int, default=5, help="how often live requests are measured on each side")
    made.add_argument("--no-kills", action="store_true", help="leave out the batch whose processes are killed")
    made.add_argument("--only-kills", action="store_true", help="run only the batch whose processes are killed")
    made.add_argument("--baton-args", type=str.split, default=[], help="more options of `baton serve`, as one string")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.only_kills:
        killed = killed_batch(options)
        row = Row("batch", "lines without exactly one answer, processes killed", killed.wrong, "errors")
        show([row], as_json=options.json)
        return
    live, report = measure_rounds(options)
    show(rows(live, report, None if options.no_kills else killed_batch(options)), as_json=options.json)
