"""`baton chat` and `baton complete` with a server whose answers the test writes."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton_serve.bench.ports import free_port
from baton_serve.services.local import chat
from baton_serve.services.local.chat import Terminal
from baton_serve.services.local.serve_process import BannerReader
from tests.unit.local.fake_chat_server import DONE, FakeChatServer, deltas

HELLO = [*deltas("Hel", "lo!"), DONE]
BYE = [*deltas("Bye."), DONE]
DEADLINE_S = 20.0


class Screen(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def signals_and_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the signal handlers, and hide the keys of whoever runs the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_each_line_of_a_pipe_is_a_message_of_one_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, "Hi\n\n  \nGo away")
    with FakeChatServer([HELLO, BYE]) as server:
        assert chat.main(["--url", f"{server.url}/v1/", "--system-prompt", "Be short.", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "Hello!\nBye.\n"
    (path, first), (_, second) = server.requests
    assert path == "/v1/chat/completions"
    assert first == {
        "model": "small",
        "max_tokens": 9,
        "stream": True,
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    }
    assert second["messages"][1:] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Go away"},
    ]


def test_one_quick_message_is_answered_without_reading_the_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, "not read\n")
    with FakeChatServer([HELLO]) as server:
        assert chat.main(["--url", server.url, "--model-name", "other", "-q", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello!\n"
    assert [body["model"] for _, body in server.requests] == ["other"]


def test_completions_are_independent_of_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, "One\nTwo\n")
    answers = [[json.dumps({"choices": [{"text": text}]}), DONE] for text in (" and two", " and three")]
    with FakeChatServer(answers) as server:
        assert chat.complete(["--url", server.url, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == " and two\n and three\n"
    assert server.requests == [
        ("/v1/completions", {"model": "small", "temperature": 0.0, "stream": True, "prompt": prompt})
        for prompt in ("One", "Two")
    ]


def test_the_key_comes_from_the_flag_or_from_the_variables_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeChatServer([HELLO] * 3) as server:
        for variables, flags in (
            ({"OPENAI_API_KEY": "c"}, ()),
            ({"VLLM_API_KEY": "b"}, ()),
            ({}, ("--api-key", "a")),
        ):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            chat.main(["--url", server.url, "--model-name", "small", "-q", "Hi", *flags])
    assert server.keys == ["Bearer c", "Bearer b", "Bearer a"]


def test_a_message_without_an_answer_is_reported_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, "Too long\nHi\n")
    refusal = (400, json.dumps({"error": {"message": "this model's context is 4 tokens"}}))
    with FakeChatServer([refusal, HELLO]) as server:
        assert chat.main(["--url", server.url]) == 1
    printed = capsys.readouterr()
    assert printed.out == "Hello!\n" and printed.err == "error: this model's context is 4 tokens\n"
    assert server.requests[1][1]["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(deltas("Hel"), "the answer ended before it was complete", id="cut off"),
        pytest.param([*deltas("Hel"), '{"error": {"message": "no instance"}}'], "no instance", id="error event"),
        pytest.param(["{"], "cannot be read", id="broken JSON"),
        pytest.param((401, "{}"), "status 401: give the API key with --api-key", id="no key"),
        pytest.param((502, "<html>"), "status 502", id="a proxy's page"),
    ],
)
def test_a_failed_answer_is_an_error(
    capsys: pytest.CaptureFixture[str], answer: list[str] | tuple[int, str], reason: str
) -> None:
    with FakeChatServer([answer]) as server:
        assert chat.main(["--url", server.url, "-q", "Hi"]) == 1
    assert reason in capsys.readouterr().err


def test_without_a_server_the_error_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert chat.main(["--url", url, "-q", "Hi"]) == 1
    assert f"no server answers at {url}" in (said := capsys.readouterr().err) and "`baton serve`" in said


def test_characters_that_json_need_not_escape_do_not_cut_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeChatServer([[*deltas("a\u2028b\x85c"), DONE]]) as server:
        assert chat.main(["--url", server.url, "-q", "Hi"]) == 0
    assert capsys.readouterr().out == "a\u2028b\x85c\n"


def test_a_terminal_gets_no_escape_sequence_of_a_model_and_a_pipe_no_reasoning() -> None:
    screen, pipe = Screen(), io.StringIO()
    for out in (screen, pipe):
        terminal = Terminal(io.StringIO(), out, io.StringIO())
        terminal.show("hm", is_reasoning=True)
        terminal.show("a\x1b[2Jb\n\tc\x9b1m")
        terminal.end_answer()
    assert screen.getvalue() == "\x1b[2mhm\x1b[0m\na[2Jb\n\tc1m\n"
    assert pipe.getvalue() == "a\x1b[2Jb\n\tc\x9b1m\n"


def test_options_of_a_cluster_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        chat.main(["--", "--device", "cpu"])
    assert stopped.value.code == 2 and "no MODEL is given: --device" in capsys.readouterr().err


def test_the_url_is_known_only_at_the_end_of_the_banner() -> None:
    banner = BannerReader()
    lines = ["", "Baton 1 serves", "  url        http://127.0.0.1:81/v1", "  page       http://127.0.0.1:81/"]
    assert [banner.feed(line) for line in lines] == [None] * 4
    assert banner.feed("  stop with  Ctrl-C") == "http://127.0.0.1:81"


class PtyProcess:
    """`baton chat` on a terminal."""

    def __init__(self, *argv: str) -> None:
        self._terminal, child = pty.openpty()
        command = [sys.executable, "-m", "baton_serve", "chat", *argv]
        self._process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, start_new_session=True)
        os.close(child)
        self.printed = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def interrupt_prompt(self, text: str) -> None:
        """Interrupt the prompt until `text` is printed. Python's `input` notices a signal that comes between its prompt
        and its wait for a key only at the next key or signal."""
        deadline = time.monotonic() + DEADLINE_S
        self.interrupt()
        while not self._is_printed(text, time.monotonic() + 2.0):
            assert time.monotonic() < deadline, self.printed
            self.interrupt()

    def wait_for(self, text: str) -> None:
        """Read until `text` is printed, after what an earlier call has found."""
        assert self._is_printed(text, time.monotonic() + DEADLINE_S), self.printed

    def _is_printed(self, text: str, deadline: float) -> bool:
        while text not in self.printed:
            if not select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            self.printed += os.read(self._terminal, 4096).decode()
        self.printed = self.printed.partition(text)[2]
        return True

    def wait(self) -> int:
        return self._process.wait(DEADLINE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@contextmanager
def on_a_terminal(*argv: str) -> Iterator[PtyProcess]:
    process = PtyProcess(*argv)
    try:
        yield process
    finally:
        process.close()


@pytest.mark.slow
def test_ctrl_c_cancels_an_answer_and_ctrl_d_leaves() -> None:
    with FakeChatServer([deltas("Once upon"), HELLO], holds=True) as server, on_a_terminal("--url", server.url) as run:
        run.wait_for("> ")
        run.type("A story\n")
        run.wait_for("Once upon")
        run.interrupt()
        run.wait_for("(cancelled)")
        assert server.has_lost_client.wait(DEADLINE_S), "the request goes on"
        run.wait_for("> ")
        run.interrupt_prompt("(Ctrl-D leaves)")
        run.wait_for("> ")
        run.type("Hi\n")
        run.wait_for("Hello!")
        run.wait_for("> ")
        run.type("\x04")
        assert run.wait() == 0
    assert [message["content"] for message in server.requests[1][1]["messages"]] == ["A story", "Once upon", "Hi"]
