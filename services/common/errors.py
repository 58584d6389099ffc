"""Errors of the processes, split by fault. Engine and kvtransfer have trees of their own.

ServiceError
├── LocalError              this process is at fault: never retried
│   └── ConfigurationError  a flag, variable, key or value that cannot be; one line for a human
└── RemoteError             a peer or the link to it: may be retried
    ├── RegistryUnavailable the registry does not answer; the caller serves on and tries again
    ├── Superseded          a newer generation of this instance has registered
    └── PeerUnreachable     a message could not be handed to its receiver
"""


class ServiceError(Exception):
    """Root of this tree."""


class LocalError(ServiceError):
    """This process is at fault."""


class ConfigurationError(LocalError):
    """The message is one line that names what is wrong and what is allowed."""


class RemoteError(ServiceError):
    """A peer or a link is at fault."""


class RegistryUnavailable(RemoteError):  # noqa: N818 - a state of the world, named as such
    """The registry did not answer in time. The instance keeps serving; its next renewal registers it again."""


class Superseded(RemoteError):  # noqa: N818
    """Another process has registered under this instance's name since. The older one should stop."""


class PeerUnreachable(RemoteError):  # noqa: N818
    """The receiver is gone, or does not read and its queue is full."""
