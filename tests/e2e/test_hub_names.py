"""Commands that get the name of a model on the hub: each role by itself, and a GGUF file chosen by its kind."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from baton_serve.bench.ports import free_port
from baton_serve.engine.offline.llm import LLM
from baton_serve.engine.offline.request_params import SamplingParams
from baton_serve.services.local.settings import DEMO_MODEL
from tests.e2e.cluster import Api, baton, environment, run_baton, wait_until
from tests.e2e.kernel_cache import link_kernels
from tests.e2e.test_equality import PROMPTS, greedy, prompt_of, reference_model, served_tokens
from tests.gguf_files import Kind, write_lone_gguf
from tests.unit.local.fake_hub import FakeHub

pytestmark = pytest.mark.slow

NEW_TOKENS = 8
START_TIMEOUT_S = 120.0


def variables(hub: FakeHub, cache: Path) -> dict[str, str]:
    """Return the variables of a user with a network and no model in any cache."""
    link_kernels(cache)
    return {
        "HF_HUB_CACHE": str(cache / "hub"),
        "XDG_CACHE_HOME": str(cache),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
    }


@contextmanager
def running(*argv: str, environ: dict[str, str]) -> Iterator[None]:
    """A `baton` process that is ended with the block."""
    process = subprocess.Popen(baton(*argv), env=environment() | environ)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_roles_started_by_the_name_of_a_model_find_each_other_and_answer(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir() if path.is_file()}
    port, registry = free_port(), f"memory://127.0.0.1:{free_port()}"
    common = ("--registry", registry)
    worker = (*common, "--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "64M", "--drain-timeout-s", "0")
    with ExitStack() as stack:
        hub = stack.enter_context(FakeHub("org/small", files))
        near, far = variables(hub, tmp_path / "router"), variables(hub, tmp_path / "workers")
        stack.enter_context(running("router", "org/small", "--port", str(port), *common, environ=near))
        for role in ("prefill", "decode"):
            stack.enter_context(running(role, "org/small", *worker, environ=far))
        api = stack.enter_context(Api(f"http://127.0.0.1:{port}"))
        wait_until(lambda: has_instances(api, 2), timeout_s=START_TIMEOUT_S, what="a prefill and a decode instance")
        names = [model["id"] for model in api.client.get("/v1/models").json()["data"]]
        assert names == ["org/small", "small"]
        body = {"model": "small", "temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        answer = api.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert "42" in answer.json()["choices"][0]["message"]["content"]
        assert hub.fetched["model.safetensors"] == 1, "both workers use one cache, and the router needs no weights"


def has_instances(api: Api, count: int) -> bool:
    try:
        return len(api.client.get("/health").json()["instances"]) == count
    except httpx.TransportError:
        return False


@pytest.fixture
def gguf_hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A repository with two kinds and a config without a tokenizer, as some have."""
    file = write_lone_gguf(tmp_path / "model", Kind.Q4_0, DEMO_MODEL)
    files = {"tiny.Q4_0.gguf": file.read_bytes(), "tiny.Q8_0.gguf": b"", "mmproj-Q4_0.gguf": b"", "config.json": b"{}"}
    with FakeHub("org/tiny", files) as hub:
        yield hub


def test_llm_takes_the_gguf_file_of_a_kind_with_its_own_config_and_tokenizer(
    gguf_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, value in variables(gguf_hub, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    prompt = next(iter(PROMPTS.values()))
    with LLM("org/tiny:Q4_0", device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        (output,) = llm.generate([list(prompt)], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == greedy(reference_model(tmp_path / "plain"), prompt, NEW_TOKENS)
    assert list(gguf_hub.fetched) == ["tiny.Q4_0.gguf"]


def test_a_split_gguf_file_is_downloaded_and_served_as_one(tmp_path: Path) -> None:
    first = write_lone_gguf(tmp_path / "model", Kind.Q8_0, DEMO_MODEL, tensors_per_file=6)
    files = {f"Q8_0/{path.name}": path.read_bytes() for path in first.parent.iterdir()}
    assert len(files) > 2 and first.name == f"model-00001-of-{len(files):05}.gguf"
    port, prompt = free_port(), prompt_of(40)
    command = ("serve", "org/tiny", "--port", str(port), "--device", "cpu", "--threads", "1", "--dtype", "float32")
    with ExitStack() as stack:
        hub = stack.enter_context(FakeHub("org/tiny", files))
        flags = ("--kv-cache-memory-bytes", "64M", "--disaggregation-min-tokens", "0")
        stack.enter_context(running(*command, *flags, environ=variables(hub, tmp_path / "cache")))
        api = stack.enter_context(Api(f"http://127.0.0.1:{port}"))
        wait_until(lambda: has_instances(api, 2), timeout_s=START_TIMEOUT_S, what="a prefill and a decode instance")
        tokens = served_tokens(api, prompt, NEW_TOKENS)
        assert tokens == greedy(reference_model(tmp_path / "plain"), prompt, NEW_TOKENS)
    assert dict(hub.fetched) == dict.fromkeys(files, 1)


def test_a_part_of_a_split_gguf_file_without_the_others_is_an_error(tmp_path: Path) -> None:
    first = write_lone_gguf(tmp_path / "model", Kind.Q8_0, DEMO_MODEL, tensors_per_file=6)
    last = max(first.parent.iterdir())
    ended = run_baton("serve", str(last), "--device", "cpu")
    assert ended.returncode == 2 and "name the first one" in ended.stderr, ended.stderr
    last.unlink()
    ended = run_baton("serve", str(first), "--device", "cpu")
    assert ended.returncode == 2 and f"{last.name} is missing beside it" in ended.stderr, ended.stderr


def test_pull_and_a_chat_with_a_cluster_take_the_gguf_file_of_a_kind(gguf_hub: FakeHub, tmp_path: Path) -> None:
    environ = environment() | variables(gguf_hub, tmp_path / "cache")
    pulled = subprocess.run(baton("pull", "org/tiny:q4_0"), env=environ, capture_output=True, text=True, timeout=60)
    assert pulled.returncode == 0 and pulled.stdout.endswith("/tiny.Q4_0.gguf\n"), pulled.stderr
    command = baton("chat", "org/tiny:Q4_0", "-q", "Hi", "--max-tokens", "2", "--", "--device", "cpu", "--offline")
    chatted = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert chatted.returncode == 0, chatted.stderr
    assert dict(gguf_hub.fetched) == {"tiny.Q4_0.gguf": 1}
