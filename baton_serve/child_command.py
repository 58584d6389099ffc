"""Builds the command lines with which Baton starts its own modules as child processes."""

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` with this interpreter and the packages that it is installed with.

    `-P` keeps the working directory out of the child's `sys.path`. Without it, a folder of the user that holds a module
    named like one of the child's imports would be loaded instead.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
