"""Files of batches: lines of input, results that survive a crash, the folder and uploads."""

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baton_serve.contracts.batch_lines import InvalidLineError, LineError, parse_line, prefix_key
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.batch.input_file import InputFile, read_input, read_line
from baton_serve.services.router.batch.records import BatchObject, FileObject, StoredBatch, StoredFile
from baton_serve.services.router.batch.results import ResultLog, result_of, unanswered
from baton_serve.services.router.batch.store import BatchStore, StoreLimits, new_batch_id
from baton_serve.services.router.batch.upload import Upload, receive_upload
from baton_serve.services.router.protocol.errors import (
    BadRequestError,
    MediaTypeError,
    NotFoundError,
    RequestTooLargeError,
)

PATH = "/v1/completions"
LIMITS = StoreLimits(max_file_bytes=10_000, max_total_bytes=100_000, keep_s=1000)
BOUNDARY = "multipart/form-data; boundary=xyz"


def line(custom_id: str = "a", *, url: str = PATH, **body: Any) -> bytes:
    content = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hello", **body}}
    return json.dumps(content).encode() + b"\n"


def read(path: Path, *lines: bytes, max_lines: int = 100, max_line_bytes: int = 1000) -> InputFile:
    path.write_bytes(b"".join(lines))
    return read_input(path, PATH, max_lines=max_lines, max_line_bytes=max_line_bytes, pause=lambda _: None)


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b"{", "invalid_request", None),
        (b"[1]", "invalid_request", None),
        (b"\xff", "invalid_request", None),
        (b'{"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_request", None),
        (b'{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "invalid_request", None),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}', "invalid_request", None),
        (line(url="/v1/embeddings"), "invalid_url", "url"),
        (line(stream=True), "invalid_request", "body.stream"),
        (line(priority=-5), "invalid_request", "body.priority"),
        (line(background=True), "invalid_request", "body.background"),
    ],
)
def test_a_line_that_is_not_valid_is_refused_with_its_field(content: bytes, code: str, param: str | None) -> None:
    with pytest.raises(InvalidLineError) as raised:
        parse_line(content, (PATH,))
    assert (raised.value.code, raised.value.param) == (code, param)


def test_a_line_may_say_that_it_is_not_streamed() -> None:
    assert parse_line(line(stream=False), (PATH,)).custom_id == "a"


def test_requests_with_equal_beginnings_run_one_after_the_other(tmp_path: Path) -> None:
    first, second = "f" * 3000, "s" * 3000
    prompts = {f"{group[0]}{number}": f"{group}{number}" for number in range(6) for group in (first, second)}
    found = read(tmp_path / "in", *(line(name, prompt=text) for name, text in prompts.items()), max_line_bytes=9000)
    groups = "".join(one.custom_id[0] for one in found.lines)
    assert groups in ("ffffffssssss", "ssssssffffff")
    assert prefix_key(b'{"model":"m","prompt":"x"}') != prefix_key(b'{"model":"n","prompt":"x"}')


def test_each_line_is_found_again_in_the_file(tmp_path: Path) -> None:
    found = read(tmp_path / "in", line("a"), b"\n", line("b"), line("c").rstrip())
    assert found.errors == []
    for one in found.lines:
        assert parse_line(read_line(tmp_path / "in", one), (PATH,)).custom_id == one.custom_id
    assert sorted(one.custom_id for one in found.lines) == ["a", "b", "c"]


def test_a_byte_order_mark_before_the_first_line_is_skipped(tmp_path: Path) -> None:
    long = line("a", prompt="x" * 500)
    found = read(tmp_path / "in", codecs.BOM_UTF8, long, line("b"), max_line_bytes=len(long))
    assert found.errors == [] and {one.custom_id for one in found.lines} == {"a", "b"}
    assert {read_line(tmp_path / "in", one) for one in found.lines} == {long, line("b")}
    assert [error.code for error in read(tmp_path / "in", codecs.BOM_UTF8).errors] == ["empty_file"]
    assert [error.line for error in read(tmp_path / "in", line("a"), codecs.BOM_UTF8, line("b")).errors] == [2]


def test_errors_name_their_lines(tmp_path: Path) -> None:
    found = read(tmp_path / "in", line("a"), b"{\n", line("a"), b"x" * 1500 + b"\n", line("d"))
    assert [(error.line, error.code) for error in found.errors] == [
        (2, "invalid_request"),
        (3, "duplicate_custom_id"),
        (4, "invalid_request"),
    ]
    assert "line 1" in found.errors[1].message


def test_too_many_lines_and_none_are_errors(tmp_path: Path) -> None:
    assert [e.code for e in read(tmp_path / "in", line("a"), line("b"), max_lines=1).errors] == ["too_many_requests"]
    assert [e.code for e in read(tmp_path / "in", b"\n \n").errors] == ["empty_file"]


