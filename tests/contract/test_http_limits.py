"""Slow clients, clients that send unread data, and too many clients."""

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from baton_serve.services.common.http.connection_slots import HttpLimits, Slots, affordable_connections
from baton_serve.services.common.http.exchange import EXTENSION
from baton_serve.services.common.http.listener import Listener
from baton_serve.services.common.http.server import HttpServer, TlsFiles

REQUEST = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
SOON_S = 0.1
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that runs a coroutine on each kind of event loop and fails after ten seconds."""

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(scenario, 10))

    return run


async def answer(send: Any, status: int, text: bytes) -> None:
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Without a look at the body, as for a request without a key or to a path that does not exist."""
    await answer(send, 401, b"no")


async def done(scope: Any, receive: Any, send: Any) -> None:
    await answer(send, 200, b"done")


class Echo:
    def __init__(self) -> None:
        self.endings: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.endings.append("disconnect")
                return
            body, more = body + message["body"], message["more_body"]
        self.endings.append("whole")
        await answer(send, 200, body)


class Held:
    """Answers when it may."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.two_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        if self.num_asked == 2:
            self.two_asked.set()
        await self.may_answer.wait()
        await answer(send, 200, b"done")


@asynccontextmanager
async def serving(app: Any, **limits: Any) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    """Start a server and yield a function that opens a connection to it."""
    server = HttpServer(app, host="127.0.0.1", port=0, limits=HttpLimits(**limits))
    await server.start()
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        await server.close(grace_s=2.0)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes until the other end closes the connection in any way."""
    found = b""
    try:
        while data := await reader.read(65536):
            found += data
    except ConnectionError:
        pass
    return found


async def trickle(writer: asyncio.StreamWriter, gap_s: float, piece: bytes = b"x") -> None:
    """One piece after the other, until the other end closes."""
    try:
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(gap_s)
    # uvloop raises `RuntimeError` when the transport has been closed already.
    except (ConnectionError, RuntimeError):
        pass


def test_a_body_of_which_nothing_comes_is_not_waited_for(run: Run) -> None:
    async def scenario() -> None:
        app = Echo()
        async with serving(app, body_timeout_s=SOON_S) as connect:
            reader, writer = await connect()
            writer.write(POST % 4)
            found = await rest(reader)
            assert found.startswith(b"HTTP/1.1 408") and b"connection: close" in found
        assert app.endings == ["disconnect"]

    run(scenario())


