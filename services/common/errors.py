"""Errors of the services, divided by which side is at fault. The engine and kvtransfer have their own errors.

ServiceError
├── LocalError              this process is at fault; never retried
│   └── ConfigurationError  a wrong flag, variable, key or value; shown to the user as one line
└── RemoteError             a peer or the connection to it is at fault; may be retried
    ├── RegistryUnavailable the registry does not answer; the caller goes on serving and tries again
    ├── Superseded          a newer generation of this instance has registered
    └── PeerUnreachable     a message could not be queued for its receiver
"""


class ServiceError(Exception):
    """The base class of all errors that the code of routers, instances and `baton` commands raises itself."""


class LocalError(ServiceError):
    """This process or its configuration caused the error, so a retry cannot help."""


class ConfigurationError(LocalError):
    """A setting of a process is wrong. The message is one line that names the setting, the fault and
    what is allowed.
    """


class RemoteError(ServiceError):
    """Another process or the connection to it caused the error, so a retry may help."""


class RegistryUnavailable(RemoteError):  # noqa: N818 - it names a state of the cluster
    """The registry of instances did not answer in time. The instance goes on serving; its next renewal registers it
    again.
    """


class Superseded(RemoteError):  # noqa: N818
    """Another process has registered under the same instance id later. The older process, which gets this error, should
    stop.
    """


class PeerUnreachable(RemoteError):  # noqa: N818
    """A message cannot be sent: its receiver is gone, or it does not read and the queue of messages to it is full."""