def test_a_file_of_empty_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    found = read(tmp_path / "in", line("a"), b"\n" * 1_000_000, max_lines=10)
    assert [(error.code, error.line) for error in found.errors] == [("too_many_lines", 21)]


def test_a_line_with_more_values_than_the_endpoint_accepts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    wide = line(metadata={f"{number:x}": 1 for number in range(70_000)})
    found = read(tmp_path / "in", wide, line("b"), max_line_bytes=1 << 20)
    assert [(error.code, error.line) for error in found.errors] == [("too_many_values", 1)]


def test_fields_of_a_line_that_are_not_needed_are_skipped() -> None:
    deep = b'{"x": ' * 900 + b"1" + b"}" * 900
    head = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", "x": '
    assert parse_line(head + deep + b"}}", (PATH,)).custom_id == "a"
    with pytest.raises(InvalidLineError, match="recursion"):
        parse_line(head + b"[" * 100_000 + b"]" * 100_000 + b"}}", (PATH,))


def answer_each(folder: Path, *ids: str, fail: bool = False) -> None:
    log = ResultLog.open(folder / "out", folder / "err")
    for name in ids:
        log.add(result_of(name, status=400 if fail else 200, body=b'{"x":1}', request_id="r"))
    asyncio.run(log.flush())
    log.close()


@pytest.mark.parametrize("torn", [b'{"id":"batch_req_1","custom', b'{"id":"batch_req_1"}\n', b"\0\0\0\n", b"\0" * 99])
def test_half_a_line_of_a_crash_is_dropped_and_its_request_runs_again(tmp_path: Path, torn: bytes) -> None:
    answer_each(tmp_path, "a", "b")
    answer_each(tmp_path, "c", fail=True)
    with (tmp_path / "out").open("ab") as file:
        file.write(torn)
    log = ResultLog.open(tmp_path / "out", tmp_path / "err")
    assert [log.is_answered(name) for name in "abcd"] == [True, True, True, False]
    assert (log.num_completed, log.num_failed) == (2, 1)
    log.add(unanswered("d", LineError("batch_expired", "too late")))
    asyncio.run(log.flush())
    log.close()
    written = [json.loads(text) for path in ("out", "err") for text in (tmp_path / path).read_text().splitlines()]
    assert [one["custom_id"] for one in written] == ["a", "b", "c", "d"]
    assert written[0]["response"] == {"status_code": 200, "request_id": "r", "body": {"x": 1}}
    assert (written[3]["response"], written[3]["error"]["code"]) == (None, "batch_expired")


def stored_file(store: BatchStore, *, owner: str = "me", expires_at: int = 50, content: bytes = b"{}\n") -> str:
    file_id, part = store.new_upload()
    part.write_bytes(content)
    described = FileObject(
        id=file_id, bytes=3, created_at=0, expires_at=expires_at, filename="in.jsonl", purpose="batch"
    )
    store.add_file(part, StoredFile(owner, described))
    return file_id


def test_batch_ids_sort_in_the_order_of_their_creation() -> None:
    ids = [new_batch_id() for _ in range(1000)]
    assert ids == sorted(ids)
    assert len({len(one) for one in ids}) == 1


def test_files_of_another_owner_do_not_exist(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path), LIMITS)
    file_id = stored_file(store)
    assert store.file(file_id, "me").filename == "in.jsonl"
    for name, owner in ((file_id, "you"), ("file-" + "0" * 24, "me"), ("../files/x", "me"), ("", "me")):
        with pytest.raises(NotFoundError):
            store.file(name, owner)


def owned(store: BatchStore, owner: str, number: int, content: bytes) -> str:
    file_id, path = store.new_upload()
    path.write_bytes(content)
    record = FileObject(id=file_id, bytes=len(content), created_at=number, filename="in", purpose="batch")
    store.add_file(path, StoredFile(owner, record))
    return file_id


def test_one_of_several_owners_may_use_half_of_the_folder(tmp_path: Path) -> None:
    has_several = True
    store = BatchStore(str(tmp_path), LIMITS, has_several_owners=lambda: has_several)
    files = [owned(store, "one", number, b"x" * 10_000) for number in range(5)]
    assert (store.usage("one").num_files, store.usage("one").num_bytes) == (5, 50_000)
    assert store.free_bytes("one") <= 0 < store.free_bytes("two")
    has_several = False
    assert store.free_bytes("one") > 0
    has_several = True
    # Another process deletes a file: its record must not be remembered.
    BatchStore(str(tmp_path), LIMITS).delete_file(files[0])
    assert store.usage("one").num_files == 4
    assert store.free_bytes("one") == 10_000