def test_a_body_that_stops_is_not_waited_for(run: Run) -> None:
    async def scenario() -> None:
        app = Echo()
        async with serving(app, body_timeout_s=SOON_S) as connect:
            for begin in (POST % 4 + b"ab", b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n4\r\na"):
                reader, writer = await connect()
                writer.write(begin)
                assert (await rest(reader)).startswith(b"HTTP/1.1 408")
        assert app.endings == ["disconnect"] * 2

    run(scenario())


@pytest.mark.parametrize("size", [10, 60_000, 70_000, 300_000, 1_000_000])
def test_a_client_that_leaves_after_its_body_was_read_is_noticed(run: Run, size: int) -> None:
    async def scenario() -> None:
        has_read, is_gone = asyncio.Event(), asyncio.Event()

        async def compute(scope: Any, receive: Any, send: Any) -> None:
            more = True
            while more:
                more = (await receive())["more_body"]
            scope["extensions"][EXTENSION].watch(is_gone.set)
            has_read.set()
            await is_gone.wait()

        async with serving(compute) as connect:
            _, writer = await connect()
            writer.write(POST % size + bytes(size))
            await has_read.wait()
            writer.close()
            await is_gone.wait()

    run(scenario())


def test_a_body_that_keeps_coming_is_waited_for(run: Run) -> None:
    async def scenario() -> None:
        async with serving(Echo(), body_timeout_s=0.5) as connect:
            reader, writer = await connect()
            writer.write(POST % 8)
            for _ in range(8):
                await asyncio.sleep(0.1)
                writer.write(b"x")
            assert (await reader.readuntil(b"x" * 8)).startswith(b"HTTP/1.1 200")

    run(scenario())


def test_a_body_that_the_server_does_not_read_yet_is_not_too_slow(run: Run) -> None:
    async def scenario() -> None:
        async def late(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(4 * SOON_S)
            await Echo()(scope, receive, send)

        async with serving(late, body_timeout_s=SOON_S) as connect:
            reader, writer = await connect()
            writer.write(POST % 400_000 + bytes(400_000))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            reader, writer = await connect()
            writer.write(b"POST /x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 100")
            writer.write(b"ab")
            assert (await reader.readuntil(b"ab")).count(b"HTTP/1.1 200") == 1

    run(scenario())


def test_the_rest_of_an_answered_request_is_not_waited_for(run: Run) -> None:
    async def scenario() -> None:
        async with serving(refuse, lingering_timeout_s=SOON_S) as connect:
            for fields in (b"", b"connection: close\r\n", b"expect: 100-continue\r\n"):
                reader, writer = await connect()
                writer.write(b"POST /x HTTP/1.1\r\nhost: a\r\n" + fields + b"content-length: 9\r\n\r\nab")
                assert (await rest(reader)).startswith(b"HTTP/1.1 401")

    run(scenario())


def test_the_rest_of_an_answered_request_is_not_read_for_ever(run: Run) -> None:
    async def scenario() -> None:
        async with serving(refuse, lingering_time_s=4 * SOON_S, lingering_timeout_s=2 * SOON_S) as connect:
            reader, writer = await connect()
            writer.write(POST % 10**9)
            sending = asyncio.create_task(trickle(writer, SOON_S / 2))
            assert (await rest(reader)).startswith(b"HTTP/1.1 401")
            await sending

    run(scenario())


def test_the_rest_of_an_answered_request_is_bounded_in_bytes(run: Run) -> None:
    async def scenario() -> None:
        async with serving(refuse, lingering_bytes=1_000_000) as connect:
            for fields in (b"", b"connection: close\r\n"):
                reader, writer = await connect()
                writer.write(b"POST /x HTTP/1.1\r\nhost: a\r\n" + fields + b"content-length: 1000000000\r\n\r\n")
                sending = asyncio.create_task(trickle(writer, 0, bytes(100_000)))
                assert (await rest(reader)).startswith(b"HTTP/1.1 401")
                await sending

    run(scenario())


def test_a_connection_lives_on_when_the_rest_of_an_answered_request_has_come(run: Run) -> None:
    async def scenario() -> None:
        async with serving(refuse, lingering_timeout_s=1.0) as connect:
            reader, writer = await connect()
            for _ in range(3):
                writer.write(POST % 4)
                assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401")
                writer.write(b"body")
            writer.write(REQUEST)
            assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401")

    run(scenario())


CHUNKED = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"2\r\nab\r\n0\r\nx-a: ", b"a" * 1000),
        (b"2\r\nab\r\n0\r\n", b"x-a: b\r\n" * 100),
        (b"2;a=", b"a" * 1000),
    ],
    ids=["one trailer", "many trailers", "an extension of a chunk"],
)
def test_what_surrounds_the_chunks_of_a_body_is_bounded_like_a_head(run: Run, begin: bytes, piece: bytes) -> None:
    async def scenario() -> None:
        app = Echo()
        async with serving(app, max_head_bytes=20_000) as connect:
            reader, writer = await connect()
            writer.write(CHUNKED + begin)
            sending = asyncio.create_task(trickle(writer, 0.0, piece))
            assert (await rest(reader)).startswith(b"HTTP/1.1 431")
            await sending
        assert app.endings == ["disconnect"]

    run(scenario())


def test_a_long_body_of_short_chunks_with_trailers_is_read(run: Run) -> None:
    async def scenario() -> None:
        async with serving(Echo(), max_head_bytes=1000) as connect:
            reader, writer = await connect()
            for _ in range(2):
                writer.write(CHUNKED)
                for _ in range(500):
                    writer.write(b"1;a=b\r\nx\r\n")
                    await writer.drain()
                for piece in (b"0\r\n", b"x-a: b\r\n" * 50, b"\r\n"):
                    writer.write(piece)
                    await asyncio.sleep(0.01)
                assert (await reader.readuntil(b"x" * 500)).startswith(b"HTTP/1.1 200")

    run(scenario())


