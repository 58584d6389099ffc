"""An engine that cannot start says why, and what would help."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.engine import (
    CapacityError,
    ConfigError,
    Engine,
    EngineConfig,
    ModelError,
    UnsupportedModelError,
    device,
)
from baton_serve.engine.kv.capacity import DeviceWeights, check_fit, check_host
from baton_serve.engine.loading import loader_choice
from baton_serve.engine.model import attention_adapters
from tests.engine.driving import make_engine, make_work, run
from tests.families import MAX_POSITIONS, REFUSED, SLIDING_WINDOW
from tests.tiny_models import write_tiny_model
from tools import models_page

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        make_engine(tmp_path / "nothing")


def test_a_folder_without_a_config_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        make_engine(tmp_path)


def test_a_broken_config_is_reported(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        make_engine(folder)


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("size", [0, -1, 1.5, 10**30])
def test_a_size_that_no_model_has_is_named(folder: Path, name: str, size: float) -> None:
    edit_config(folder, **{name: size})
    with pytest.raises(ModelError, match=rf"config\.json: {name} is "):
        make_engine(folder)


def test_a_config_that_is_nested_too_deep_is_reported(folder: Path) -> None:
    (folder / "config.json").write_text(100_000 * "[" + 100_000 * "]")
    with pytest.raises(ModelError, match="not valid JSON"):
        make_engine(folder)


def test_an_unknown_architecture_is_reported(folder: Path) -> None:
    edit_config(folder, model_type="nonesuch", architectures=["NonesuchForCausalLM"])
    with pytest.raises(ModelError, match="nonesuch"):
        make_engine(folder)


def test_a_folder_without_weights_is_reported(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="load-format dummy"):
        make_engine(folder)


def test_truncated_weights_are_reported(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"cannot be loaded.*download it again"):
        make_engine(folder)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        make_engine(folder)


def test_missing_weights_are_reported(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(ModelError, match="lacks"):
        make_engine(folder)


def test_weights_of_another_shape_are_reported(folder: Path) -> None:
    edit_config(folder, intermediate_size=128)
    with pytest.raises(ModelError):
        make_engine(folder)


def test_weights_that_are_not_numbers_are_reported(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="NaN logits"):
        make_engine(folder)


def test_the_largest_length_that_fits_is_named(folder: Path) -> None:
    with pytest.raises(CapacityError, match="largest max_model_len that fits is 160"):
        make_engine(folder, num_gpu_blocks_override=10)
    make_engine(folder, num_gpu_blocks_override=10, max_model_len=160).close()


def test_the_formats_and_the_number_of_devices_that_fit_are_named() -> None:
    layout = KVLayout(
        fingerprint="f", num_layers=32, num_kv_heads=8, block_tokens=64, head_dim=128, dtype="bfloat16"
    )  # 8 MiB a block
    weights = DeviceWeights(14 << 30)
    # 16 GiB of cache are needed and 9 available: half of it fits, and so do 14 + 16 GiB on two devices of 14 + 9.
    words = (
        r"is 73728: .*; or set kv_cache_dtype fp8; or set quantization fp8; or divide the model over 2 such devices"
        r" \(pipeline_parallel_size\); or set cpu_offload_gb 7, which is slower"
    )
    with pytest.raises(CapacityError, match=words):
        check_fit(layout, 9 * 128, 131_072, weights)
    with pytest.raises(CapacityError) as refused:
        check_fit(layout, 128, 131_072, DeviceWeights(1 << 30))
    assert "dtype fp8" not in str(refused.value) and "quantization" not in str(refused.value)
    assert "divide the model over 9 such devices" in str(refused.value)
    # The weights of a model on CPUs take nothing from its cache.
    with pytest.raises(CapacityError) as on_host:
        check_fit(layout, 128, 131_072)
    assert "divide" not in str(on_host.value)


def test_a_cache_that_the_machine_has_no_memory_for_is_refused(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"1048576\.00 GiB is more than the memory of this machine"):
        make_engine(folder, kv_cache_bytes=1 << 50)
    with pytest.raises(CapacityError, match=r"0\.00 MiB are available\. Give the KV cache more memory"):
        make_engine(folder, kv_cache_bytes=10)


def test_a_cache_that_needs_more_than_is_free_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_host(3 << 30, free_bytes=4 << 30, total_bytes=8 << 30)
    assert not caplog.text
    check_host(5 << 30, free_bytes=4 << 30, total_bytes=8 << 30)
    assert "may grow to 5.00 GiB, but only 4.00 GiB of memory are free" in caplog.text


def test_what_fits_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_engine(folder, num_gpu_blocks_override=64).close()
    assert "64 blocks of 16 tokens = 1024 tokens" in caplog.text
    assert "2.0 requests at once" in caplog.text


def test_a_length_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings = 512"):
        make_engine(folder, max_model_len=1024)


def test_a_length_beyond_the_model_can_be_allowed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_engine(folder, max_model_len=1024, allow_long_max_model_len=True) as engine:
        assert engine.max_model_len == 1024
    assert "max_position_embeddings = 512); answers to longer prompts may be wrong" in caplog.text


def test_learned_positions_allow_no_length_beyond_the_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m", "gpt2")
    with pytest.raises(ConfigError, match="positions are learned"):
        make_engine(model, max_model_len=1024, allow_long_max_model_len=True)


def test_without_its_sliding_window_a_model_is_as_long_as_the_window(folder: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m", "mistral")
    with make_engine(model, disable_sliding_window=True) as engine:
        assert engine.max_model_len == SLIDING_WINDOW
    with pytest.raises(ConfigError, match=f"the window of the model \\(sliding_window = {SLIDING_WINDOW}\\)"):
        make_engine(model, max_model_len=64, disable_sliding_window=True, allow_long_max_model_len=True)
    with make_engine(folder, disable_sliding_window=True) as engine:
        assert engine.max_model_len == MAX_POSITIONS


def test_a_missing_device_is_reported(folder: Path) -> None:
    with pytest.raises(ConfigError, match="torch sees"):
        make_engine(folder, device="xpu")


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64}),
        (
            "zamba",
            {
                "hidden_size": 32,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "n_mamba_heads": 2,
                "layers_block_type": ["mamba", "hybrid"] * 2,
                "vocab_size": 64,
            },
        ),
        ("qwen4_exp_text", {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64}),
    ],
)
def test_an_architecture_that_cannot_be_served_is_named(
    tmp_path: Path, model_type: str, settings: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(model_type, **settings)
    config.architectures = [f"{model_type}-architecture"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{model_type}-architecture"):
        make_engine(tmp_path, load_format="dummy", max_model_len=64)


@pytest.mark.parametrize("model_type", REFUSED)
def test_the_error_for_a_model_with_its_own_code_names_the_flag_that_runs_it(folder: Path, model_type: str) -> None:
    edit_config(folder, model_type=model_type, architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.Own"})
    with pytest.raises(UnsupportedModelError, match=f"OwnForCausalLM.*'{model_type}'.*--trust-remote-code"):
        make_engine(folder)


def test_the_page_of_models_is_current() -> None:
    assert models_page.PAGE.read_text() == models_page.build(), "run tools/models_page.py"


def test_dummy_weights_are_the_same_for_the_same_seed(folder: Path) -> None:
    found = []
    for seed in (1, 1, 2):
        with make_engine(folder, load_format="dummy", seed=seed) as engine:
            engine.add(make_work(engine, "a", list(range(20)), ignore_eos=True))
            found.append((engine.layout.fingerprint, run(engine)["a", 0]))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]


def test_a_fingerprint_distinguishes_weights_and_survives_a_copy(tmp_path: Path) -> None:
    def fingerprint(name: str, seed: int) -> str:
        with make_engine(write_tiny_model(tmp_path / name, seed=seed)) as engine:
            return engine.layout.fingerprint

    assert fingerprint("a", 0) == fingerprint("b", 0)
    assert fingerprint("c", 1) != fingerprint("a2", 0)


def test_progress_is_reported(folder: Path) -> None:
    from baton_serve.engine import EngineConfig

    reported: list[str] = []
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_bytes=4 << 20)
    Engine(config, progress=lambda what, fraction: reported.append(what)).close()
    assert reported[0] == "loading weights"
    assert reported[-1] == "ready"


def test_bfloat16_runs(folder: Path) -> None:
    with make_engine(folder, dtype="bfloat16") as engine:
        assert engine.layout.dtype == "bfloat16"
        assert engine.kv.tensor.dtype == torch.bfloat16
        engine.add(make_work(engine, "a", list(range(40)), ignore_eos=True))
        assert len(run(engine)["a", 0]) == 12


def test_longrope_is_chosen_once_from_the_longest_length(tmp_path: Path) -> None:
    """Not per batch: a short request beside a long one must not see its frequencies."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    folder = write_tiny_model(
        tmp_path / "phi",
        "phi3",
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
        original_max_position_embeddings=64,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [i * 7 % 256 for i in range(70)]
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 70), max_new_tokens=6, do_sample=False
    )
    with make_engine(folder) as engine:
        engine.add(make_work(engine, "long", prompt, max_tokens=6))
        engine.add(make_work(engine, "short", prompt[:10], max_tokens=6))
        together = run(engine)
        assert together["long", 0] == expected[0, 70:].tolist()
        long_fingerprint = engine.layout.fingerprint
        engine.add(make_work(engine, "alone", prompt[:10], max_tokens=6))
        assert run(engine)["alone", 0] == together["short", 0]
    with make_engine(folder, max_model_len=64) as engine:
        assert engine.layout.fingerprint != long_fingerprint


def test_a_window_that_only_the_mask_of_a_model_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers to longer prompts would differ from transformers' without an error."""
    folder = write_tiny_model(tmp_path, "phimoe", sliding_window=24)
    monkeypatch.delitem(attention_adapters._ADAPTERS, "PhimoeAttention")
    with pytest.raises(UnsupportedModelError, match=r"PhimoeForCausalLM .* sliding window of 24 tokens"):
        make_engine(folder)


def test_weights_that_do_not_fit_name_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "llama", "llama")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(loader_choice, "_load", fail)
    monkeypatch.setattr(loader_choice, "_file_bytes", lambda config: 64 << 30)
    monkeypatch.setattr(device, "memory", lambda _: device.MemoryInfo(0, 24 << 30))
    with pytest.raises(CapacityError, match=r"64\.0 GiB.* sym_int4; or divide .* 4 such devices.* cpu_offload_gb 45"):
        loader_choice.load(EngineConfig(model=str(folder)), torch.device("cpu"), lambda what, fraction: None)
