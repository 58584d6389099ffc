"""Logprobs of prompts, which travel in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import EncodedLogprobs, PrefillReport, TokenLogprob, TokenLogprobs, ToRouter
from baton_serve.contracts.prompt_logprobs import decode_logprobs, encode_logprobs
from baton_serve.contracts.wire import Decoder, WireError, encode

NUMBERS = st.builds(TokenLogprob, st.integers(0, 2**31), st.floats(allow_nan=False), st.integers(0, 2**31))
STEPS = st.lists(st.none() | st.builds(TokenLogprobs, NUMBERS, st.lists(NUMBERS, max_size=3)), max_size=20)


def steps_of(num_tokens: int, num_top: int) -> list[TokenLogprobs | None]:
    one = TokenLogprobs(TokenLogprob(1, -0.5, 1), [TokenLogprob(i, -1.0, i) for i in range(num_top)])
    return [None, *[one] * (num_tokens - 1)]


@given(STEPS)
def test_a_message_with_the_logprobs_of_a_prompt_returns_them(steps: list[TokenLogprobs | None]) -> None:
    report = PrefillReport(
        request_id=RequestId("a"), queue_s=0.0, prefill_s=0.0, prompt_logprobs=encode_logprobs(steps)
    )
    message = Decoder[ToRouter](ToRouter).decode(encode(report))
    assert isinstance(message, PrefillReport) and message.prompt_logprobs is not None
    assert decode_logprobs(message.prompt_logprobs) == steps
    assert message.prompt_logprobs.num_logprobs == sum(1 + len(step.top) for step in steps if step is not None)


@pytest.mark.parametrize(("num_tokens", "num_top"), [(100_000, 0), (20_000, 20), (5, 50_000)])
def test_no_piece_has_more_logprobs_than_one_token_needs_or_a_short_step_decodes(num_tokens: int, num_top: int) -> None:
    encoded = encode_logprobs(steps_of(num_tokens, num_top))
    sizes = [len(decode_logprobs(EncodedLogprobs(0, [piece]))) * (1 + num_top) for piece in encoded.pieces]
    assert max(sizes) <= max(8192, 1 + num_top)


def test_pieces_that_are_no_logprobs_are_refused() -> None:
    with pytest.raises(WireError):
        decode_logprobs(EncodedLogprobs(1, [b"\x91\x01"]))