@pytest.mark.parametrize(("chunk", "status"), [(b"x", b"400"), (b"x" * 24, b"200")], ids=["one byte", "24 bytes"])
def test_a_body_of_very_many_tiny_chunks_is_refused(run: Run, chunk: bytes, status: bytes) -> None:
    async def scenario() -> None:
        async with serving(Echo(), max_head_bytes=1000) as connect:
            reader, writer = await connect()
            writer.write(CHUNKED + (b"%x\r\n%b\r\n" % (len(chunk), chunk)) * 10_000 + b"0\r\n\r\n")
            assert (await reader.readline()).split()[1] == status
            # The count is that of a request: the next one on the connection begins at zero.
            if status == b"200":
                await reader.readuntil(chunk * 10_000)
                writer.write(CHUNKED + b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n")
                assert (await reader.readline()).split()[1] == status

    run(scenario())


def test_who_still_sends_when_it_is_refused_gets_the_answer(run: Run) -> None:
    """A connection that is closed with unread data is reset, and what was written last is lost."""

    async def scenario() -> None:
        async with serving(refuse, max_head_bytes=1000) as connect:
            for begin, status in (
                (b"POST /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 3000000\r\n\r\n", b"401"),
                (b"GET / HTTP/1.1\r\nx-a: ", b"431"),
                (b"rubbish\r\n\r\n", b"400"),
            ):
                reader, writer = await connect()
                writer.write(begin)
                for _ in range(30):
                    writer.write(b"a" * 100_000)
                    await writer.drain()
                assert (await rest(reader)).startswith(b"HTTP/1.1 " + status)

    run(scenario())


def test_an_idle_connection_is_closed_and_one_that_is_used_is_not(run: Run) -> None:
    async def scenario() -> None:
        async with serving(done, keep_alive_s=3 * SOON_S) as connect:
            reader, writer = await connect()
            for _ in range(6):
                await asyncio.sleep(SOON_S)
                writer.write(REQUEST)
                await reader.readuntil(b"done")
            assert await rest(reader) == b""

    run(scenario())


def test_a_client_that_does_not_take_its_answer_is_given_up(run: Run) -> None:
    async def scenario() -> None:
        async def much(scope: Any, receive: Any, send: Any) -> None:
            await answer(send, 200, bytes(30_000_000))

        async with serving(much, keep_alive_s=SOON_S, send_timeout_s=SOON_S) as connect:
            reader, writer = await connect()
            writer.write(REQUEST)
            await asyncio.sleep(5 * SOON_S)
            assert len(await rest(reader)) < 30_000_000

    run(scenario())


def test_a_client_that_reads_none_of_its_pipelined_answers_is_given_up(run: Run) -> None:
    async def scenario() -> None:
        num_answered = 0

        async def much(scope: Any, receive: Any, send: Any) -> None:
            nonlocal num_answered
            await answer(send, 200, bytes(10_000_000))
            num_answered += 1

        async with serving(much, send_timeout_s=SOON_S) as connect:
            reader, writer = await connect()
            writer.write(REQUEST * 5)
            await asyncio.sleep(5 * SOON_S)
            assert len(await rest(reader)) < 20_000_000
            assert num_answered <= 2

    run(scenario())


def test_the_rest_of_a_long_answer_waits_until_the_client_reads(run: Run) -> None:
    long = os.urandom(1 << 20) * 24
    sent = asyncio.Event()

    async def one_piece(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, 200, long)
        sent.set()

    async def scenario() -> None:
        async with serving(one_piece) as connect:
            reader, writer = await connect()
            writer.write(REQUEST)
            await asyncio.sleep(SOON_S)
            assert not sent.is_set(), "what is in the kernel's buffers is a small part"
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(long)) == long
            await sent.wait()

    run(scenario())


