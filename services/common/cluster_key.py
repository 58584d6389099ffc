"""The secret of one cluster: it encrypts messages over ZeroMQ, and it authorizes operators.

It is any text of at least 32 characters in a file. One CURVE key pair is derived from it, which all processes of the
cluster use. A client must know the server's public key before it connects, and CURVE never sends that key, so a process
without the file cannot connect.
"""

import hmac
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import zmq
from zmq.utils import z85

from baton_serve.services.common.errors import ConfigurationError

MIN_KEY_CHARS = 32
"""Minimum length of the secret."""


@dataclass(frozen=True, slots=True, repr=False)
class ClusterKey:
    """The keys that are derived from the secret: a CURVE key pair in ZeroMQ's Z85 encoding, and the admin token."""

    secret: bytes
    public: bytes
    admin_token: str
    """Bearer token that `POST /admin/…` of an instance requires from other machines."""

    def is_admin(self, authorization: str) -> bool:
        """Return whether the value of an Authorization header contains the admin token."""
        # `compare_digest` takes the same time for each token, so the time of an answer reveals nothing about the key.
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.admin_token.encode())


def cluster_key(text: str) -> ClusterKey:
    """Derive the keys from the secret text. The same text always gives the same keys."""
    # The two prefixes keep the keys independent: the admin token does not reveal the CURVE key.
    secret = z85.encode(sha256(b"baton-curve-1" + text.encode()).digest())
    token = sha256(b"baton-admin-1" + text.encode()).hexdigest()
    return ClusterKey(secret=secret, public=zmq.curve_public(secret), admin_token=token)


def read_cluster_key(path: str | None) -> ClusterKey | None:
    """Read the secret from a file and return its keys, or None without a path.

    Raises `ConfigurationError` if the file cannot be read, the secret is too short, or ZeroMQ lacks CURVE.
    """
    if not path:
        return None
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"--cluster-key-file {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    if len(text) < MIN_KEY_CHARS:
        raise ConfigurationError(
            f"--cluster-key-file {path} contains {len(text)} characters, but a key needs at least {MIN_KEY_CHARS}: "
            "make one with `openssl rand -hex 32`"
        )
    if not zmq.has("curve"):
        raise ConfigurationError(
            "--cluster-key-file needs CURVE, which this build of ZeroMQ lacks: install pyzmq from its own wheel"
        )
    return cluster_key(text)
