"""The secret that the processes of one cluster share: encrypts what they say over ZeroMQ and proves an operator.

Any text of 32 characters or more in a file. Of it a CURVE key pair is derived which is everybody's: who connects must
know the public half beforehand, and CURVE never sends it, so who lacks the file cannot shake hands.
"""

import hmac
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import zmq
from zmq.utils import z85

from baton_serve.services.common.errors import ConfigurationError

MIN_KEY_CHARS = 32


@dataclass(frozen=True, slots=True, repr=False)
class ClusterKey:
    """`secret` and `public` are in ZeroMQ's Z85 text."""

    secret: bytes
    public: bytes
    admin_token: str
    """What `POST /admin/…` of an instance wants as a Bearer token from another machine."""

    def is_admin(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.admin_token.encode())


def cluster_key(text: str) -> ClusterKey:
    """The same for all who have the same text."""
    secret = z85.encode(sha256(b"baton-curve-1" + text.encode()).digest())
    token = sha256(b"baton-admin-1" + text.encode()).hexdigest()
    return ClusterKey(secret=secret, public=zmq.curve_public(secret), admin_token=token)


def read_cluster_key(path: str | None) -> ClusterKey | None:
    """None without a path. Raises `ConfigurationError`."""
    if not path:
        return None
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"--cluster-key-file {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    if len(text) < MIN_KEY_CHARS:
        raise ConfigurationError(
            f"--cluster-key-file {path} holds {len(text)} characters, at least {MIN_KEY_CHARS} are wanted: "
            "make one with `openssl rand -hex 32`"
        )
    if not zmq.has("curve"):
        raise ConfigurationError("--cluster-key-file: this ZeroMQ was built without CURVE (install pyzmq's own wheel)")
    return cluster_key(text)
