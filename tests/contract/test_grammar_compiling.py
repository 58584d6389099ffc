"""The compiling process, for real: what a grammar does to its compiler is a verdict, and nothing else is disturbed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton_serve.contracts.grammar_bounds import PARSER_LIMITS
from baton_serve.contracts.lark import Lark
from baton_serve.services.common.http.exchange import Exchange
from baton_serve.services.router.protocol.asgi import while_connected
from baton_serve.services.router.protocol.errors import ClientGoneError, RateLimitError
from baton_serve.services.router.text.grammar import Vocabulary
from baton_serve.services.router.text.grammar.compiling.checker import GrammarChecker
from baton_serve.services.router.text.grammar.compiling.fair_slots import QueueLimits
from baton_serve.services.router.text.grammar.compiling.limited_compiler import CompileLimits
from tests import grammar_bombs as bombs
from tests.recorded_connection import RecordedConnection
from tests.unit.router.test_structured import TOKENIZER

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = Vocabulary(TOKENIZER)
GOOD = 'start: "a" | "b"'


def lark(regex: str) -> str:
    written = Lark(VOCABULARY)
    return written.grammar(written.regex(regex))


HUNGRY = lark(bombs.hungry(20_000))
"""Seconds of work, for tests that end it before."""


@contextlib.asynccontextmanager
async def checker(
    limits: CompileLimits | None = None, queue: QueueLimits | None = None
) -> AsyncIterator[GrammarChecker]:
    running = GrammarChecker(VOCABULARY.source, limits=limits, queue=queue)
    try:
        yield running
    finally:
        running.close()


def run(body: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(whole())


async def until(fact: Callable[[], bool]) -> None:
    while not fact():  # noqa: ASYNC110 - of other processes, which set no event
        await asyncio.sleep(0.01)


def compilers(of: GrammarChecker) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [] if of.pid is None else list(psutil.Process(of.pid).children())
    return []


def test_a_valid_grammar_has_no_verdict_and_a_wrong_one_has_the_compilers_words() -> None:
    async def body() -> None:
        async with checker() as one:
            assert await one.verdict(GOOD) == ""
            assert "nothing" in await one.verdict("start: nothing")
            assert "allowed" in await one.verdict(bombs.rules(2_000)), "the bounds hold there too"

    run(body())


@pytest.mark.parametrize("kind", bombs.GRAMMARS)
def test_the_largest_grammar_within_the_bounds_needs_half_of_the_stack_and_the_common_limits(kind: str) -> None:
    """Workers have eight times the stack of this test."""

    async def body() -> None:
        limits = CompileLimits(cpu_s=10.0, stack_bytes=CompileLimits().stack_bytes // 2)
        async with checker(limits) as one:
            verdict = await one.verdict(bombs.largest_accepted(bombs.GRAMMARS[kind]))
            assert not verdict or "too deeply nested" in verdict, "or the compiler's own refusal"

    run(body())


def test_an_object_with_as_many_optional_properties_as_allowed_can_be_generated() -> None:
    text, eos = VOCABULARY.source()
    tokens = LLTokenizer(text, eos_token=eos)
    limits = LLParserLimits(**PARSER_LIMITS)
    matcher = LLMatcher(tokens, bombs.largest_accepted(bombs.GRAMMARS["properties"]), log_level=0, limits=limits)
    answer = tokens.tokenize_str('{"p0":"a","p479":"b"}')
    assert matcher.try_consume_tokens(answer) == len(answer), matcher.get_error()


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "((((a{100}){100}){100}){100})", "x(a{1000}){1000}"])
def test_a_grammar_whose_first_token_takes_too_long_is_refused(regex: str) -> None:
    async def body() -> None:
        # Less than the default, which a fast machine undercuts.
        async with checker(CompileLimits(mask_cpu_s=0.2)) as one:
            assert "for its first token" in await one.verdict(lark(regex))

    run(body())


def test_gbnf_is_converted_with_the_same_limits() -> None:
    async def body() -> None:
        async with checker(CompileLimits(cpu_s=0.5)) as one:
            assert "start: A" in await one.converted('root ::= a\na ::= "x"')
            with pytest.raises(ValueError, match="not found"):
                await one.converted("root ::= b")
            # The library's search for a rule of Lark takes quadratic time for empty lines.
            with pytest.raises(ValueError, match=r"takes more than 0\.5 s"):
                await one.converted('root ::= "a"' + "\n" * 100_000)
            assert await one.verdict(GOOD) == ""

    run(body())


@pytest.mark.parametrize(
    ("limits", "grammar", "reason"),
    [
        (CompileLimits(stack_bytes=1 << 20), bombs.lark_of(bombs.references(900)), "nested too deeply or too complex"),
        (CompileLimits(stack_bytes=1 << 20), bombs.rules(990), "nested too deeply or too complex"),
        (CompileLimits(cpu_s=0.3), bombs.lark_of(bombs.slow(999_983)), "takes more than 0.3 s"),
        (CompileLimits(wall_s=0.3), bombs.lark_of(bombs.slow(999_983)), "takes more than"),
        (CompileLimits(cpu_s=30.0, memory_bytes=64 << 20), HUNGRY, "more than 64 MiB of memory"),
    ],
    ids=["stack", "stack of rules", "processor time", "time", "memory"],
)
def test_a_compiler_that_ends_at_a_limit_fails_one_request_with_the_limit_in_the_error(
    limits: CompileLimits, grammar: str, reason: str
) -> None:
    async def body() -> None:
        async with checker(limits) as one:
            assert await one.verdict(GOOD) == ""
            pid = one.pid
            assert reason in await one.verdict(grammar)
            assert await one.verdict("start: /a+/") == ""
            assert one.pid == pid, "the process that forks lives on"

    run(body())


def test_a_grammar_is_compiled_once_whatever_its_verdict_is() -> None:
    async def body() -> None:
        async with checker(CompileLimits(cpu_s=0.3)) as one:
            slow = bombs.lark_of(bombs.slow(999_983))
            verdicts = [await one.verdict(GOOD), await one.verdict(slow)]
            one.close()
            began = time.perf_counter()
            assert [await one.verdict(GOOD), await one.verdict(slow)] == verdicts
            assert one.pid is None and time.perf_counter() - began < 0.1

    run(body())


def test_a_killed_compiler_or_process_is_replaced_and_its_grammar_compiled_again() -> None:
    async def body() -> None:
        async with checker(CompileLimits(cpu_s=20.0)) as one:
            for kills_all in (False, True):
                work = lark(bombs.hungry(3_000 + kills_all))
                answer = asyncio.ensure_future(one.verdict(work))
                await until(lambda: bool(compilers(one)))
                (compiler,) = compilers(one)
                os.kill(one.pid or 0 if kills_all else compiler.pid, signal.SIGKILL)
                assert await answer == ""
                assert await one.verdict(f'start: "{kills_all}"') == ""

    run(body())


def test_what_waits_too_long_a_queue_is_refused_and_the_rest_is_compiled() -> None:
    async def body() -> None:
        async with checker(queue=QueueLimits(max_running=2, max_waiting=3)) as one:
            asked = [one.verdict(lark(bombs.hungry(1_000 + i))) for i in range(9)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            refused = [error for error in found if isinstance(error, RateLimitError)]
            assert len(refused) == 4 and found.count("") == 5
            assert refused[0].status == 429 and refused[0].retry_after_s
            assert await one.verdict(GOOD) == ""

    run(body())


def test_a_compiler_ends_when_the_last_client_that_waits_for_it_has_left() -> None:
    async def body() -> None:
        async with checker(CompileLimits(cpu_s=30.0, memory_bytes=4 << 30), QueueLimits(1, 5)) as one:
            assert await one.verdict(GOOD) == ""
            await until(lambda: not compilers(one))
            exchanges = [
                Exchange(RecordedConnection(), is_http_10=False, is_head=False, keeps_alive=True) for _ in "ab"
            ]
            asked = [asyncio.ensure_future(while_connected(one.verdict(HUNGRY), exchange)) for exchange in exchanges]
            queued = asyncio.ensure_future(one.verdict(lark(bombs.hungry(9_000))))
            await until(lambda: [process.status() for process in compilers(one)] == [psutil.STATUS_RUNNING])
            queued.cancel()
            exchanges[0].on_lost()
            with pytest.raises(ClientGoneError):
                await asked[0]
            await until(lambda: len(compilers(one)) == 1)  # the other client waits for the same grammar
            assert not asked[1].done()
            exchanges[1].on_lost()
            with pytest.raises(ClientGoneError):
                await asked[1]
            began = time.perf_counter()
            await until(lambda: not compilers(one))
            assert time.perf_counter() - began < 2.0
            assert await one.verdict("start: /a+/") == "", "its place in the queue is free"

    run(body())


def test_the_process_has_one_thread_and_ends_with_its_router() -> None:
    code = """
import asyncio, time
from baton_serve.services.router.text.grammar.compiling.checker import GrammarChecker
from tests.contract.test_grammar_compiling import GOOD, VOCABULARY
async def main():
    one = GrammarChecker(VOCABULARY.source)
    await one.verdict(GOOD)
    print(one.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    router = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert router.stdout is not None
    with router.stdout:
        process = psutil.Process(int(router.stdout.readline()))
        assert process.num_threads() == 1, "a fork of several threads could stop for ever"
        router.kill()
        router.wait()
    process.wait(timeout=10)
