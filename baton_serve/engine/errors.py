"""What the engine raises. Every message names the cause and the remedy.

EngineError
├── ConfigError         a setting that no model could run with
├── ModelError          the folder is broken, or its weights do not fit its config
│   └── UnsupportedModelError    the architecture cannot run on paged attention
├── CapacityError       the model runs, but its KV cache does not fit this device
├── AdapterError        a folder of a low-rank adapter that cannot be added to this model
├── RequestError        this one request is at fault: `code` is one of contracts.messages.ErrorCode
└── UsageError          a verb was called in a state that does not allow it: our bug, never retried
"""

from baton_serve.contracts.messages import ErrorCode


class EngineError(Exception):
    """Root of all."""


class ConfigError(EngineError):
    pass


class ModelError(EngineError):
    pass


class UnsupportedModelError(ModelError):
    pass


class CapacityError(EngineError):
    pass


class AdapterError(EngineError):
    pass


class RequestError(EngineError):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message


class UsageError(EngineError):
    pass
