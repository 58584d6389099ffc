"""Certificates that are derived from a seed: the same everywhere, and accepted by OpenSSL."""

import ssl
from pathlib import Path

import pytest
from cryptography import x509

from baton_serve.services.common.cluster_key import identity_pem, self_signed_certificate


def test_a_seed_gives_the_same_certificate_everywhere_and_another_seed_another_one() -> None:
    assert self_signed_certificate(bytes(32)) == self_signed_certificate(bytes(32))
    assert self_signed_certificate(bytes(32)) != self_signed_certificate(b"\1" * 32)


@pytest.mark.parametrize("number", range(8))
def test_openssl_accepts_a_certificate_with_its_own_key_only(number: int, tmp_path: Path) -> None:
    seed, other = bytes((number,)) * 32, bytes((number + 1,)) * 32
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "own.pem").write_bytes(identity_pem(seed, self_signed_certificate(seed)))
    context.load_cert_chain(tmp_path / "own.pem")
    (tmp_path / "wrong.pem").write_bytes(identity_pem(other, self_signed_certificate(seed)))
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        context.load_cert_chain(tmp_path / "wrong.pem")


def test_a_certificate_is_valid_at_any_time() -> None:
    certificate = x509.load_der_x509_certificate(self_signed_certificate(bytes(32)))
    assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (1970, 9999)
