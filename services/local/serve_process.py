"""Starts `baton serve` as a child process and finds its URL, for the commands that need a cluster of their own."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from baton_serve.child_command import module_command
from baton_serve.services.common.errors import LocalError

STOP_TIMEOUT_S = 45.0
"""Time in which `baton serve` ends by itself after SIGINT. Then it is killed, and its processes with it."""
_URL = re.compile(r"^\s+url\s+(https?://\S+)/v1\s*$")
_BANNER_END = "stop with"
"""Label of the last line of the banner that `baton serve` prints when it is ready."""


class NotStartedError(LocalError):
    """`baton serve` exited before it was ready, or took too long."""


def serve_command(*options: str) -> list[str]:
    """Return the command line that runs `baton serve` with `options` on a free port. When this process ends, the
    command is killed.
    """
    return module_command(
        "baton_serve.services.common.die_with_parent",
        str(os.getpid()),
        "baton_serve",
        "serve",
        "--log-level=warning",
        *options,
        "--port=0",
    )


class BannerReader:
    """Finds the URL in the banner that `baton serve` prints when it is ready."""

    def __init__(self) -> None:
        self._url = ""

    def feed(self, line: str) -> str | None:
        """Read the next line of the standard output of `baton serve`. Return the URL, without `/v1`, once the banner is
        complete, else None.
        """
        if match := _URL.match(line):
            self._url = match[1]
        return self._url if line.strip().startswith(_BANNER_END) else None


class LocalCluster:
    """`with LocalCluster(options) as cluster`: runs `baton serve` with these options until the block ends. It does not
    use an event loop.

    Its log and its progress bars appear on this process's standard error.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options
        self.url = ""
        """The router's URL, without `/v1`."""

    def __enter__(self) -> Self:
        """Start `baton serve` and wait until all its processes are ready, at most for its `--start-timeout-s`.

        Raises `NotStartedError` if it exits before that.
        """
        self._process = subprocess.Popen(
            serve_command(*self._options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must cancel an answer; it must not reach the cluster.
        )
        try:
            self.url = self._read_banner()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _read_banner(self) -> str:
        assert self._process.stdout is not None
        banner = BannerReader()
        # No deadline here: `baton serve` has one (--start-timeout-s), and a download before it shows its progress.
        for line in self._process.stdout:
            if (url := banner.feed(line)) is not None:
                return url
        raise NotStartedError("baton serve did not start; the reason is above")

    def _stop(self) -> None:
        """Stop `baton serve` as Ctrl-C does, and wait for its end. A further Ctrl-C of the user ends it at once."""
        self._process.send_signal(signal.SIGINT)
        try:
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except KeyboardInterrupt:
                # The user presses Ctrl-C again, but the session of the cluster does not receive it.
                self._process.send_signal(signal.SIGINT)
                self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
