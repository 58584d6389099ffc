"""`make demo`: starts a local cluster with the bundled model, asks it questions and prints the time split of each.

It does only what any user can do: it starts `baton serve`, sends HTTP requests and stops the cluster with SIGINT.
"""

import asyncio
import collections
import contextlib
import random
import signal
import sys
import time
from dataclasses import dataclass
from random import Random

import httpx

from baton_serve.services.common.errors import LocalError, RemoteError
from baton_serve.services.common.logs import configure_logs
from baton_serve.services.common.process_lifecycle import Lifecycle, run
from baton_serve.services.local.demo_client import DemoUsage, TimeSplit, chat_with_tools, read_health, stream_chat
from baton_serve.services.local.serve_process import STOP_TIMEOUT_S, BannerReader, NotStartedError, serve_command

_KINDS = "red blue green black white yellow old soft rusty square".split()
_THINGS = "box clock lamp door robot purse radio flute hammer wallet".split()
_FACTS = (
    "The code of the {thing} is {code}.",
    "Remember that the code of the {thing} is {code}.",
    "Note: the {thing} has the code {code}.",
    "Use the code {code} for the {thing}.",
)
_FILLERS = (
    "The painter travelled together to the cellar.",
    "It was a stormy day in August, and the lobby was quiet.",
    "The driver drove often to the museum.",
    "The child went calmly to the office.",
)
NUM_FACTS = 62
"""Facts in one prompt of the demo: about 1,000 tokens of the demo model's 2,048."""
SEEDS = (0, 1, 2, 3, 4, 5)
"""Seeds of prompts about which transformers gives the right answers with the demo model.

The model is small: it answers about 3 % of such questions wrongly by itself. With these prompts a wrong answer in the
demo means that Baton has lost or damaged a KV block.
"""


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement in the text of a demo prompt: a thing and its code."""

    thing: str
    code: str

    @property
    def question(self) -> str:
        return f"What is the code of the {self.thing}?"


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A long text for the demo with the facts that it states, about two of which the demo asks.

    The demo model answers a question about a fact only if all KV blocks of the text have arrived: a lost or damaged
    block makes the answer wrong.
    """

    text: str
    facts: list[Fact]
    """The facts in the order of the text."""

    @property
    def asked(self) -> tuple[Fact, Fact]:
        """Return the two facts that the demo asks for: one from the first blocks and one from the last, so that a lost
        block at either end makes an answer wrong.
        """
        return self.facts[3], self.facts[-9]


def make_demo_prompt(random: Random, *, num_facts: int = NUM_FACTS) -> DemoPrompt:
    """Return a prompt of the demo with `num_facts` facts; their order, words and codes are drawn from `random`."""
    things = random.sample([f"{kind} {thing}" for kind in _KINDS for thing in _THINGS], num_facts)
    codes = random.sample(range(1000, 10_000), num_facts)
    facts = [Fact(thing, str(code)) for thing, code in zip(things, codes, strict=True)]
    sentences: list[str] = []
    for number, fact in enumerate(facts):
        sentences.append(random.choice(_FACTS).format(thing=fact.thing, code=fact.code))
        if number % 6 == 5:
            sentences.append(random.choice(_FILLERS))
    return DemoPrompt(" ".join(sentences), facts)


PROGRAM = "baton demo"
WEATHER_TOOL = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
START_TIMEOUT_S = 300.0
LINK_REPORT_TIMEOUT_S = 10.0
"""Longest time to wait until a measured transfer rate appears in the router's /health."""


def main() -> int:
    """Run the demo of `make demo` and return its exit status."""
    configure_logs(level="warning", format="text")

    async def start(lifecycle: Lifecycle) -> None:
        cluster = ServeProcess()
        lifecycle.on_stop("baton serve", cluster.stop, deadline_s=STOP_TIMEOUT_S)
        say("Starting a router, a prefill worker and a decode worker with the bundled model ...")
        began = time.monotonic()
        url = await cluster.start()
        say(f"ready after {time.monotonic() - began:.1f} s at {url}/v1\n")
        await run_demo(url)
        lifecycle.request_stop("the demo is over")

    return run(start, program=PROGRAM, expected=(LocalError, RemoteError, httpx.HTTPError))


