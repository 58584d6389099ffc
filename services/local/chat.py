"""`baton chat` and `baton complete`: decides which history is sent, what Ctrl-C does and what is shown.

With a MODEL they start a cluster for it and stop it at the end. Ctrl-C cancels an answer and Ctrl-D leaves.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, TextIO, TypeVar

from baton_serve.services.common.errors import ConfigurationError, LocalError
from baton_serve.services.common.settings.configuration import environment, load, stop
from baton_serve.services.local.chat_client import ChatClient
from baton_serve.services.local.demo_client import AnswerError
from baton_serve.services.local.serve_process import LocalCluster
from baton_serve.services.local.settings import ChatSettings, CompletionSettings

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
_CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")
"""Control characters. A terminal would run an escape sequence that a model generates."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

S = TypeVar("S", bound=CompletionSettings)


def main(argv: Sequence[str]) -> int:
    """Run `baton chat` with these arguments: chat until the input ends. Return the exit status."""
    return _run(
        ChatSettings,
        argv,
        program="baton chat",
        description="Chat with a running server, or with a MODEL, for which a cluster is started and stopped. Ctrl-C"
        " cancels an answer, Ctrl-D leaves. Without a terminal each line of standard input is a message.",
    )


def complete(argv: Sequence[str]) -> int:
    """Run `baton complete` with these arguments: complete one text after the other until the input ends. Return the
    exit status.
    """
    return _run(
        CompletionSettings,
        argv,
        program="baton complete",
        description="Complete texts with a running server, or with a MODEL, for which a cluster is started and"
        " stopped. Ctrl-C cancels an answer, Ctrl-D leaves. Without a terminal each line of standard input is a text.",
    )


def _run(cls: type[S], argv: Sequence[str], *, program: str, description: str) -> int:
    own, options = _split(argv)
    environ = environment()
    role = program.removeprefix("baton ").upper()
    settings = load(cls, own, environ, prefix=f"BATON__{role}__", program=program, description=description)
    if options and not settings.model:
        stop(program, f"options after -- are those of a cluster, but no MODEL is given: {options[0]}")
    # An exception, so that the cluster is stopped; by default these signals end the process at once.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    try:
        with _server(settings, environ, options) as client:
            return Dialogue(client, settings, Terminal(sys.stdin, sys.stdout, sys.stderr)).run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (AnswerError, LocalError) as exc:
        sys.stderr.write(f"{program}: {exc}\n")
        return 2 if isinstance(exc, ConfigurationError) else 1
    except BrokenPipeError:
        # The reader of the output is gone, as `head` after its last line. Python must not fail to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the words of a command line at the first `--`: return (the words before it, the words after it)."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _exit(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _server(settings: CompletionSettings, environ: Mapping[str, str], options: Sequence[str]) -> Iterator[ChatClient]:
    """Yield a client of the server at `--url` or, if a MODEL is given, of a local cluster for it, which is started with
    `options` and stopped at the end of the block.
    """
    key = settings.api_key or environ.get("VLLM_API_KEY") or environ.get("OPENAI_API_KEY")
    if not settings.model:
        with ChatClient(settings.url, key) as client:
            yield client
        return
    # The keys of the environment belong to other servers; only a key that was given for this one is sent.
    # Warnings of the cluster would appear in the middle of the conversation.
    words = [settings.model, "--log-level=error", *options]
    with LocalCluster(words) as cluster, ChatClient(cluster.url, settings.api_key) as client:
        yield client


