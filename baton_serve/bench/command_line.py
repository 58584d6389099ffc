"""The spelling of flags that vLLM's commands accept and argparse does not."""

from collections.abc import Iterable


def with_dashes(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with dashes for the underscores in names of flags: `--num_prompts=5` as `--num-prompts=5`.

    Values keep their underscores.
    """
    return [_with_dashes(argument) if argument.startswith("--") else argument for argument in arguments]


def _with_dashes(argument: str) -> str:
    name, separator, value = argument.partition("=")
    return f"{name.replace('_', '-')}{separator}{value}"