def say(text: str = "", *, end: str = "\n") -> None:
    """Print `text` and `end` to standard output immediately: an answer is shown token by token."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


class ServeProcess:
    """Runs `baton serve` with the demo model on a free port. The log of `baton serve` is shown only if
    the start fails.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._recent_log: collections.deque[str] = collections.deque(maxlen=20)
        self._log_reader: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start `baton serve`, wait until all instances are ready, and return the router's URL. Raises
        `NotStartedError` if it exits or takes too long.
        """
        self._process = await asyncio.create_subprocess_exec(
            *serve_command(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach the demo alone, which then stops the cluster in order.
        )
        # Standard error must be read all the time, or `baton serve` would block once the pipe is full.
        self._log_reader = asyncio.create_task(self._read_log())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await self._read_banner()
        except TimeoutError:
            raise NotStartedError(f"baton serve was not ready within {START_TIMEOUT_S:g} s") from None

    async def stop(self) -> None:
        """Stop `baton serve` with SIGINT, as Ctrl-C does, and wait until it has exited."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
        status = await self._process.wait()
        say(f"\nEverything has stopped (status {status}).")

    async def _read_log(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        async for line in self._process.stderr:
            self._recent_log.append(line.decode(errors="replace").rstrip())

    async def _read_banner(self) -> str:
        """Return the router's URL, once `baton serve` has printed all lines of its banner. Raises `NotStartedError` if
        it exits before.
        """
        assert self._process is not None and self._process.stdout is not None
        banner = BannerReader()
        async for line in self._process.stdout:
            if (url := banner.feed(line.decode())) is not None:
                return url
        # The output ended without a banner: the start has failed. The reason is in the log, whose last lines may still
        # be on their way; a grandchild that holds the pipe open must not keep the demo waiting for them.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                if self._log_reader is not None:
                    await self._log_reader
        for line_of_log in self._recent_log:
            say(f"  {line_of_log}")
        raise NotStartedError("baton serve did not start; the lines above are the end of its log")


async def run_demo(url: str) -> None:
    """Ask the router at `url` a short question and one for a tool, then two about one long text: the second of them
    finds that text in the prefix cache.
    """
    prompt = make_demo_prompt(Random(random.choice(SEEDS)))
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        await ask(client, "Hello! What is 17 + 25?", expected="42")
        await ask_with_tool(client)
        for fact in prompt.asked:
            await ask(client, f"{prompt.text} {fact.question}", expected=fact.code)


async def ask(client: httpx.AsyncClient, question: str, *, expected: str) -> None:
    """Send a question to the router. Print the question, its answer while it is generated, whether the answer contains
    `expected`, and how long each phase took.
    """
    shown = question if len(question) < 100 else f"{question[:60]} [...] {question[-40:].partition(' ')[2]}"
    say(f"> {shown}")
    answer, usage, split = "", DemoUsage(0, 0), None
    async for chunk in stream_chat(client, question):
        for choice in chunk.choices:
            if choice.delta.content:
                answer += choice.delta.content
                say(choice.delta.content, end="")
        usage, split = chunk.usage or usage, chunk.baton or split
    say("   (correct)" if expected in answer else f"   (WRONG: the correct answer is {expected})")
    if split is not None:
        say(time_split_text(split, usage))
        if split.transport is not None:
            say(f"    {'transport':<12} {await link_speed(client, split.transport)}")
    say()


async def ask_with_tool(client: httpx.AsyncClient) -> None:
    """Offer a tool to the model, print the call that it makes, send a result back and print the model's answer."""
    question, result = "What is the weather in Paris?", "sunny, 21 degrees"
    say(f"> {question}   (with the tool {WEATHER_TOOL['name']})")
    messages: list[object] = [{"role": "user", "content": question}]
    tools = [{"type": "function", "function": WEATHER_TOOL}]
    asked = await chat_with_tools(client, messages, tools)
    messages.append(asked)
    for call in asked.tool_calls:
        say(f"    call         {call.function.name}({call.function.arguments})")
        say(f"    result       {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = (await chat_with_tools(client, messages, tools)).content or ""
    is_right = bool(asked.tool_calls) and result in answer
    say(f"{answer}   ({'correct' if is_right else f'WRONG: the model must call the tool and state {result!r}'})\n")


async def link_speed(client: httpx.AsyncClient, transport: str) -> str:
    """Return a text with the transport, its measured rate and the two instances that it connects. Raises `TimeoutError`
    if the router reports none in time.
    """
    # The receiving instance measures the rate and reports it to the router about once a second.
    async with asyncio.timeout(LINK_REPORT_TIMEOUT_S):
        while True:
            for instance in (await read_health(client)).instances:
                for link in instance.links:
                    if link.transport == transport and link.gigabytes_per_second:
                        return (
                            f"{transport}, {link.gigabytes_per_second:.2f} GB/s from {link.peer} to {instance.instance}"
                        )
            await asyncio.sleep(0.1)


def time_split_text(split: TimeSplit, usage: DemoUsage) -> str:
    """Return how the time of one answer divides into phases as text, one aligned line per phase."""
    cached = sum(split.cached_tokens.values())
    rows = [
        ("prompt", f"{usage.prompt_tokens} tokens, {cached} of them cached"),
        ("queue", f"{_ms(split.queue_s)} of waiting before prefill"),
        ("prefill", _ms(split.prefill_s)),
        ("handoff", _handoff(split)),
        (
            "remainder",
            f"{_ms(split.handoff_exposed_s)} of the handoff took place after prefill; only they delay the answer",
        ),
        ("first token", f"{_ms(split.ttft_s)} after the request arrived (TTFT)"),
        ("decode", _decode(split, usage)),
    ]
    if split.transport is None:
        rows = [row for row in rows if row[0] not in ("handoff", "remainder")]
        reason = (
            "the decode worker has nearly all of the prompt in its prefix cache"
            if cached
            else "the prompt is short, so the decode worker computes it itself"
        )
        rows.insert(3, ("handoff", f"none: {reason}"))
    return "\n".join(f"    {name:<12} {text}" for name, text in rows)


def _handoff(split: TimeSplit) -> str:
    size = (split.transferred_bytes or 0) / 1e6
    return (
        f"{_ms(split.handoff_s)} over {split.transport}, while prefill computes later chunks:"
        f" {split.transferred_blocks} KV blocks, {size:.1f} MB;"
        f" {split.reused_blocks} more were in the decode worker's cache"
    )


def _decode(split: TimeSplit, usage: DemoUsage) -> str:
    if not split.decode_s or usage.completion_tokens < 2:
        return _ms(split.decode_s)
    # Prefill generates the first token, so decode accounts for the others.
    speed = (usage.completion_tokens - 1) / split.decode_s
    return f"{_ms(split.decode_s)} for {usage.completion_tokens - 1} more tokens, {speed:.0f} tok/s"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
