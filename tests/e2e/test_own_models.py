"""Model classes outside transformers: registered by a plug-in or by a program, or refused with a newer model."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton_serve import LLM, ModelRegistry, SamplingParams
from baton_serve.bench.ports import free_port
from baton_serve.engine.errors import ModelError, UnsupportedModelError
from baton_serve.engine.model.plugin_models import load_plugins
from baton_serve.model_source import allowed_plugins
from tests.e2e.cluster import Api, environment, wait_until
from tests.e2e.test_equality import expected_tokens, prompt_of, served_tokens
from tests.e2e.test_hub_names import START_TIMEOUT_S, has_instances, running
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_{0}"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


def register():
    from baton_serve import ModelRegistry

    ModelRegistry.register_model("{0}ForCausalLM", "own_{0}:OwnForCausalLM")
"""


def write_own_model(folder: Path, name: str) -> Path:
    """Write a llama with the config of the package `own_NAME`."""
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": f"own_{name}", "architectures": [f"{name}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_package(folder: Path, name: str, *, is_plug_in: bool = True) -> None:
    """Write an installed package, with a plug-in or without."""
    info = folder / f"own_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"own_{name}.py").write_text(CODE.format(name))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own_{name}\nVersion: 1.0\n")
    if is_plug_in:
        (info / "entry_points.txt").write_text(f"[baton.general_plugins]\nown = own_{name}:register\n")


def test_every_process_of_a_cluster_serves_the_class_of_a_plug_in(tmp_path: Path) -> None:
    plain, model = write_tiny_model(tmp_path / "plain"), write_own_model(tmp_path / "model", "first")
    write_package(tmp_path / "packages", "first")
    path = f"{tmp_path / 'packages'}:{environment()['PYTHONPATH']}"
    port, prompt = free_port(), prompt_of(40)
    command = ("serve", str(model), "--port", str(port), "--device", "cpu", "--threads", "1", "--dtype", "float32")
    with ExitStack() as stack:
        flags = ("--kv-cache-memory-bytes", "64M", "--disaggregation-min-tokens", "0")
        stack.enter_context(running(*command, *flags, environ={"PYTHONPATH": path}))
        api = stack.enter_context(Api(f"http://127.0.0.1:{port}"))
        wait_until(lambda: has_instances(api, 2), timeout_s=START_TIMEOUT_S, what="a prefill and a decode instance")
        assert served_tokens(api, prompt, 8) == expected_tokens(plain, prompt, 8)


def test_a_variable_of_vllm_names_the_plug_ins_that_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("fourth", "fifth"):
        write_package(tmp_path / "packages", name)
        entry = tmp_path / "packages" / f"own_{name}-1.0.dist-info" / "entry_points.txt"
        entry.write_text(f"[baton.general_plugins]\n{name} = own_{name}:register\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    load_plugins.cache_clear()  # another test of this process may have loaded all plug-ins
    for stated, expected in ((None, ["fifth", "fourth"]), ("fifth, sixth", ["fifth"]), ("", [])):
        environ = {} if stated is None else {"VLLM_PLUGINS": stated}
        monkeypatch.setattr(ModelRegistry, "_classes", {})
        load_plugins(allowed_plugins(environ))
        assert ModelRegistry.get_supported_archs() == [f"{name}ForCausalLM" for name in expected]
    monkeypatch.setattr(ModelRegistry, "_classes", {})
    monkeypatch.setenv("VLLM_PLUGINS", "fourth")
    with LLM(str(write_tiny_model(tmp_path / "falcon", "falcon")), device="cpu", kv_cache_memory_bytes=1 << 24):
        assert ModelRegistry.get_supported_archs() == ["fourthForCausalLM"]
    assert "VLLM_PLUGINS names plug-ins that are not installed: sixth" in caplog.messages
    load_plugins.cache_clear()


def test_llm_serves_a_registered_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = write_tiny_model(tmp_path / "plain"), write_own_model(tmp_path / "model", "second")
    write_package(tmp_path / "packages", "second", is_plug_in=False)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    with pytest.raises(UnsupportedModelError, match="has no model of type 'own_second'"):
        LLM(str(model), device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 24)
    monkeypatch.setattr(ModelRegistry, "_classes", {})
    ModelRegistry.register_model("secondForCausalLM", "own_second:OwnForCausalLM")
    assert ModelRegistry.get_supported_archs() == ["secondForCausalLM"]
    with LLM(str(model), device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([prompt_of(40)], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected_tokens(plain, prompt_of(40), 8)
    ModelRegistry.register_model("secondForCausalLM", "own_second:Missing")
    with pytest.raises(ModelError, match=r"own_second:Missing that is registered for secondForCausalLM cannot be used"):
        LLM(str(model), device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 24)
    with pytest.raises(ValueError, match="give module:Class"):
        ModelRegistry.register_model("secondForCausalLM", "own_second")


def test_a_model_with_code_of_its_own_is_refused_with_the_newer_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for kind, newer in (("chatglm", "glm-4-9b-chat-hf"), ("internlm2", "InternLM 3"), ("minicpm", "MiniCPM3-4B")):
        own = {"model_type": kind, "auto_map": {"AutoConfig": "x.Y"}, "architectures": ["OldForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config | own))
        with pytest.raises(UnsupportedModelError, match=f"use .*{newer}.* instead"):
            LLM(str(folder), device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 24)
