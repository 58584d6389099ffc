"""How tokens are chosen and when a sequence ends, as far as an engine must know it.

Text-level rules (stop strings, detokenisation) stay in the router. Names and defaults are vLLM's.
"""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a token depends on (`seed`, sequence index, position) and the logits alone.

    `seed` is always set: the router draws one when the client gave none, so that a replayed stream goes on as it
    would have. `max_tokens` counts generated tokens of the sequence from its prompt's end, replays included.
    `logprobs` is the number of alternatives wanted (0: the chosen token alone); None means none.
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
    """Tokens of what must not be written. vLLM's name."""
    grammar: str | None = None
    """What the answer must follow, as llguidance writes it (JSON or its dialect of Lark). The router has checked it."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
