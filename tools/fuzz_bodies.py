"""Search for request bodies that cost a router too much: `make fuzz-bodies`, or
`python tools/fuzz_bodies.py [--seconds 60] [--seed 0]`

The search takes a small request of an endpoint and makes one of its fields, or an unknown one, as long, wide, deep or
unusual as `--max-request-bytes` allows. A router with fake instances answers it in this process. It measures the
longest time in which the event loop was blocked, peak memory, log lines and the answer. A body that costs too much is
written to a file `costly-…json`, its measurements to stdout. Linux only.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.router.main import GC_THRESHOLD
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.served_model import ServedModel
from tests.unit.router.conftest import Router
from tests.unit.router.fakes import FakeCluster, record
from tests.unit.router.tokenizers_for_tests import write_folder

MAX_BYTES = 8 * 1024 * 1024
MAX_STALL_S = 0.05
"""Longest time for which one request may block the event loop."""
MEMORY_FACTOR = 20
"""Most memory of a request, as a multiple of its body."""
FREE_MEMORY = 64 << 20
"""Memory in bytes that any request may use in addition: small bodies cannot fill a machine."""

MAX_LOG_LINES = 300
"""Most log lines of one request: one for each prompt, and a few others."""

MAX_ANSWER_BYTES = 4096
"""Largest body of an error."""

_SLICE = 64 * 1024
_TRIES = 3
"""Number of measurements that must all find an excess, because the machine may be busy."""
_TICK_S = 0.0005
_MODEL_LEN = 32_768

_MESSAGES = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_BLOCK = {"type": "text", "text": "a"}
_RULES = {
    "max_tokens": 1,
    "stop": ["x"],
    "stop_token_ids": [5],
    "bad_words": ["a"],
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5, 6],
    "metadata": {"a": "b"},
    "user": "u",
    "truncate_prompt_tokens": 5,
    "model": "tiny",
}
_CHAT = {
    "messages": [*_MESSAGES, {"role": "assistant", "content": None, "tool_calls": [_CALL]}, *_MESSAGES],
    "chat_template_kwargs": {"a": 1},
    "tools": [_TOOL],
}
_POOLING = {"model": "tiny", "truncate_prompt_tokens": 5, "user": "u"}

WRITING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", **_RULES}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "echo": True, "logit_bias": {"5": 1.0}}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 1, "guided_choice": ["a", "b"]}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 1, "structured_outputs": {"regex": "a"}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": ["a"]}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"structural_tag": "{}"}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "guided_json": "{}"}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 1}),
    ("/v1/chat/completions", {**_CHAT, **_RULES, "tool_choice": "none", "documents": [{"a": "b"}]}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, "metadata": {"a": "b"}, "instructions": "a"}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "a"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "tool_choice": "none",
            "max_output_tokens": 1,
        },
    ),
    ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": "a"}], "instructions": "a"}),
    (
        "/v1/messages",
        {
            "max_tokens": 1,
            "system": [_BLOCK],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [_BLOCK]}]},
            ],
            "stop_sequences": ["x"],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "none"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [_BLOCK]}], "system": "a"}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", {"messages": _MESSAGES, "tools": [_TOOL]}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/invocations", {"prompt": "a", "max_tokens": 1, "model": "tiny"}),
    ("/invocations", {"messages": _MESSAGES, "max_tokens": 1}),
]

EMBEDDING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "a", **_POOLING}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": [5, 6]}),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "truncate_prompt_tokens": 5}),
    ("/v1/embeddings", {"messages": _MESSAGES}),
    ("/pooling", {"input": ["a", "b"], "task": "token_embed"}),
    ("/score", {"text_1": "a", "text_2": ["a", "b"], **_POOLING}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b"]}),
    ("/rerank", {"query": "a", "documents": ["a", {"text": "b"}], **_POOLING}),
    ("/rerank", {"query": "a", "documents": [{"text": "b"}]}),
    ("/invocations", {"query": "a", "documents": ["a", {"text": "b"}]}),
]

SCORING: list[tuple[str, dict[str, Any]]] = [
    ("/classify", {"input": ["a", "b"]}),
    ("/score", {"text_1": "a", "text_2": ["a", "b"], "truncate_prompt_tokens": 5}),
    ("/score", {"text_1": "a", "text_2": ["a", "b"]}),
    ("/rerank", {"query": "a", "documents": ["a", {"text": "b"}], "return_documents": True}),
]

SERVED: list[tuple[PoolingProfile | None, list[tuple[str, dict[str, Any]]]]] = [
    (None, WRITING),
    (PoolingProfile(tasks=["embed", "token_embed"], dimensions=8), EMBEDDING),
    (PoolingProfile(tasks=["classify"], labels=["LABEL_0"]), SCORING),
]

_PLACE = "\x00here\x00"
"""Marker for the value of a request that is replaced."""
_TEXTS = [
    "a",
    " ",
    "a ",
    "\n",
    '"',
    "\\",
    "\x00",
    "é",
    "\U0001f525",
    "[],",
    '{"a":1},',
    "1,",
    "<|im_start|>",
    "hello w",
]
_ELEMENTS = ["1", "65535", "1.5", "-1", "null", "true", '""', '"a"', "[]", "{}", "[1]", "[[]]", '["a"]', '{"a":1}']
_ELEMENTS += ['{"role":"user","content":"a"}', '{"type":"text","text":"a"}', '{"text":"a"}', json.dumps(_TOOL)]
_ELEMENTS += [json.dumps(_CALL), '{"type":"reasoning","content":"a"}', '{"role":"user","content":[{"type":"text"}]}']


@dataclass(frozen=True, slots=True)
class Case:
    """A request. `note` describes how it differs from the small one."""

    path: str
    body: bytes
    note: str


@dataclass(frozen=True, slots=True)
class Cost:
    """Measured cost of one request. `memory` is peak memory in bytes beyond that before the request."""

    status: int
    stall_s: float
    memory: int
    log_lines: int
    answer_bytes: int
    seconds: float

    def excesses(self, body_bytes: int, *, leniency: float = 1.0) -> list[str]:
        """Return a description of each limit that is exceeded."""
        memory_limit = leniency * (MEMORY_FACTOR * body_bytes + FREE_MEMORY)
        found = {
            f"the event loop was blocked for {self.stall_s * 1e3:.0f} ms": self.stall_s > leniency * MAX_STALL_S,
            f"{self.memory >> 20} MB for {body_bytes >> 10} kB": self.memory > memory_limit,
            f"{self.log_lines} lines logged": self.log_lines > MAX_LOG_LINES,
            f"an error of {self.answer_bytes} bytes": self.status >= 400 and self.answer_bytes > MAX_ANSWER_BYTES,
            f"status {self.status}": self.status in (0, 500),
        }
        return [text for text, is_found in found.items() if is_found]


def cases(requests: Sequence[tuple[str, dict[str, Any]]], chance: random.Random, max_bytes: int) -> Iterator[Case]:
    """Yield random cases endlessly."""
    while True:
        path, request = chance.choice(requests)
        size = int(_SLICE * (max_bytes / _SLICE) ** chance.random()) - 2048
        changed = json.loads(json.dumps(request))
        where = _put_place(changed, chance)
        name, filler = _filler(chance, size)
        text = json.dumps(changed).replace(json.dumps(_PLACE), filler)
        body = text.encode(errors="surrogatepass")[:max_bytes]
        yield Case(path, body, f"{where} = {name}")


def _put_place(request: dict[str, Any], chance: random.Random) -> str:
    """Replace a random value, at any depth, by `_PLACE`; return its path."""
    if chance.random() < 0.05:
        request["unknown"] = _PLACE
        return "unknown"
    at: Any = request
    names: list[str] = []
    while True:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        names.append(str(key))
        value = at[key]
        if not isinstance(value, dict | list) or not value or chance.random() < 0.4:
            at[key] = _PLACE
            return ".".join(names)
        at = value


def _filler(chance: random.Random, size: int) -> tuple[str, str]:
    """Return a description and a JSON text of about `size` characters."""
    kind = chance.choice(["list", "list", "text", "text", "object", "deep", "lists", "number"])
    if kind == "text":
        unit = chance.choice(_TEXTS)
        text = json.dumps(unit, ensure_ascii=False)[1:-1]
        return f"text of {unit!r}", f'"{text * max(1, size // len(text.encode()))}"'
    if kind == "object":
        return "object", "{" + ",".join(f'"{i:x}":1' for i in range(size // 10)) + "}"
    if kind == "deep":
        opening, closing = chance.choice([("[", "]"), ('{"a":', "}")])
        depth = min(size // 2, 10 ** chance.randrange(1, 7))
        return f"{depth} times {opening}", opening * depth + "1" + closing * depth
    if kind == "number":
        return "number", "1" * min(size, 10 ** chance.randrange(1, 7))
    element = chance.choice(_ELEMENTS)
    if kind == "lists":
        row = "[" + ",".join([element] * chance.randrange(1, 200)) + "]"
        return f"lists of {element}", "[" + ",".join([row] * max(1, size // (len(row) + 1))) + "]"
    count = min(size // (len(element) + 1), 10 ** chance.randrange(2, 8))
    last = chance.choice(["", "", ',{"x":[]}', ',"x"', ",null"])
    return f"{count} times {element}{last}", "[" + ",".join([element] * max(1, count)) + last + "]"


class Meter:
    """Measures the cost of one request in this process."""

    def __init__(self) -> None:
        self._allocator = ctypes.CDLL(None)

    async def cost(self, router: Router, case: Case) -> Cost:
        gc.collect()
        # Return free memory to the system, so that its reuse counts as growth.
        self._allocator.malloc_trim(0)
        before = _begin_to_count_memory()
        ticker = _Ticker()
        with self._counting_lines() as lines:
            begun = time.perf_counter()
            ticking = asyncio.get_running_loop().create_task(ticker.run())
            await asyncio.sleep(2 * _TICK_S)
            try:
                status, num_bytes = await _ask(router, case)
            finally:
                await asyncio.sleep(2 * _TICK_S)
                ticking.cancel()
            seconds = time.perf_counter() - begun
        return Cost(
            status=status,
            stall_s=ticker.longest_s,
            memory=max(0, _status_bytes("VmHWM") - before),
            log_lines=lines.num_lines,
            answer_bytes=num_bytes,
            seconds=seconds,
        )

    @contextmanager
    def _counting_lines(self) -> "Iterator[_LineCounter]":
        handler = _LineCounter()
        root = logging.getLogger("baton_serve")
        level, propagates = root.level, root.propagate
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
        try:
            yield handler
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            root.propagate = propagates


class _LineCounter(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_lines += 1


class _Ticker:
    """Measures how late a short timer fires: the longest time in which the event loop was blocked."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            before, computed_before = time.perf_counter(), time.process_time()
            await asyncio.sleep(_TICK_S)
            late_s = time.perf_counter() - before - _TICK_S
            # Not later than this process has computed: if other processes had the cores, the delay is not the router's.
            self.longest_s = max(self.longest_s, min(late_s, time.process_time() - computed_before))