def test_a_client_that_takes_a_long_answer_in_drops_has_a_deadline_for_all_of_it(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async def much(scope: Any, receive: Any, send: Any) -> None:
            await answer(send, 200, bytes(50_000_000))

        # Each read makes room for another piece, so that the deadline of no single piece passes.
        async with serving(much, send_timeout_s=5 * SOON_S, min_receive_bytes_per_s=100_000_000) as connect:
            reader, writer = await connect()
            writer.write(REQUEST)
            started_at = asyncio.get_running_loop().time()
            received = 0
            while data := await read_or_nothing(reader, 400_000):
                received += len(data)
                await asyncio.sleep(SOON_S / 2)
            assert received < 50_000_000
            assert asyncio.get_running_loop().time() - started_at < 4

    run(scenario())
    assert "had not received 50000000 bytes of a response within 1 s" in caplog.text


async def read_or_nothing(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    try:
        return await reader.read(num_bytes)
    except ConnectionError:
        return b""


def test_long_answers_that_slow_clients_leave_in_memory_are_bounded(run: Run) -> None:
    num_alive = most_alive = 0

    class Body(bytes):
        def __del__(self) -> None:
            nonlocal num_alive
            num_alive -= 1

    async def much(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_alive, most_alive
        num_alive += 1
        body = Body(20_000_000)
        most_alive = max(most_alive, num_alive)
        await answer(send, 200, body)

    async def scenario() -> None:
        async with serving(much, max_kept_bytes=50_000_000) as connect:
            slow = [await connect() for _ in range(6)]
            for _, writer in slow:
                writer.write(REQUEST * 2)  # the second answer waits behind the first one
                await asyncio.sleep(SOON_S)
            assert most_alive <= 4
            # A client that reads gets its answer beside them, and the slow ones that came last may go on.
            reader, writer = await connect()
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\n")
            assert len(await reader.readexactly(20_000_000)) == 20_000_000
            taken = [len(await rest(reader)) for reader, _ in slow[:4]]
            assert max(taken) < 20_000_000
            reader, _ = slow[-1]
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(20_000_000)

    run(scenario())


def test_a_client_cannot_queue_thousands_of_requests_in_one_read(run: Run) -> None:
    num_asked = 0

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(SOON_S)
        await answer(send, 200, b"done")

    async def scenario() -> None:
        async with serving(slow) as connect:
            reader, writer = await connect()
            writer.write(REQUEST * 5000)
            assert (await rest(reader)).startswith(b"HTTP/1.1 200")
            assert num_asked < 500

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"", b"400"),
        (b"host: a\r\nhost: a\r\n", b"400"),
        (b"host: a\r\nHOST: b\r\n", b"400"),
        (b"host: a\r\n", b"200"),
        (b"host:\r\n", b"200"),
    ],
)
def test_a_request_has_one_host(run: Run, fields: bytes, status: bytes) -> None:
    async def scenario() -> None:
        async with serving(done) as connect:
            reader, writer = await connect()
            writer.write(b"GET / HTTP/1.1\r\nconnection: close\r\n" + fields + b"\r\n")
            assert (await rest(reader)).startswith(b"HTTP/1.1 " + status)
            if not fields:
                reader, writer = await connect()
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                assert (await rest(reader)).startswith(b"HTTP/1.1 200")

    run(scenario())


def test_heads_that_do_not_end_shut_nobody_out(run: Run) -> None:
    async def scenario() -> None:
        async with serving(done, max_connections=8) as connect:
            halves = [await connect() for _ in range(20)]
            for _, writer in halves:
                writer.write(REQUEST[:10])
            reader, writer = await connect()
            writer.write(REQUEST)
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
            assert await rest(halves[0][0]) == b""

    run(scenario())


