"""`baton run-batch` with a model: a cluster of its own answers the requests of a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_chat import MODEL, run

pytestmark = pytest.mark.slow


def line(custom_id: str, url: str, body: dict[str, Any]) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def test_each_line_of_a_file_gets_a_result_and_wrong_ones_an_error(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    (tmp_path / "in").write_text(
        "\ufeff"  # a byte order mark, which some editors write
        + line("chat", "/v1/chat/completions", {"messages": question, "temperature": 0})
        + line("text", "/v1/completions", {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True})
        + line("path", "/v1/moderations", {"input": "x"})
        + line("model", "/v1/completions", {"prompt": "Hello", "model": "nobody"})
        + "\n{\n"
    )
    files = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    done = run("run-batch", *files, str(MODEL), "--", "--device", "cpu")
    assert done.returncode == 1, "some requests failed"
    assert "5 requests ended, 3 failed" in done.stderr
    found = [json.loads(text) for text in (tmp_path / "out").read_text().splitlines()]
    results = {one["custom_id"]: one for one in found}
    assert len(found) == len(results) == 5
    assert "42" in results["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert results["text"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert results["path"]["response"] is None and results["path"]["error"]["code"] == "invalid_url"
    assert results["model"]["response"]["status_code"] == 404
    assert results[""]["error"]["code"] == "invalid_request"


def test_a_file_that_is_missing_is_reported(tmp_path: Path) -> None:
    done = run("run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "No such file" in done.stderr
