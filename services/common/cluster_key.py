"""Derives from the cluster's secret (`--cluster-key-file`) the keys of connections, and decides who is an operator.

It is any text of at least 32 characters in a file. All processes of the cluster derive the same keys from it: one for
TLS (`services.common.rpc`), and a CURVE key pair for ZeroMQ. A process without the file cannot connect by either: TLS
requires at both ends a certificate that belongs to the key, and CURVE requires of a client that it knows the server's
public key, which is never sent.
"""

import hmac
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import zmq
from zmq.utils import z85

from baton_serve.services.common.errors import ConfigurationError

MIN_KEY_CHARS = 32
"""Minimum length of the secret."""
_VALID_FROM, _VALID_UNTIL = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""The certificate is valid at any time: peers compare it with their own and accept no other one."""


@dataclass(frozen=True, slots=True, repr=False)
class ClusterKey:
    """The keys that are derived from the one secret of a cluster: for the encryption of ZeroMQ and of TLS connections,
    and the token with which operators authenticate.
    """

    secret: bytes
    """CURVE secret key in ZeroMQ's Z85 encoding; `public` is the key that belongs to it."""
    public: bytes
    tls_seed: bytes
    """Seed of the private key for TLS; `certificate` belongs to it, in DER."""
    certificate: bytes
    admin_token: str
    """Bearer token that `POST /admin/…` of an instance requires from other machines."""

    def is_admin(self, authorization: str) -> bool:
        """Return whether `authorization`, the value of an HTTP Authorization header, contains the operators' token
        (`Bearer TOKEN`).
        """
        # `compare_digest` takes the same time for each token, so the time of an answer reveals nothing about the key.
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.admin_token.encode())


def cluster_key(text: str) -> ClusterKey:
    """Derive all keys of a cluster from `text`, its secret. The same text always gives the same keys."""
    # The prefixes keep the keys independent: the admin token does not reveal the other ones.
    secret = z85.encode(sha256(b"baton-curve-1" + text.encode()).digest())
    seed = sha256(b"baton-tls-1" + text.encode()).digest()
    return ClusterKey(
        secret=secret,
        public=zmq.curve_public(secret),
        tls_seed=seed,
        certificate=self_signed_certificate(seed),
        admin_token=sha256(b"baton-admin-1" + text.encode()).hexdigest(),
    )


def self_signed_certificate(seed: bytes) -> bytes:
    """Return a self-signed X.509 certificate (DER) for the Ed25519 key that `seed`, 32 bytes, determines. The same seed
    always gives the same certificate.
    """
    # `cryptography` is imported here, because processes without a cluster key do not need it.
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, _VALID_FROM, _VALID_UNTIL)
    return builder.sign(key, algorithm=None).public_bytes(Encoding.DER)


def identity_pem(seed: bytes, certificate: bytes) -> bytes:
    """Return the Ed25519 private key that `seed` determines and its `certificate` (DER) as PEM text, the form that
    `ssl` reads.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.from_private_bytes(seed)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + x509.load_der_x509_certificate(certificate).public_bytes(Encoding.PEM)


def read_cluster_key(path: str | None) -> ClusterKey | None:
    """Read the cluster's secret from the file `path` and return the keys that are derived from it. Return None if
    `path` is None or empty.

    Raises `ConfigurationError` if the file cannot be read, the secret is too short, or encryption is not possible here.
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
    try:
        os.close(os.memfd_create("baton-check"))
    except OSError as exc:
        raise ConfigurationError(
            "--cluster-key-file needs memfd_create, by which TLS reads a key that must not be on a disk "
            f"({exc.strerror}): allow it in the container's seccomp profile"
        ) from exc
    return cluster_key(text)
