"""Models by the names they have on the hub: found in the cache, or downloaded from a hub on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_serve.bench.ports import free_port
from baton_serve.model_hub import HubError, choose_files, find_model, is_hub_name, obtain_model
from baton_serve.services.local.settings import DEMO_MODEL
from tests.unit.local.fake_hub import FakeHub
from tests.unit.local.hub_cache import downloaded

NAME = "org/small-1.5B"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files = {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir() if path.is_file()}
    with FakeHub(NAME, files | {"pytorch_model.bin": b"not wanted", "onnx/model.onnx": b"not wanted"}) as hub:
        yield hub


def environ(hub: FakeHub, cache: Path, **more: str) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.url, **more}


def test_a_downloaded_model_is_found_wherever_the_cache_is(tmp_path: Path) -> None:
    for variable, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        folder = downloaded(tmp_path / variable / below, NAME, "abc")
        assert find_model(NAME, {variable: str(tmp_path / variable)}) == folder
    assert find_model("org/other", {"HF_HOME": str(tmp_path / "HF_HOME")}) is None


def test_a_snapshot_without_all_its_shards_is_not_taken_for_a_model(tmp_path: Path) -> None:
    folder = downloaded(tmp_path, NAME, "abc")
    index = '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    assert find_model(NAME, {"HF_HUB_CACHE": str(tmp_path)}) is None
    (folder / "model-2.safetensors").write_text("")
    assert find_model(NAME, {"HF_HUB_CACHE": str(tmp_path)}) == folder


@pytest.mark.parametrize("model", ["", "model", "/a/b", "./b", "../b", "a/b/c", "a/b.gguf/", "~/b", "a/b:"])
def test_paths_are_no_names(model: str) -> None:
    assert not is_hub_name(model)


def test_a_folder_that_is_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    assert is_hub_name("models/small")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("models/small")


def test_a_missing_model_is_downloaded_once_and_without_files_that_serving_does_not_need(
    hub: FakeHub, tmp_path: Path
) -> None:
    folder = obtain_model(NAME, environ(hub, tmp_path))
    assert (folder / "model.safetensors").read_bytes() == (DEMO_MODEL / "model.safetensors").read_bytes()
    assert "pytorch_model.bin" not in hub.fetched and "onnx/model.onnx" not in hub.fetched
    before = hub.fetched.total()
    assert obtain_model(NAME, environ(hub, tmp_path), offline=True) == folder
    assert hub.fetched.total() == before


def test_a_broken_download_is_resumed(hub: FakeHub, tmp_path: Path) -> None:
    # huggingface_hub writes 10 MiB at a time, so the cut comes after the first such piece.
    hub.cut_after["model.safetensors"] = 12_000_000
    folder = obtain_model(NAME, environ(hub, tmp_path))
    assert (folder / "model.safetensors").read_bytes() == (DEMO_MODEL / "model.safetensors").read_bytes()
    assert hub.fetched["model.safetensors"] == 2
    assert [given != "bytes=0-" for given in hub.ranges] == [True], "the second request asks for the rest only"


def test_a_gated_model_needs_a_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    with pytest.raises(HubError, match=r"answered 401, so it is gated.*accept its conditions.*set HF_TOKEN") as refused:
        obtain_model(NAME, environ(hub, tmp_path, HF_TOKEN="hf_other"))
    assert "hf_other" not in str(refused.value)
    assert obtain_model(NAME, environ(hub, tmp_path, HF_TOKEN="hf_secret")).is_dir()


def test_a_name_that_the_hub_does_not_know_is_reported(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"org/other does not exist at .*: check the name"):
        obtain_model("org/other", environ(hub, tmp_path))


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    where = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    with pytest.raises(HubError, match=r"cannot be downloaded from http://127.*check the network.*give a folder"):
        obtain_model(NAME, where)


@pytest.mark.parametrize(("offline", "variables"), [(True, {}), (False, {"HF_HUB_OFFLINE": "1"})])
def test_offline_no_request_is_made(hub: FakeHub, tmp_path: Path, offline: bool, variables: dict[str, str]) -> None:
    with pytest.raises(HubError, match=r"downloads are off .*run `baton pull org/small-1.5B`"):
        obtain_model(NAME, environ(hub, tmp_path, **variables), offline=offline)
    assert not hub.fetched


def test_one_format_of_the_weights_is_chosen() -> None:
    small = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "1_Pooling/config.json"]
    others = [
        "README.md",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "original/params.json",
        "x.Q4_K_M.gguf",
        "x.Q8_0.gguf",
    ]
    both = ["consolidated.safetensors", "model-1.safetensors", "model-2.safetensors"]
    assert choose_files("a/b", [*small, *others, *both]) == [*small, "model-1.safetensors", "model-2.safetensors"]
    assert choose_files("a/b", [*small, *others, *both], weights=False) == small
    assert choose_files("a/b:q4_k_m", [*small, *others, *both]) == ["x.Q4_K_M.gguf"]
    assert choose_files("a/b", ["config.json", "x.Q8_0.gguf"], weights=False) == ["x.Q8_0.gguf"]
    with pytest.raises(HubError, match=r"give a/b:KIND.*x\.Q4_K_M\.gguf, x\.Q8_0\.gguf"):
        choose_files("a/b", others)
    with pytest.raises(HubError, match="convert the weights"):
        choose_files("a/b", ["config.json", "model.onnx"])
    parts = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    assert choose_files("a/b", ["config.json", *parts, "training_args.bin"]) == ["config.json", *parts]


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("Q4_K_M", "Qwen3-8B-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "Qwen3-8B-UD-Q4_K_M.gguf"),
        ("Q5_K_XL", "Qwen3-8B-UD-Q5_K_XL.gguf"),
        ("f16", "deep/qwen_F16.gguf"),
        ("Q4_0", "Qwen3-8B.Q4_0.gguf"),
    ],
)
def test_a_kind_means_one_file_of_those_that_repositories_have(kind: str, file: str) -> None:
    files = [
        "Qwen3-8B-Q4_K_M.gguf",
        "Qwen3-8B-IQ4_K_M.gguf",
        "Qwen3-8B-UD-Q4_K_M.gguf",
        "Qwen3-8B-UD-Q5_K_XL.gguf",
        "Qwen3-8B.Q4_0.gguf",
        "Qwen3-8B.Q4_0_4_4.gguf",
        "deep/qwen_F16.gguf",
        "mmproj-F16.gguf",
        "imatrix_unsloth.gguf",
    ]
    assert choose_files(f"a/b:{kind}", files) == [file]


def test_a_split_gguf_file_is_one_file_and_an_unknown_kind_is_an_error() -> None:
    parts = [f"Q8_0/x-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert choose_files("a/b:Q8_0", [*parts, "x-Q4_0.gguf"]) == parts
    with pytest.raises(HubError, match="does not name one GGUF file"):
        choose_files("a/b", [*parts, "x-Q4_0.gguf"])
    with pytest.raises(HubError, match=r"a/b:Q3_K does not name one GGUF file.*files: x-Q8_0\.gguf"):
        choose_files("a/b:Q3_K", ["x-Q8_0.gguf"])


def test_without_weights_only_small_files_are_downloaded_and_the_weights_later(hub: FakeHub, tmp_path: Path) -> None:
    folder = obtain_model(NAME, environ(hub, tmp_path), weights=False)
    assert (folder / "tokenizer.json").is_file() and "model.safetensors" not in hub.fetched
    assert find_model(NAME, environ(hub, tmp_path)) is None
    assert obtain_model(NAME, environ(hub, tmp_path)) == folder
    assert hub.fetched["model.safetensors"] == 1 and hub.fetched["tokenizer.json"] == 1


def test_a_gguf_file_is_found_by_its_kind(tmp_path: Path) -> None:
    folder = downloaded(tmp_path, NAME, "abc")
    (folder / "x-Q4_K_M.gguf").write_text("")
    (folder / "x-Q8_0.gguf").write_text("")
    where = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_model(f"{NAME}:q8_0", where) == folder / "x-Q8_0.gguf"
    assert find_model(f"{NAME}:Q4", where) is None
    assert find_model(NAME, where) == folder
