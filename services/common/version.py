"""The version of Baton. A test keeps it equal to the version in pyproject.toml."""

VERSION = "0.1.0"
