"""docs/reference/files.md has the first sentence of every file of the product."""

from pathlib import Path

import pytest

from tools import files_page
from tools.files_page import build, first_sentence, leading_comment, page_files, settings_in


def test_the_page_is_what_the_files_say() -> None:
    assert files_page.PAGE.read_text() == build(page_files()), "run python -m tools.files_page"


def test_folders_are_nested_and_benchmarks_stand_last() -> None:
    headings = [line.split(maxsplit=1) for line in build(page_files()).splitlines() if line.startswith("##")]
    assert [len(marks) for marks, _ in headings] == [min(folder.count("/") + 2, 6) for _, folder in headings]
    folders = [folder for _, folder in headings]
    is_bench = [folder.startswith(files_page.LAST) for folder in folders]
    assert is_bench == sorted(is_bench)
    assert {"services/router/text/tool_calls", "kvtransfer", "helm/templates"} <= set(folders)


def test_a_file_without_a_sentence_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text('"""Processes."""\n')
    (tmp_path / "services" / "new.py").write_text("VALUE = 1\n")
    monkeypatch.setattr(files_page, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"services/new\.py does not begin with a sentence"):
        build([Path("services/__init__.py"), Path("services/new.py")])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Reads a file.\n\nIt has\nlines.", "Reads a file."),
        ("Reads vllm 0.10, i.e. a\nnumber. Then stops.", "Reads vllm 0.10, i.e. a number."),
        ("Sends `a`. `b` waits.", "Sends `a`."),
        ("Has no full stop\n\nHere.", "Has no full stop"),
    ],
    ids=["paragraph", "abbreviation", "code name", "heading"],
)
def test_a_sentence_ends_before_a_capital_letter_or_a_code_name(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@pytest.mark.parametrize(
    ("source", "comment"),
    [
        ("// Adds.\n// Twice.\n#include <x>\n", "Adds.\nTwice.\n"),
        ("{{- /* The pods\nof a pool. */}}\n{{- if x }}", "The pods\nof a pool."),
        ("#!/bin/sh\n# Runs it.\nset -e\n", "Runs it.\n"),
        ("<!doctype html>\n<!-- The page. -->\n<html>", "The page."),
        ("#include <x>\n", None),
        ("kind: Pod\n", None),
    ],
    ids=["c++", "template", "shell", "page", "c++ without", "template without"],
)
def test_the_comment_at_the_top_of_a_source_is_read(source: str, comment: str | None) -> None:
    assert leading_comment(source) == comment


def test_settings_are_fields_with_defaults() -> None:
    fields = ("KEPT: ClassVar = 1", "name: str", "size: int = 1", "wait_s: Annotated[float, Meta()] = 2.0")
    source = "LINES: int = 3\nclass Limits(Struct):\n" + "".join(f"    {field}\n" for field in fields)
    assert settings_in(source) == ["size", "wait_s"]
