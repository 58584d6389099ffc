"""Models by the names they have on the hub: found where `hf download` puts them."""

from pathlib import Path

import pytest

from baton_serve.services.local.model_cache import find_snapshot, is_hub_name


def downloaded(cache: Path, name: str, commit: str) -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    found = folder / "snapshots" / commit
    found.mkdir(parents=True)
    return found


def test_a_downloaded_model_is_found_wherever_the_cache_is(tmp_path: Path) -> None:
    for variable, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        folder = downloaded(tmp_path / variable / below, "org/small-1.5B", "abc")
        assert find_snapshot("org/small-1.5B", {variable: str(tmp_path / variable)}) == folder
    assert find_snapshot("org/other", {"HF_HOME": str(tmp_path / "HF_HOME")}) is None


@pytest.mark.parametrize("model", ["", "model", "/a/b", "./b", "../b", "a/b/c", "a/b.gguf/", "~/b"])
def test_paths_are_no_names(model: str) -> None:
    assert not is_hub_name(model)


def test_a_folder_that_is_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    assert is_hub_name("models/small")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("models/small")
