"""A headless Chromium, spoken to through a pipe in its DevTools protocol: no driver and no library is needed."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
FLAGS += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
# A microphone that beeps, which pages may use without a question to a user.
FLAGS += ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""The protocol's pipe is descriptors 3 and 4 of the browser."""
DEADLINE_S = 60.0


class Browser:
    """One page. `requested`: every address that it asked for."""

    def __enter__(self) -> Self:
        assert PROGRAM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (theirs_in, theirs_out)]
        command = [sys.executable, "-c", LAUNCH, *map(str, ends), PROGRAM, *FLAGS]
        command += [f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        self._held = b""
        self._number = 0
        self._session = ""
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result. Raises `RuntimeError`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while (answer := self._receive(deadline)).get("id") != self._number:
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def open(self, url: str, *, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Its value, once that is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}; {self.value('document.body.innerText')}")
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path) -> None:
        """Save an image of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("Chromium does not answer")
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return dict(json.loads(message))