class Terminal:
    """Reads the user's messages and shows answers: with prompts on a terminal, otherwise line by line without any other
    text.
    """

    def __init__(self, source: TextIO, out: TextIO, err: TextIO) -> None:
        self._source, self._out, self._err = source, out, err
        self.is_interactive = source.isatty()
        self._is_screen = out.isatty()
        self._is_dim = False
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # `input` then has line editing and a history

    def messages(self) -> Iterator[str]:
        """Yield the user's messages, one for each line that is not blank, until the input ends. Ctrl-C at the prompt
        discards the line.
        """
        while True:
            try:
                line = self._line()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                self.note("\n(Ctrl-D leaves)")
                continue
            if line.strip():
                yield line

    def _line(self) -> str:
        if self.is_interactive and self._is_screen:
            return input("> ")
        if self.is_interactive:
            # The prompt must not get into a file that the answers are written to.
            self.note("> ", end="")
        if not (line := self._source.readline()):
            raise EOFError
        return line.rstrip("\n")

    def show(self, text: str, *, is_reasoning: bool = False) -> None:
        """Write a part of an answer immediately. Reasoning is dim on a terminal, and left out elsewhere."""
        if not self._is_screen:
            self._write("" if is_reasoning else text)
            return
        if is_reasoning != self._is_dim:
            self._write(_DIM if is_reasoning else f"{_PLAIN}\n")
            self._is_dim = is_reasoning
        self._write(text.translate(_CONTROLS))

    def end_answer(self) -> None:
        """Write the line break after an answer."""
        self._write(f"{_PLAIN}\n" if self._is_dim else "\n")
        self._is_dim = False

    def note(self, text: str, *, end: str = "\n") -> None:
        """Write a text that is not part of an answer to standard error."""
        self._err.write(text + end)
        self._err.flush()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Dialogue:
    """Sends the user's messages to the server, one after the other. A chat keeps its messages and answers; completions
    are independent of each other.
    """

    def __init__(self, client: ChatClient, settings: CompletionSettings, terminal: Terminal) -> None:
        self._client = client
        self._settings = settings
        self._terminal = terminal
        self._model = settings.model_name or client.first_model()
        self._is_chat = isinstance(settings, ChatSettings)
        self.history: list[dict[str, str]] = []
        """The messages of a chat so far."""
        if isinstance(settings, ChatSettings) and settings.system_prompt:
            self.history.append({"role": "system", "content": settings.system_prompt})

    def run(self) -> int:
        """Answer the message of `--quick`, or all messages of the input. Return the exit status: 1 if a message got no
        answer.
        """
        if self._settings.quick is not None:
            return 0 if self._answer(self._settings.quick) else 1
        if self._terminal.is_interactive:
            what = "a message" if self._is_chat else "a text to complete"
            self._terminal.note(f"{self._model} at {self._client.url}. Enter {what}; Ctrl-C cancels, Ctrl-D leaves.")
        status = 0
        for message in self._terminal.messages():
            if not self._answer(message) and not self._terminal.is_interactive:
                status = 1
        if self._terminal.is_interactive:
            self._terminal.note("")
        return status

    def _answer(self, message: str) -> bool:
        """Request and show the answer to one message, and return whether it is complete. Ctrl-C on a terminal cancels
        it.
        """
        path, body = self._request(message)
        shown: list[str] = []
        try:
            with contextlib.closing(self._client.stream(path, body)) as parts:
                for part in parts:
                    # First, because Ctrl-C may come as soon as the user sees the text.
                    if not part.is_reasoning:
                        shown.append(part.text)
                    self._terminal.show(part.text, is_reasoning=part.is_reasoning)
        except AnswerError as exc:
            if shown:
                self._terminal.end_answer()
            self._terminal.note(f"error: {exc}")
            return False
        except KeyboardInterrupt:
            if not self._terminal.is_interactive or self._settings.quick is not None:
                raise
            self._terminal.end_answer()
            self._terminal.note("(cancelled)")
            # The user has read this part of the answer, so the next question may refer to it.
            self._remember(message, "".join(shown))
            return False
        self._terminal.end_answer()
        self._remember(message, "".join(shown))
        return True

    def _request(self, message: str) -> tuple[str, dict[str, object]]:
        settings = self._settings
        stated = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
        body: dict[str, object] = {"model": self._model, **{k: v for k, v in stated.items() if v is not None}}
        if not self._is_chat:
            return "/v1/completions", {**body, "prompt": message}
        return "/v1/chat/completions", {**body, "messages": [*self.history, {"role": "user", "content": message}]}

    def _remember(self, message: str, answer: str) -> None:
        # Chat templates refuse two messages of the user in a row, so a message without an answer is left out.
        if self._is_chat and answer:
            self.history += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
