"""Prompts become the ids that transformers gives them; folders that cannot be used are explained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton_serve.services.router.protocol.errors import ModelFolderError
from baton_serve.services.router.text.tokenization import TextTokenizer
from tests.unit.router.tokenizers_for_tests import byte_fallback, byte_level, write_folder

TEXTS = ["", "hello world", "<|im_start|>hello</s>", " wörld €😀 ", "a\nb"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": True, "bos_token": None},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False}, "pad_token": "<pad>"},
    ],
    ids=str,
)
def test_ids_are_those_of_transformers(tmp_path: Path, make: Callable[[], Tokenizer], config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, make(), **config)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = TextTokenizer.from_folder(folder)
    for text in TEXTS:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
    ids = theirs.encode(TEXTS[2])
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    added = {"263": {"content": "<extra>", "special": True}}
    tokenizer = TextTokenizer.from_folder(write_folder(tmp_path, added_tokens_decoder=added, pad_token="<pad>"))
    for token in ("<extra>", "<pad>"):
        (token_id,) = tokenizer.encode(token, add_special_tokens=False)
        assert token_id in tokenizer.special_ids


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    ours = TextTokenizer.from_folder(write_folder(tmp_path, tokenizer))
    assert len(ours.encode("abcdef", add_special_tokens=False)) == 6


@pytest.mark.parametrize("file", ["tokenizer.model", "tekken.json", "qwen.tiktoken"])
def test_a_folder_with_another_kind_of_tokenizer_is_explained(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ModelFolderError, match=file) as raised:
        TextTokenizer.from_folder(tmp_path)
    assert "save_pretrained" in str(raised.value)


def test_folders_without_a_tokenizer_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        TextTokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelFolderError, match=r"no tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="cannot be read"):
        TextTokenizer.from_folder(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": 5}))
    with pytest.raises(ModelFolderError, match="tokenizer_config"):
        TextTokenizer.from_folder(tmp_path)
