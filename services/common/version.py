"""Baton's version. A test keeps it equal to the packaging's."""

VERSION = "0.1.0"
