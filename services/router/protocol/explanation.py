"""The `baton` field of an answer: where its request ran and where its time went."""

from collections.abc import Mapping

import msgspec


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The `baton` field of an answer whose request has the header `x-baton-explain: 1`. Times in seconds."""

    request_id: str
    decision: str
    prefill: str | None
    decode: str | None
    cached_tokens: Mapping[str, int]
    pulled_tokens: int = 0
    """Cached ones that the instance fetched from another one, `pulled_from`, first."""
    pulled_from: str | None = None
    pull_s: float = 0.0
    predicted_ttft_s: float
    other_ttft_s: float = 0.0
    """What was predicted where another instance would have read the prompt: `decode` itself, or a prefill instance."""
    predicted_itl_s: float
    itl_s: float | None
    admission_s: float | None
    ttft_s: float | None
    held_s: float | None = None
    """Part of `ttft_s`: the first token was held back, for the second to follow in the promised time."""
    tokenize_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    e2e_s: float
    transport: str | None = None
    handoff_s: float | None = None
    handoff_exposed_s: float | None = None
    handoff_to_step_s: float | None = None
    """From prefill's end to the first step of the decode instance."""
    transferred_blocks: int | None = None
    transferred_bytes: int | None = None
    reused_blocks: int | None = None
    handoff_bytes_per_s: float | None = None
    replays: int = 0
