"""A batch whose router is killed in the middle: the next one answers the rest, and each request once."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_serve.bench.ports import free_port
from tests.e2e.cluster import Api, wait_until
from tests.e2e.test_high_availability import health, process

pytestmark = [pytest.mark.slow]

NUM_LINES = 300


def lines() -> bytes:
    bodies = ({"prompt": [7, 8, number % 250], "max_tokens": 8, "ignore_eos": True} for number in range(NUM_LINES))
    return b"".join(
        json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}).encode() + b"\n"
        for i, body in enumerate(bodies)
    )


def test_a_killed_router_leaves_a_batch_that_the_next_one_completes(llama: Path, tmp_path: Path) -> None:
    port, registry = free_port(), f"memory://127.0.0.1:{free_port()}"
    common = ("--model", str(llama), "--registry", registry)
    router = ("router", *common, "--port", str(port), "--batch-folder", str(tmp_path), "--instance-wait-s", "120")
    cpu = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--threads", "1")
    with ExitStack() as stack:
        api = stack.enter_context(Api(f"http://127.0.0.1:{port}"))

        def batch() -> dict[str, Any]:
            return dict(api.client.get(f"/v1/batches/{batch_id}").json())

        first = stack.enter_context(process(*router))
        stack.enter_context(process("unified", *common, *cpu, "--http-port", "0"))
        wait_until(lambda: health(api).get("pools", {}).get("unified") == 1, timeout_s=120, what="an instance")
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", lines())}}
        file_id = api.client.post("/v1/files", **form).json()["id"]  # type: ignore[arg-type]
        order = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = api.client.post("/v1/batches", json=order).json()["id"]
        so_far = tmp_path / "batches" / f"{batch_id}.output"
        wait_until(lambda: so_far.exists() and so_far.stat().st_size > 0, timeout_s=60, what="first results")
        first.kill()
        first.wait()
        before = so_far.read_bytes()
        assert 0 < before.count(b"\n") < NUM_LINES, "it was killed in the middle"
        # A crash in the middle of a write leaves half a line.
        so_far.write_bytes(before + b'{"id":"batch_req_0","custom_id":"r')

        stack.enter_context(process(*router))
        wait_until(lambda: bool(health(api)), timeout_s=120, what="the second router")
        wait_until(lambda: batch()["status"] == "completed", timeout_s=120, what="the end of the batch")
        ended = batch()
        assert ended["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert ended["error_file_id"] is None
        content = httpx.get(f"{api.url}/v1/files/{ended['output_file_id']}/content").content
        assert content.startswith(before), "what was answered was not asked again"
        answers = [json.loads(line) for line in content.splitlines()]
        assert sorted(one["custom_id"] for one in answers) == sorted(f"r{i}" for i in range(NUM_LINES))
        assert all(one["response"]["body"]["usage"]["completion_tokens"] == 8 for one in answers)
