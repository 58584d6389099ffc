"""The entry point of `baton-bench`."""

import sys

import pytest

from baton_serve.bench.cli import main


def test_a_missing_model_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["baton-bench", "engine", "--model", "/no/such/folder"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit, match=r"^baton-bench engine: /no/such/folder is not a folder"):
        main()
