"""The version is the same wherever it is reported."""

import tomllib
from pathlib import Path

from baton_serve.services.common.version import VERSION


def test_the_version_is_the_packaging_s() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