def test_the_connection_that_was_idle_longest_makes_room_first(run: Run) -> None:
    async def scenario() -> None:
        async with serving(done, max_connections=3) as connect:
            clients = [await connect() for _ in range(3)]
            for reader, writer in (clients[1], clients[0]):
                writer.write(REQUEST)
                await reader.readuntil(b"done")
            reader, writer = await connect()
            writer.write(REQUEST)
            await reader.readuntil(b"done")
            assert await rest(clients[1][0]) == b""
            for reader, writer in (clients[0], clients[2]):
                writer.write(REQUEST)
                await reader.readuntil(b"done")

    run(scenario())


def test_beyond_the_limit_of_connections_that_work_others_are_refused(run: Run) -> None:
    async def scenario() -> None:
        app = Held()
        async with serving(app, max_connections=2) as connect:
            clients = [await connect() for _ in range(2)]
            for _, writer in clients:
                writer.write(REQUEST)
            await app.two_asked.wait()
            open_before = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                reader, writer = await connect()
                found = await rest(reader)
                assert found.startswith(b"HTTP/1.1 503") and b"connection: close" in found
                writer.close()
                await asyncio.sleep(0.01)
            assert len(os.listdir("/proc/self/fd")) == open_before
            app.may_answer.set()
            for reader, _ in clients:
                await reader.readuntil(b"done")
            reader, writer = await connect()
            writer.write(REQUEST)
            await reader.readuntil(b"done")

    run(scenario())


def test_an_address_has_a_limit_of_its_own(run: Run) -> None:
    async def scenario() -> None:
        async with serving(done, max_connections_per_address=2) as connect:
            clients = [await connect() for _ in range(2)]
            for reader, writer in clients:
                writer.write(REQUEST)
                await reader.readuntil(b"done")
            assert (await rest((await connect())[0])).startswith(b"HTTP/1.1 503")
            clients[0][1].close()
            await clients[0][1].wait_closed()
            while True:
                reader, writer = await connect()
                writer.write(REQUEST)
                if (await reader.readline()).startswith(b"HTTP/1.1 200"):
                    break

    run(scenario())


def test_a_handshake_that_does_not_come_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    key, certificate = tmp_path / "tls.key", tmp_path / "tls.crt"
    subject = ["-subj", "/CN=localhost", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(certificate), *subject]
    subprocess.run(made, check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=str(certificate))

    async def scenario() -> None:
        server = HttpServer(
            refuse,
            host="127.0.0.1",
            port=0,
            tls=TlsFiles(str(key), str(certificate)),
            limits=HttpLimits(head_timeout_s=0.5, max_connections=2, lingering_timeout_s=SOON_S),
        )
        await server.start()
        open_before = len(os.listdir("/proc/self/fd"))
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
        assert await rest(silent[0][0]) == b""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=trusted, server_hostname="localhost"
        )
        writer.write(POST % 9)
        assert (await rest(reader)).startswith(b"HTTP/1.1 401")
        for stream, other in silent:
            assert await rest(stream) == b""
            other.close()
        writer.transport.abort()
        await server.close()
        assert len(os.listdir("/proc/self/fd")) <= open_before

    run(scenario())


class Exhausted(socket.socket):
    """A process without free descriptors, for some time."""

    num_failures = 0

    def accept(self) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_descriptors_nothing_is_accepted_until_there_are_some(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton_serve.services.common.http.listener")

    async def scenario() -> None:
        accepted = asyncio.Event()

        class Greeting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted.set()
                transport.close()

        with Exhausted() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            listening.setblocking(False)
            listening.num_failures = 3
            slots = Slots(4)
            idle = slots.admit("127.0.0.1")
            assert idle is not None
            listener = Listener(listening, lambda slot: Greeting(), slots=slots)
            listener.start()
            _, writer = await asyncio.open_connection(*listening.getsockname())
            await accepted.wait()
            writer.close()
            listener.close()
            await listener.wait_closed()

    run(scenario())
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "Too many open files" in warnings[0]
    assert [record.message for record in caplog.records][-1] == "connections are accepted again"


def test_a_quarter_of_the_descriptors_is_for_other_things() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        assert affordable_connections(8192) == 300
        assert affordable_connections(200) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
