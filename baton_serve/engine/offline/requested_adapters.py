"""Loads the LoRA adapters of offline requests (`LoRARequest`) at first use, and drops the least recently used one for
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.engine.errors import ConfigError
from baton_serve.engine.model.lora.loaded_adapters import LoadedAdapters


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Names the LoRA adapter that a prompt uses, as in vLLM. `lora_path` is a folder as PEFT writes it.

    `lora_int_id` and `lora_name` must each stand for the same adapter in all requests.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        """Check the fields. Raises `ConfigError` if one is not valid."""
        if self.lora_int_id < 1:
            raise ConfigError(f"LoRARequest: lora_int_id is {self.lora_int_id}; it must be at least 1")
        if not (self.lora_name and self.lora_path):
            raise ConfigError("LoRARequest: lora_name and lora_path must not be empty")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or a list with one for each. None: the model without adapter."""


class RequestedAdapters:
    """Loads LoRA adapters when a prompt first uses them. At most `most` stay loaded; the least recently used one is
    unloaded for another."""

    def __init__(self, adapters: LoadedAdapters, *, most: int) -> None:
        self._adapters = adapters
        self._most = most
        self._loaded: list[LoRARequest] = []
        """Loaded adapters, the least recently used first."""
        self._fingerprints: dict[LoRARequest, str] = {}

    def fingerprints(self, asked: Sequence[LoRARequest | None]) -> list[str]:
        """Load the adapters of one call that are not loaded, and return the fingerprint of each, in order; "" for None.

        Raises `ConfigError` if the call needs too many adapters or a name stands for two, and `AdapterError` if one
        cannot be loaded.
        """
        if (count := len({one for one in asked if one is not None})) > self._most:
            raise ConfigError(
                f"lora_request: one call uses {count} adapters, but max_cpu_loras leaves room for {self._most}"
            )
        for one in asked:
            if one in self._loaded:  # an adapter that this call needs must not be unloaded for another of the same call
                self._loaded.remove(one)
                self._loaded.append(one)
        return ["" if one is None else self._fingerprint(one) for one in asked]

    def _fingerprint(self, asked: LoRARequest) -> str:
        """Load this adapter if it is not loaded, and return its fingerprint."""
        if asked in self._loaded:
            return self._fingerprints[asked]
        # Unloaded adapters count too: under the same name, cached KV of another adapter would be found.
        for other in self._fingerprints:
            if asked != other and (asked.lora_int_id == other.lora_int_id or asked.lora_name == other.lora_name):
                raise ConfigError(f"lora_request: {asked} has the lora_int_id or lora_name of another adapter, {other}")
        # The other requests of this call were moved to the end above, so they are not unloaded here.
        if len(self._loaded) >= self._most:
            self._adapters.unload(self._loaded.pop(0).lora_name)
        self._adapters.load(asked.lora_name, asked.lora_path)
        self._loaded.append(asked)
        (found,) = (one.fingerprint for one in self._adapters.records() if one.name == asked.lora_name)
        self._fingerprints[asked] = found
        return found
