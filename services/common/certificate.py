"""Derives an Ed25519 key pair (RFC 8032) and its certificate from a seed, because the standard library cannot make one.

This runs once at start and does no more than that: OpenSSL does all cryptography of connections. It refuses a
certificate that does not belong to the private key, so an error here cannot weaken a connection.
"""

import base64
from hashlib import sha512

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_BASE = (
    15112221349535400772501151409588531511454012693041857206046113283949847762202,
    46316835694926478169428394003475163141307993866256225615783033603165251855960,
)


Point = tuple[int, int, int, int]
"""Extended coordinates X, Y, Z, T of a point: x = X / Z, y = Y / Z, x y = T / Z. They avoid a division per addition."""


def _add(first: Point, second: Point) -> Point:
    (x1, y1, z1, t1), (x2, y2, z2, t2) = first, second
    a, b = (y1 - x1) * (y2 - x2), (y1 + x1) * (y2 + x2)
    c, d = 2 * t1 * t2 * _D, 2 * z1 * z2
    e, f, g, h = (b - a) % _P, (d - c) % _P, (d + c) % _P, (b + a) % _P
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _multiply(scalar: int) -> bytes:
    """Return the encoding of `scalar` times the base point."""
    total, power = (0, 1, 1, 0), (*_BASE, 1, _BASE[0] * _BASE[1] % _P)
    while scalar:
        if scalar & 1:
            total = _add(total, power)
        power, scalar = _add(power, power), scalar >> 1
    x, y, z, _ = total
    inverse = pow(z, -1, _P)
    return (y * inverse % _P | (x * inverse % _P & 1) << 255).to_bytes(32, "little")


def _number(*parts: bytes) -> int:
    return int.from_bytes(sha512(b"".join(parts)).digest(), "little")


class SigningKey:
    """An Ed25519 key pair. `seed` is its secret of 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        digest = sha512(seed).digest()
        self._scalar = int.from_bytes(digest[:32], "little") & (1 << 254) - 8 | 1 << 254
        self._prefix = digest[32:]
        self.public = _multiply(self._scalar)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""
        nonce = _number(self._prefix, message) % _ORDER
        commitment = _multiply(nonce)
        answer = (nonce + _number(commitment, self.public, message) * self._scalar) % _ORDER
        return commitment + answer.to_bytes(32, "little")


_PRIVATE_KEY_HEADER = bytes.fromhex("302e020100300506032b657004220420")
"""PKCS #8 of an Ed25519 key, before its seed (RFC 8410)."""


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return bytes((tag, len(body)) if len(body) < 128 else (tag, 0x81, len(body))) + body


def self_signed_certificate(seed: bytes) -> bytes:
    """Return a self-signed X.509 certificate without an end, in DER. It depends on the seed alone."""
    algorithm = _der(0x30, bytes.fromhex("06032b6570"))
    name = _der(0x30, _der(0x31, _der(0x30, bytes.fromhex("0603550403"), _der(0x0C, b"baton"))))
    validity = _der(0x30, _der(0x17, b"700101000000Z"), _der(0x18, b"99991231235959Z"))
    key = SigningKey(seed)
    subject_key = _der(0x30, algorithm, _der(0x03, b"\0", key.public))
    content = _der(0x30, _der(0x02, b"\1"), algorithm, name, validity, name, subject_key)
    return _der(0x30, content, algorithm, _der(0x03, b"\0", key.sign(content)))


def identity_pem(seed: bytes, certificate: bytes) -> str:
    """Return the private key of a seed and its certificate as the text that `ssl` reads."""
    return _pem("PRIVATE KEY", _PRIVATE_KEY_HEADER + seed) + _pem("CERTIFICATE", certificate)


def _pem(label: str, data: bytes) -> str:
    return f"-----BEGIN {label}-----\n{base64.encodebytes(data).decode()}-----END {label}-----\n"