def test_results_of_a_running_batch_count_for_its_owner(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path), LIMITS)
    batch = BatchObject(
        id=new_batch_id(), endpoint=PATH, input_file_id="file-1", completion_window="24h", created_at=1, expires_at=9
    )
    store.save_batch(StoredBatch(owner="one", batch=batch))
    store.results(batch.id)[0].write_bytes(b"x" * 5000)
    usage = store.usage("one")
    assert (usage.num_bytes, usage.num_open_batches, usage.ended_batches) == (5000, 1, [])
    assert store.usage("two").num_open_batches == 0
    store.save_batch(StoredBatch(owner="one", batch=replace(batch, status="failed")))
    assert store.usage("one").ended_batches == [batch.id]
    store.delete_batch(batch.id)
    assert list((tmp_path / "batches").iterdir()) == []


def test_an_upload_ends_when_the_folder_is_full_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_serve.services.router.batch.upload.SPACE_CHECK_BYTES", 100)
    body = form(("file", "in", b"x" * 900))
    free = iter([500, 400, 50])
    with pytest.raises(RequestTooLargeError, match="--batch-max-bytes"):
        receive(tmp_path / "in", body, size=60, free_bytes=lambda: next(free))
    assert list(free) == []
    assert 0 < (tmp_path / "in").stat().st_size < 300


def test_expired_files_and_broken_uploads_are_swept_away(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path), LIMITS)
    old, new = stored_file(store), stored_file(store, expires_at=500)
    _, part = store.new_upload()
    part.write_bytes(b"half")
    before = store.used_bytes()
    store.sweep(100.0)
    assert [one.file.id for one in store.files()] == [new]
    assert not store.content(old).exists() and part.exists()
    store.sweep(part.stat().st_mtime + 25 * 3600)
    assert not part.exists()
    assert store.used_bytes() < before


def test_one_holder_at_a_time_has_the_lock_of_a_batch(tmp_path: Path) -> None:
    store, other = BatchStore(str(tmp_path), LIMITS), BatchStore(str(tmp_path), LIMITS)
    name = "batch_" + "0" * 24
    with store.lock(name) as mine:
        assert mine
        with other.lock(name) as theirs:
            assert not theirs
    with other.lock(name) as theirs:
        assert theirs


def test_a_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--batch-folder"):
        BatchStore(str(tmp_path / "file"), LIMITS)


def form(*parts: tuple[str, str | None, bytes], end: bytes = b"--xyz--\r\n") -> bytes:
    body = b""
    for name, filename, content in parts:
        shown = f'; filename="{filename}"' if filename is not None else ""
        body += f'--xyz\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n'.encode() + content + b"\r\n"
    return body + end


def receive(
    path: Path,
    body: bytes,
    *,
    content_type: str = BOUNDARY,
    max_bytes: int = 1000,
    size: int = 7,
    free_bytes: Callable[[], int] = lambda: 1 << 30,
) -> Upload:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    return asyncio.run(receive_upload(content_type, pieces(), path, max_bytes=max_bytes, free_bytes=free_bytes))


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_upload_is_written_piece_by_piece(tmp_path: Path, size: int) -> None:
    content = b'{"a": "\r\n--xy"}\r\n' * 20
    body = form(("purpose", None, b"batch"), ("file", "in.jsonl", content))
    upload = receive(tmp_path / "in", body, size=size)
    assert (upload.filename, upload.num_bytes, upload.fields) == ("in.jsonl", len(content), {"purpose": "batch"})
    assert (tmp_path / "in").read_bytes() == content


@pytest.mark.parametrize(
    ("body", "content_type", "error"),
    [
        (form(("purpose", None, b"batch")), BOUNDARY, BadRequestError),
        (form(("file", "in", b"x"), end=b""), BOUNDARY, BadRequestError),
        (form(("file", "in", b"x"), ("file", "in", b"x")), BOUNDARY, BadRequestError),
        (form(("file", "in", b"x" * 1001)), BOUNDARY, RequestTooLargeError),
        (form(("purpose", None, b"x" * 2000)), BOUNDARY, BadRequestError),
        (form(*[("purpose", None, b"x")] * 20), BOUNDARY, BadRequestError),
        (form(("n" * 2000, None, b"x")), BOUNDARY, BadRequestError),
        (form(("purpose", None, b"x")).replace(b"Content-Disposition", b"X" * 2000), BOUNDARY, BadRequestError),
        (b"no form at all", BOUNDARY, BadRequestError),
        (b"{}", "application/json", MediaTypeError),
        (b"{}", "multipart/form-data", MediaTypeError),
        (b"{}", "multipart/form-data; boundary=" + "b" * 5000, BadRequestError),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(
    tmp_path: Path, body: bytes, content_type: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        receive(tmp_path / "in", body, content_type=content_type)
