"""Encrypts a connection between two processes that share the cluster's key: TLS 1.3, without I/O.

Both ends prove that they have the key. The same certificate is derived from the key in every process; each end presents
it, and accepts no other one. TLS with a pre-shared key would need no certificate, but `ssl` has it from Python 3.13 on.
"""

import os
import ssl

from baton_serve.services.common.cluster_key import ClusterKey, identity_pem
from baton_serve.services.common.rpc.framing import ProtocolError

_MAX_RECORD_BYTES = 16_384
"""Longest plain text of one TLS record."""
_REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "the peer has another key (--cluster-key-file)",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer has another key (--cluster-key-file)",
    "TLSV1_ALERT_DECRYPT_ERROR": "the peer has another key (--cluster-key-file)",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer has no key (--cluster-key-file)",
    "WRONG_VERSION_NUMBER": "the peer does not encrypt its messages (--cluster-key-file)",
}
"""The cause in the words of this project, by OpenSSL's reason."""


class Encryption:
    """The TLS encryption of one connection, without I/O: the caller sends and receives the bytes. `is_ready` is True
    once both ends have proved that they have the cluster's key.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self.is_ready = False
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=is_server)

    def decrypt(self, data: bytes) -> bytes:
        """Decrypt `data`, the bytes that arrived, and return the plain bytes. Raises `ProtocolError` if the peer does
        not have the key. At the beginning call this once with no bytes. Until `is_ready`, send what `pending` returns
        after each call.
        """
        self._received.write(data)
        parts: list[bytes] = []
        try:
            if not self.is_ready:
                self._tls.do_handshake()
                self.is_ready = True
            while self._received.pending:
                parts.append(self._tls.read(_MAX_RECORD_BYTES))
        except ssl.SSLWantReadError:
            pass  # the rest of a record has not arrived
        except ssl.SSLError as exc:
            raise ProtocolError(_REASONS.get(exc.reason, f"TLS failed: {exc.reason}")) from exc
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def encrypt(self, data: bytes) -> bytes:
        """Return the encrypted bytes to send for the plain bytes `data`. Call it only when `is_ready` is True."""
        self._tls.write(data)
        return self._to_send.read()

    def pending(self) -> bytes:
        """Return the bytes of the TLS handshake that the caller must send now; after a `ProtocolError`, those of the
        alert to the peer.
        """
        return self._to_send.read()


def tls_context(key: ClusterKey, *, is_server: bool) -> ssl.SSLContext:
    """Return the TLS context for the server's or the client's end of connections within a cluster. It accepts only
    peers that have the same `key`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate identifies the cluster and not a host.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        # Connections last as long as their processes: none is resumed.
        context.num_tickets = 0
    context.load_verify_locations(cadata=key.certificate)
    # `ssl` reads a private key only from a file. This one is in memory.
    with os.fdopen(os.memfd_create("baton-tls"), "wb") as file:
        file.write(identity_pem(key.tls_seed, key.certificate))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
