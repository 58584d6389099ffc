"""Registers model classes of plug-ins and programs (vLLM: ModelRegistry), which are neither in transformers nor in the
model's folder.

A plug-in is a package with an entry point in the group `baton.general_plugins`. It names a function without parameters,
which every process with an engine calls before it reads a model, so instances and ranks know the same classes.
"""

import json
import logging
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from baton_serve.engine.errors import ModelError

logger = logging.getLogger(__name__)

PLUGINS = "baton.general_plugins"
"""The group of entry points."""


class ModelRegistry:
    """Model classes that plug-ins or users have registered, by the architecture that config.json names, as in vLLM. It
    lives as long as the process.
    """

    _classes: dict[str, "str | type[Any]"] = {}  # noqa: RUF012 - one registry for the process, as vLLM's

    @classmethod
    def register_model(cls, architecture: str, model: "str | type[Any]") -> None:
        """Use the class `model` for models of this architecture. It is given itself, or as "module:Class", which is
        imported when it is needed.

        The class is a transformers model whose attention calls transformers' attention interface, and whose
        `config_class` is its own. Raises `ValueError` for a string of another form.
        """
        if isinstance(model, str) and not all(model.partition(":")[::2]):
            raise ValueError(f"{model!r} does not name a class: give module:Class")
        cls._classes[architecture] = model

    @classmethod
    def get_supported_archs(cls) -> list[str]:
        """Return the architectures for which a class is registered, in alphabetical order."""
        return sorted(cls._classes)

    @classmethod
    def make_known(cls, folder: Path, plugins: tuple[str, ...] | None) -> None:
        """Register the class for the model in a folder with transformers, if this registry has one. Raises `ModelError`
        if the class cannot be used or a plug-in fails.

        `plugins` are the names of the plug-ins that are loaded before; None: all installed ones.
        """
        load_plugins(plugins)
        try:
            architecture = str(json.loads((folder / "config.json").read_text())["architectures"][0])
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
            return  # reading the config reports what is wrong
        if (given := cls._classes.get(architecture)) is None:
            return
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM  # takes seconds

        try:
            module, _, name = given.partition(":") if isinstance(given, str) else ("", "", "")
            model: Any = getattr(import_module(module), name) if isinstance(given, str) else given
            config = model.config_class
        except (AttributeError, ImportError) as exc:
            raise ModelError(f"the class {given} that is registered for {architecture} cannot be used: {exc}") from exc
        kind = config.model_type
        if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] is not config:
            raise ModelError(
                f"the class {given} that is registered for {architecture} has the model_type {kind!r} of another model:"
                " give it a config class with a model_type of its own"
            )
        AutoConfig.register(kind, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


@cache
def load_plugins(allowed: tuple[str, ...] | None = None) -> None:
    """Call the functions of the installed plug-ins (entry points), once in a process. `allowed` are the names of the
    plug-ins to call; None: all.

    Raises `ModelError` if one fails.
    """
    found = entry_points(group=PLUGINS)
    if allowed is not None and (missing := set(allowed) - found.names):
        logger.warning("VLLM_PLUGINS names plug-ins that are not installed: %s", ", ".join(sorted(missing)))
    for entry in found:
        if allowed is not None and entry.name not in allowed:
            logger.info("left out the plug-in %s, which VLLM_PLUGINS does not name", entry.name)
            continue
        try:
            entry.load()()
        # A plug-in may raise anything.
        except Exception as exc:
            raise ModelError(f"the plug-in {entry.name} ({entry.value}) failed: {exc}: repair or uninstall it") from exc
        logger.info("loaded the plug-in %s (%s)", entry.name, entry.value)
