"""Defines the sampling parameters that an engine needs; the router computes them in `text/sampling_params.py`.

Rules about text (stop strings, detokenization) stay in the router. Names and defaults are vLLM's.
"""

import msgspec


class TranscriptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The rules for the tokens of a speech transcript, as Whisper was trained with them.

    Timestamps are the tokens from `first_timestamp` on, in the order of time. With `has_timestamps` the first token is
    a timestamp, timestamps come in pairs and never decrease, and one is chosen if all of them together are likelier
    than any text.
    """

    suppressed: list[int] = []
    """Tokens that are never chosen."""
    first_suppressed: list[int] = []
    """Tokens that a transcript does not begin with."""
    first_timestamp: int
    end_token: int
    has_timestamps: bool = False
    max_first_timestamp: int | None = None
    """Largest number of the first token among the timestamps."""


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one request, as the router sends them to instances.

    The choice of a token depends only on the logits, `seed`, sequence index and position. `seed` is always set: the
    router draws one if the client gave none, so that a replayed stream continues identically. `max_tokens` counts the
    generated tokens of a sequence since its prompt, including those before a replay. `logprobs` is the number of
    alternatives per token (0: only the chosen token); None disables logprobs.
    """

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    """Token sequences that must not be generated. Named as in vLLM."""
    grammar: str | None = None
    """Grammar that the answer must follow, in llguidance's JSON form or its dialect of Lark. The router has checked it.
    """
    transcript: TranscriptSpec | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: list[int] = []
    """The alternatives of each token, instead of the most likely ones. They need `logprobs`."""
    prompt_logprobs: int | None = None
