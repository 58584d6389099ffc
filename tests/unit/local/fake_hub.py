"""A hub on loopback that serves the files of one repository, as huggingface_hub asks for them."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

COMMIT = "a" * 40


def commit_of(revision: str) -> str:
    """Return the commit of a further revision."""
    return hashlib.sha1(revision.encode()).hexdigest()


class FakeHub:
    """`with FakeHub("org/name", files) as hub`: answers at `hub.url` until the block ends."""

    def __init__(self, name: str, files: Mapping[str, bytes], *, token: str = "") -> None:
        self.name = name
        self.files = dict(files)
        self.token = token
        """Requests without this token get 401; "" lets everyone in."""
        self.revisions: dict[str, Mapping[str, bytes]] = {}
        """The files of further revisions. Each is a commit of its own (`commit_of`)."""
        self.cut_after: dict[str, int] = {}
        """For each of these files: the number of bytes after which its first download breaks."""
        self.fetched: Counter[str] = Counter()
        self.ranges: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args: object) -> None:
                """Print no line for each request, unlike the base class."""

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = request.path.partition("?")[0].replace("%2F", "/")
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            self._send(request, 401, b"{}", {"X-Error-Code": "GatedRepo"}, with_body=with_body)
        elif (found := self._revision_in(path)) is not None:
            self._answer_revision(request, *found, with_body=with_body)
        elif path.startswith(api := f"/api/models/{self.name}/revision/") and path not in (api + "main", api + COMMIT):
            self._send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
        elif path.startswith(f"/api/models/{self.name}/tree/"):
            files = self.files | dict(self.revisions.get(self._of_commit(path.rsplit("/", 1)[-1]), {}))
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self._send(request, 200, json.dumps(tree).encode(), {}, with_body=with_body)
        elif path.startswith(f"/api/models/{self.name}"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": self.name, "sha": COMMIT, "siblings": siblings}
            self._send(request, 200, json.dumps(info).encode(), {}, with_body=with_body)
        elif (file := path.removeprefix(f"/{self.name}/resolve/").partition("/")[2]) in self.files:
            self._send_file(request, file, self.files[file], COMMIT, with_body=with_body)
        else:
            self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)

    def _of_commit(self, given: str) -> str:
        """Return the name of a further revision that is given by its name or commit; `given` for any other."""
        return next((name for name in self.revisions if commit_of(name) == given), given)

    def _revision_in(self, path: str) -> tuple[str, str] | None:
        """Return the further revision that a path names, by its name or commit, and the file in it or ""."""
        for revision in self.revisions:
            for name in (revision, commit_of(revision)):
                if path == f"/api/models/{self.name}/revision/{name}":
                    return revision, ""
                if path.startswith(start := f"/{self.name}/resolve/{name}/"):
                    return revision, path.removeprefix(start)
        return None

    def _answer_revision(self, request: BaseHTTPRequestHandler, name: str, file: str, *, with_body: bool) -> None:
        files, commit = self.revisions[name], commit_of(name)
        if file in files:
            self._send_file(request, file, files[file], commit, with_body=with_body)
        elif file:
            self._send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"}, with_body=with_body)
        else:
            info = {"id": self.name, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            self._send(request, 200, json.dumps(info).encode(), {}, with_body=with_body)

    def _send_file(
        self, request: BaseHTTPRequestHandler, file: str, data: bytes, commit: str, *, with_body: bool
    ) -> None:
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not with_body:
            self._send(request, 200, data, headers, with_body=False)
            return
        self.fetched[file] += 1
        begin = 0
        if given := request.headers.get("range"):
            self.ranges.append(given)
            begin = int(given.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cut = self.cut_after.pop(file, None)
        self._send(request, 206 if given else 200, data[begin:], headers, with_body=True, cut=cut)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        *,
        with_body: bool,
        cut: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body[:cut])
        request.close_connection = request.close_connection or cut is not None
