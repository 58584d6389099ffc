"""The errors that the engine raises. Every message names the cause and what to do about it.

EngineError
├── ConfigError         a setting is wrong for every model, or two settings contradict each other
├── ModelError          the model's folder is broken, or its weights do not fit its config
│   └── UnsupportedModelError    the architecture cannot run on paged attention
├── CapacityError       the model would run, but its KV cache does not fit into the device's memory
├── AdapterError        a LoRA adapter's folder is broken, or does not fit this model
├── RequestError        one request is wrong; `code` is one of contracts.messages.ErrorCode
└── UsageError          a method was called in a state that does not allow it: a bug of the caller, never retried
"""

from baton_serve.contracts.messages import ErrorCode


class EngineError(Exception):
    """Base class of all errors of the engine."""


class ConfigError(EngineError):
    """Reports a setting or an argument of the caller that is not valid, or settings that contradict each other."""


class ModelError(EngineError):
    """Reports a model folder that is broken, or weights that do not fit its config."""


class UnsupportedModelError(ModelError):
    """Reports an architecture that this engine cannot serve."""


class CapacityError(EngineError):
    """Reports that the device's memory is too small for the KV cache of one request."""


class AdapterError(EngineError):
    """Reports a LoRA adapter that cannot be loaded, because its files are broken, it does not fit the model, or too
    many are loaded."""


class RequestError(EngineError):
    """Reports a request that cannot be served; other requests go on.

    `code` is the kind of error that the router and the client receive.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message


class UsageError(EngineError):
    """Reports a method call in the wrong state. This is a bug of the caller; trying again does not help."""
