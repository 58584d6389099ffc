"""Settings that choose a model's files or change its config: revisions, tokens, folders, longer contexts."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from baton_serve.bench.ports import free_port
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.engine import Engine
from baton_serve.engine.errors import ConfigError, ModelError
from baton_serve.engine.offline.llm import LLM
from baton_serve.engine.offline.request_params import SamplingParams
from tests.e2e.cluster import Api, Cluster, baton, environment, run_baton, wait_until
from tests.e2e.kernel_cache import link_kernels
from tests.e2e.test_equality import expected_tokens, prompt_of, served_tokens
from tests.e2e.test_hub_names import START_TIMEOUT_S, has_instances, running, variables
from tests.families import MAX_POSITIONS
from tests.tiny_models import CHAT_TEMPLATE, write_tiny_model
from tests.unit.local.fake_hub import FakeHub, commit_of

pytestmark = pytest.mark.slow

LONGER = 2 * MAX_POSITIONS
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": MAX_POSITIONS}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "--rope-scaling": (("--rope-scaling", json.dumps(YARN)), {"rope_scaling": YARN}),
    "--rope-theta": (("--rope-theta", "500"), {"rope_theta": 500.0}),
    "--hf-overrides": (("--hf-overrides", '{"rms_norm_eps": 0.1}'), {"hf_overrides": {"rms_norm_eps": 0.1}}),
}
SMALL = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--kv-cache-memory-bytes", "64M")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def changed(folder: Path, to: Path, settings: dict[str, Any]) -> Path:
    """Copy a model, and change its config by hand as the settings should."""
    to.mkdir()
    for name, data in files_of(folder).items():
        (to / name).write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]
    if "rope_scaling" in settings:
        config["rope_parameters"] = {"rope_theta": theta, **settings["rope_scaling"]}
    if "rope_theta" in settings:
        config["rope_parameters"]["rope_theta"] = settings["rope_theta"]
    (to / "config.json").write_text(json.dumps({**config, **settings.get("hf_overrides", {})}))
    return to


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, in a folder of the test."""
    link_kernels(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(llama: Path, tmp_path: Path) -> Iterator[FakeHub]:
    """A repository whose branch v1 has the model, and whose branch v2 has another chat template."""
    model = files_of(llama)
    settings = json.loads(model["tokenizer_config.json"])
    other = json.dumps({**settings, "chat_template": "v2 " + CHAT_TEMPLATE}).encode()
    with FakeHub("org/tiny", {"config.json": b"{}", "README.md": b"nothing yet"}) as hub:
        hub.revisions = {"v1": model, "v2": {**model, "tokenizer_config.json": other}}
        yield hub


def test_a_cluster_serves_a_revision_with_the_tokenizer_of_another_one(
    hub: FakeHub, llama: Path, tmp_path: Path
) -> None:
    hub.token = "hf_secret"
    port, folder = free_port(), tmp_path / "models"
    where = ("--revision", "v1", "--tokenizer-revision", "v2", "--download-dir", str(folder), "--hf-token", hub.token)
    command = ("serve", "org/tiny", "--port", str(port), "--device", "cpu", "--threads", "1", *SMALL, *where)
    prompt = prompt_of(40)
    with ExitStack() as stack:
        stack.enter_context(running(*command, environ=variables(hub, tmp_path / "cache")))
        api = stack.enter_context(Api(f"http://127.0.0.1:{port}"))
        wait_until(lambda: has_instances(api, 2), timeout_s=START_TIMEOUT_S, what="a prefill and a decode instance")
        assert served_tokens(api, prompt, 8) == expected_tokens(llama, prompt, 8)
        chat = {"messages": [{"role": "user", "content": "a"}]}
        tokens = api.client.post("/tokenize", json=chat).json()["tokens"]
        text = api.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.startswith("v2 "), text
    snapshots = folder / "models--org--tiny" / "snapshots"
    assert {path.name for path in snapshots.iterdir()} == {commit_of("v1"), commit_of("v2")}
    assert hub.fetched["model.safetensors"] == 1, "of the tokenizer's revision no weights are needed"


def test_llm_takes_revisions_a_folder_and_a_token(
    hub: FakeHub, llama: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, value in variables(hub, cache).items():
        monkeypatch.setenv(name, value)
    hub.token, prompt = "hf_secret", prompt_of(20)
    own: dict[str, Any] = {"download_dir": str(tmp_path / "models"), "hf_token": "hf_secret"}
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
    with LLM("org/tiny", revision="v1", tokenizer_revision="v2", **own, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert llm.get_tokenizer().chat_template.startswith("v2 ")
    assert list(output.outputs[0].token_ids) == expected_tokens(llama, prompt, 8)
    with pytest.raises(ModelError, match=r"org/tiny has no revision v3 at .*: give a branch, a tag or a commit"):
        LLM("org/tiny", revision="v3", **own, **settings)
    with pytest.raises(ModelError, match="not a revision"):
        LLM("org/tiny", revision="../../etc", **own, **settings)


def test_a_folder_has_no_revision_which_a_note_says(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(llama), revision="v1", device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 24):
        assert "revision has no effect" in caplog.text


def test_pull_takes_a_revision(hub: FakeHub, tmp_path: Path) -> None:
    where = ("--revision", commit_of("v1"), "--download-dir", str(tmp_path / "models"))
    environ = environment() | variables(hub, tmp_path)
    done = subprocess.run(baton("pull", "org/tiny", *where), env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "models" / "models--org--tiny" / "snapshots" / commit_of("v1"))


def test_modelscope_needs_its_package_and_is_used_if_it_is_there(
    llama: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    ended = run_baton("serve", "org/tiny")
    assert ended.returncode == 2 and "pip install modelscope" in ended.stderr
    package = tmp_path / "packages" / "modelscope" / "hub"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    (package / "snapshot_download.py").write_text(
        "def snapshot_download(model_id, cache_dir, revision, local_files_only):\n"
        f"    assert (model_id, revision) == ('org/tiny', 'v1')\n    return {str(llama)!r}\n"
    )
    monkeypatch.syspath_prepend(str(package.parent.parent))
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
    with LLM("org/tiny", revision="v1", **settings) as llm:
        (output,) = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert output.outputs[0].token_ids


@pytest.mark.parametrize("case", CASES)
def test_a_cluster_computes_with_the_changed_config(case: str, llama: Path, cache: Path, tmp_path: Path) -> None:
    """`--rope-scaling` also makes the context longer: the last prompt is longer than the model's own limit."""
    flags, settings = CASES[case]
    copy = changed(llama, tmp_path / "changed", settings)
    prompts = [prompt_of(40)]
    if case == "--rope-scaling":
        flags = (*flags, "--max-model-len", str(LONGER))
        prompts.append(prompt_of(MAX_POSITIONS + 20))
    with Cluster(llama, args=(*SMALL, *flags)) as cluster:
        names = [model["id"] for model in cluster.client.get("/v1/models").json()["data"]]
        assert names == [str(llama), llama.name], "the model keeps its name"
        for prompt in prompts:
            expected = expected_tokens(copy, prompt, 8)
            assert served_tokens(cluster, prompt, 8) == expected
            assert expected != expected_tokens(llama, prompt, 8), "the change shows in the tokens"


def test_an_instance_takes_a_longer_context_with_the_variable(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*SMALL, "--max-model-len", str(LONGER))
    ended = run_baton("serve", str(llama), "--port", "0", "--device", "cpu", *flags)
    assert ended.returncode != 0 and "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in ended.stderr
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    prompt = prompt_of(MAX_POSITIONS + 20)
    with Cluster(llama, args=flags) as cluster:
        assert served_tokens(cluster, prompt, 8) == expected_tokens(llama, prompt, 8)


@pytest.mark.parametrize("case", CASES)
def test_llm_computes_with_the_changed_config(case: str, llama: Path, cache: Path, tmp_path: Path) -> None:
    settings, prompt = CASES[case][1], prompt_of(40)
    copy = changed(llama, tmp_path / "changed", settings)
    given: dict[str, Any] = dict(settings)
    with LLM(str(llama), device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 24, **given) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected_tokens(copy, prompt, 8)


def test_another_config_has_another_fingerprint_and_ranks_compute_with_it(
    llama: Path, cache: Path, tmp_path: Path
) -> None:
    copy = changed(llama, tmp_path / "changed", {"rope_theta": 500.0})
    own: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 1 << 24}
    prompt = prompt_of(40)
    with Engine(EngineConfig(model=str(llama), **own)) as plain, Engine(EngineConfig(model=str(copy), **own)) as other:
        assert plain.layout.fingerprint != other.layout.fingerprint
    with Cluster(llama, prefill=0, decode=0, unified=1, args=(*SMALL, "--rope-theta", "500", "-tp", "2")) as cluster:
        assert served_tokens(cluster, prompt, 8) == expected_tokens(copy, prompt, 8)


def test_a_longer_context_needs_a_variable_or_a_stretch(
    llama: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 24,
        "max_model_len": LONGER,
    }
    with pytest.raises(ConfigError, match=r"more than the model was made for.*--rope-scaling.*VLLM_ALLOW_LONG"):
        LLM(str(llama), **settings)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    prompt = prompt_of(MAX_POSITIONS + 20)
    with LLM(str(llama), **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected_tokens(llama, prompt, 8)
    learned = write_tiny_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match="positions are learned"):
        LLM(str(learned), **settings)
