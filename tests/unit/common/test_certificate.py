"""Keys and certificates that are derived from a seed, compared with RFC 8032 and accepted by OpenSSL."""

import ssl
from pathlib import Path

import pytest

from baton_serve.services.common.certificate import SigningKey, identity_pem, self_signed_certificate

# RFC 8032, section 7.1, tests 1 to 3: seed, public key, message, signature.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("seed", "public", "message", "signature"), VECTORS)
def test_keys_and_signatures_equal_those_of_the_rfc(seed: str, public: str, message: str, signature: str) -> None:
    key = SigningKey(bytes.fromhex(seed))
    assert key.public.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature


def test_a_seed_gives_the_same_certificate_everywhere_and_another_seed_another_one() -> None:
    assert self_signed_certificate(bytes(32)) == self_signed_certificate(bytes(32))
    assert self_signed_certificate(bytes(32)) != self_signed_certificate(b"\1" * 32)


@pytest.mark.parametrize("number", range(8))
def test_openssl_accepts_a_certificate_with_its_own_key_only(number: int, tmp_path: Path) -> None:
    seed, other = bytes((number,)) * 32, bytes((number + 1,)) * 32
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "own.pem").write_text(identity_pem(seed, self_signed_certificate(seed)))
    context.load_cert_chain(tmp_path / "own.pem")
    (tmp_path / "wrong.pem").write_text(identity_pem(other, self_signed_certificate(seed)))
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        context.load_cert_chain(tmp_path / "wrong.pem")


def test_a_certificate_is_valid_at_any_time() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_verify_locations(cadata=self_signed_certificate(bytes(32)))
    (found,) = context.get_ca_certs()
    assert (found["notBefore"], found["notAfter"]) == ("Jan  1 00:00:00 1970 GMT", "Dec 31 23:59:59 9999 GMT")