async def _ask(router: Router, case: Case) -> tuple[int, int]:
    """Send a request to the ASGI app; return status and size of the answer, or 0 without one."""
    status = num_bytes = at = 0
    gone = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        nonlocal at
        if at >= len(case.body):
            await gone.wait()
            return {"type": "http.disconnect"}
        part, at = case.body[at : at + _SLICE], at + _SLICE
        return {"type": "http.request", "body": part, "more_body": at < len(case.body)}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, num_bytes
        status = message.get("status", status)
        num_bytes += len(message.get("body", b""))

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": case.path, "headers": headers, "query_string": b""}
    await router.app(scope, receive, send)
    return status, num_bytes


def _begin_to_count_memory() -> int:
    """Reset the kernel's peak-memory counter of this process and return the memory in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


@asynccontextmanager
async def running(folder: Path, pooling: PoolingProfile | None) -> AsyncIterator[Router]:
    """Start a router with one fake instance."""
    fakes = FakeCluster()
    fakes.add(record("unified-0", "unified", pooling=pooling, max_model_len=_MODEL_LEN))
    settings = RouterSettings(
        model=str(folder), instance_wait_s=0.05, enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    router = Router(fakes, settings, ServedModel.from_settings(settings), [])
    await router.start()
    try:
        yield router
    finally:
        await router.close()


async def search(
    folder: Path, chance: random.Random, *, is_over: Callable[[], bool], max_bytes: int, leniency: float = 1.0
) -> AsyncIterator[tuple[Case, Cost, list[str]]]:
    """Yield all cases with their cost and excesses. A case with an excess is measured again, up to `_TRIES` times: the
    machine may be busy."""
    meter = Meter()
    while not is_over():
        pooling, requests = chance.choice(SERVED)
        async with running(folder, pooling) as router:
            for case, _ in zip(cases(requests, chance, max_bytes), range(10), strict=False):
                if is_over():
                    break
                for _ in range(_TRIES):
                    cost = await meter.cost(router, case)
                    found = cost.excesses(len(case.body), leniency=leniency)
                    if not found:
                        break
                yield case, cost, found


async def _main(seconds: float, seed: int) -> int:
    ends_at = time.monotonic() + seconds
    num_cases = num_findings = 0
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    with tempfile.TemporaryDirectory() as folder:
        model = write_folder(Path(folder) / "tiny")
        found = search(model, random.Random(seed), is_over=lambda: time.monotonic() > ends_at, max_bytes=MAX_BYTES)
        async for case, cost, excesses in found:
            num_cases += 1
            if excesses:
                num_findings += 1
                _report(case, cost, excesses, Path(f"costly-{seed}-{num_cases}.json"))
    print(f"{num_cases} bodies, {num_findings} cost too much")
    return 1 if num_findings else 0


def _report(case: Case, cost: Cost, excesses: Sequence[str], file: Path) -> None:
    file.write_bytes(case.body)
    print(f"{file}: {case.path} {case.note}: {'; '.join(excesses)}; {msgspec.json.encode(cost).decode()}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--seconds", type=float, default=60.0, help="duration of the search")
    arguments.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    given = arguments.parse_args()
    sys.exit(asyncio.run(_main(given.seconds, given.seed)))
