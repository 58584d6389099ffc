import pytest

from baton_serve.contracts.wire import WireError
from baton_serve.services.instance.first_tokens import FirstToken, FirstTokens, decode_first_tokens, encode_first_tokens


def test_first_tokens_survive_the_wire() -> None:
    tokens = [FirstToken(0, 17, False), FirstToken(3, 2, True)]
    assert decode_first_tokens(encode_first_tokens(tokens, since_end_s=0.5)) == FirstTokens(tokens, 0.5)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81\xa6tokens\x01"])
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_first_tokens(payload)
